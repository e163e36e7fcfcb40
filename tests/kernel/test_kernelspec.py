"""Kernelspecs of sandboxed kernels: content, places, and what happens without a provisioner."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.kernel.kernelspec import (
    COMMAND,
    DEFAULT_NAME,
    PROVISIONER,
    KernelRequest,
    install_kernelspec,
    installed_specs,
)


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Jupyter looks into for kernels."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share/jupyter"))
    return tmp_path


def read(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "kernel.json").read_text()))


def test_the_spec_names_the_provisioner_and_only_the_given_values(prefix: Path) -> None:
    """K1, K7"""
    config = {"image": "x:1", "mem_limit": "2G"}
    written = read(install_kernelspec(KernelRequest(config=config), prefix=str(prefix)))
    assert written["interrupt_mode"] == "message"
    assert written["language"] == "python"
    assert written["metadata"] == {
        "debugger": True,
        "kernel_provisioner": {"provisioner_name": PROVISIONER, "config": config},
        "supported_encryption": ["curve"],
    }


def test_jupyter_finds_the_spec_with_its_logos(prefix: Path) -> None:
    """K1"""
    folder = install_kernelspec(KernelRequest(), prefix=str(prefix))
    spec = KernelSpecManager().get_kernel_spec(DEFAULT_NAME)
    assert spec.display_name == "Python 3 (sandbox)"
    for name in ("logo-32x32.png", "logo-64x64.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "logo-svg.svg").read_text()
    assert DEFAULT_NAME in [spec.name for spec in installed_specs()]


def test_installing_again_replaces_the_spec(prefix: Path) -> None:
    """K1"""
    install_kernelspec(KernelRequest(config={"image": "old:1"}), prefix=str(prefix))
    install_kernelspec(KernelRequest(config={"image": "new:1"}), prefix=str(prefix))
    [spec] = [s for s in installed_specs() if s.folder.startswith(str(prefix))]
    assert spec.config == {"image": "new:1"}


def test_a_kernel_of_somebody_else_is_not_overwritten(prefix: Path) -> None:
    """K1"""
    folder = prefix / "share/jupyter/kernels/theirs"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text('{"argv": ["x"], "display_name": "Theirs"}')
    with pytest.raises(SandboxSpecRejectedError, match="another kernel"):
        install_kernelspec(KernelRequest(name="theirs"), prefix=str(prefix))
    assert read(folder)["display_name"] == "Theirs"


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", "ü", "a\n"])
def test_a_name_that_jupyter_would_not_take_is_refused(name: str) -> None:
    """K1"""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        KernelRequest(name=name)
    assert caught.value.setting == "name"


def test_a_folder_that_cannot_be_written_gives_one_clear_error(tmp_path: Path) -> None:
    """K1"""
    (tmp_path / "share").write_text("a file in the way")
    with pytest.raises(SandboxError, match="cannot be written"):
        install_kernelspec(KernelRequest(), prefix=str(tmp_path))


def test_a_client_that_ignores_provisioners_cannot_start_the_kernel_on_the_host() -> None:
    """K1: some clients run the command of a kernelspec themselves."""
    assert not Path(COMMAND[0]).exists()
    with pytest.raises(FileNotFoundError):
        subprocess.run(COMMAND, check=False)


def test_a_client_that_puts_its_own_python_first_starts_no_kernel(tmp_path: Path) -> None:
    """K1: some editors replace the program of a kernelspec by the Python that was chosen."""
    import sys

    connection = tmp_path / "kernel.json"
    connection.write_text("{}")
    command = [sys.executable, *(c.format(connection_file=connection) for c in COMMAND[1:])]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode != 0
    assert "nknown option" in done.stderr
