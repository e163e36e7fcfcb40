"""A kernelspec that the programs of others find: each test has a Jupyter path of its own."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.kernel.kernelspec import KernelRequest, install_kernelspec
from tests.kernel.conftest import engine_config

NAME = "sandbox-under-test"


@pytest.fixture
def kernel_name(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a sandboxed kernel on the test engine, by each way to it."""
    prefix = tmp_path / "prefix"
    install_kernelspec(
        KernelRequest(name=NAME, display_name="under test", config=engine_config(endpoint)),
        prefix=str(prefix),
    )
    monkeypatch.setenv("JUPYTER_PATH", str(prefix / "share" / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return NAME


@pytest.fixture
def notebook(tmp_path: Path, kernel_name: str) -> Path:
    """A notebook with a stream, a rich result, a plot, a table and a widget."""
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": kernel_name, "display_name": "under test"}}
    )
    book.cells = [
        nbformat.v4.new_code_cell("import os\nprint('uid', os.getuid())"),
        nbformat.v4.new_code_cell("from IPython.display import HTML\nHTML('<b>bold</b>')"),
        nbformat.v4.new_code_cell(
            "import matplotlib.pyplot as plt\n_ = plt.plot([1, 4, 9])", metadata={"tags": ["plot"]}
        ),
        nbformat.v4.new_code_cell("import pandas as pd\npd.DataFrame({'a': [1, 2]}).sum()"),
        nbformat.v4.new_code_cell("open('/workspace/x', 'w').write('kept')"),
    ]
    path = tmp_path / "book.ipynb"
    nbformat.write(book, path)
    return path
