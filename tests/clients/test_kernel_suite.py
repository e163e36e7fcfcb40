"""The suite of jupyter_kernel_test, through the blocking manager, by each way to the engine."""

from __future__ import annotations

import unittest
from typing import ClassVar

import jupyter_kernel_test
import pytest


class SandboxKernelTests(jupyter_kernel_test.KernelTests):
    """What the suite asks of a kernel; it is run by the test below."""

    __test__ = False
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples: ClassVar = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples: ClassVar = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n"]
    incomplete_code_samples: ClassVar = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples: ClassVar = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise ValueError"
    code_execute_result: ClassVar = [{"code": "1+2+3", "result": "6"}]
    code_display_data: ClassVar = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))",
         "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('\\\\frac{1}{2}'))",
         "mime": "text/latex"},
    ]  # fmt: skip
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


@pytest.mark.timeout(240)
def test_the_kernel_passes_the_suite_for_kernels(
    kernel_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K1: nothing fails and nothing but what the suite itself leaves out is skipped."""
    monkeypatch.setattr(SandboxKernelTests, "kernel_name", kernel_name)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(SandboxKernelTests)
    result = unittest.TestResult()
    suite.run(result)
    assert result.failures + result.errors == []
    assert result.testsRun >= 12
    assert len(result.skipped) <= 1
