"""The scripts explain themselves and refuse what they do not know."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / command[0]), *command[1:]],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("script", ["quickstart", "test", "test-engine", "make-base-image"])
def test_each_script_explains_itself(script: str) -> None:
    done = call(f"scripts/{script}", "--help")
    assert done.returncode == 0
    assert f"scripts/{script}" in done.stdout


@pytest.mark.parametrize("script", ["quickstart", "make-base-image"])
def test_an_unknown_option_is_refused(script: str) -> None:
    done = call(f"scripts/{script}", "--ye")
    assert done.returncode != 0
    assert "--ye" in done.stderr


def test_no_tracked_file_names_a_mirror_or_registry_of_ours() -> None:
    listed = subprocess.run(
        ["git", "grep", "-lE", r"deb\.debian\.org|pypi\.org/simple"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert [name for name in listed.stdout.split() if name != "tests/test_scripts.py"] == []
