"""The wheel holds everything that runs, and works outside of the repository."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(300)

RESOURCES = [
    ("sandbox_kernel.images.python", "Dockerfile"),
    ("sandbox_kernel.images.r", "Dockerfile"),
    ("sandbox_kernel.images.python", "files/sandboxed-ipykernel"),
    ("sandbox_kernel.images.python", "files/ipython_kernel_config.py"),
    ("sandbox_kernel.kernel", "logos/logo-64x64.png"),
    ("sandbox_kernel.kernel", "relay.py"),
    ("sandbox_kernel.notebooks", "quickstart.ipynb"),
    ("sandbox_kernel.sandbox", "firewall.nft"),
    ("sandbox_kernel.sandbox", "firewall.sh"),
    ("sandbox_kernel.sandbox", "lease.sh"),
    ("sandbox_kernel.sandbox", "reach.py"),
    ("sandbox_kernel.sandbox", "seccomp.json"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, as a release is."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    source = folder / "source"
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; only what it depends on comes from outside."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", f"--python={folder}", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], stdin=subprocess.DEVNULL, check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    # A line of a .pth file adds a folder but not the .pth files in it, so the editable
    # installation that the tests run from stays out.
    outside = [p for p in sys.path if "site-packages" in p] or site.getsitepackages()
    (packages / "dependencies.pth").write_text("\n".join(outside) + "\n")
    return folder


def run(environment: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=environment,
        env={"PATH": os.environ["PATH"], "HOME": str(environment)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_is_named_in_the_project() -> None:
    """A folder that is forgotten there is missing from the wheel only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "sandbox_kernel").rglob("__init__.py")
    }
    named = set(project["tool"]["setuptools"]["packages"])
    assert named == there | {"sandbox_magics", "sandbox_kernel.notebooks"}


def test_the_wheel_holds_the_packages_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"sandbox_kernel", "sandbox_magics"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.endswith(".pyc") for name in names)


def test_everything_is_found_in_an_environment_outside_of_the_repository(environment: Path) -> None:
    code = (
        "import sandbox_kernel, sandbox_magics, sys\n"
        "from importlib.resources import files\n"
        "for module in (sandbox_kernel, sandbox_magics):\n"
        "    assert module.__file__.startswith(sys.prefix), module.__file__\n"
        f"for package, name in {RESOURCES}:\n"
        "    assert files(package).joinpath(*name.split('/')).read_bytes(), name\n"
        "print('all there')\n"
    )
    assert run(environment, str(environment / "bin/python"), "-c", code) == "all there\n"


def test_jupyter_finds_the_provisioner_and_the_command(environment: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "[found] = entry_points(group='jupyter_client.kernel_provisioners',"
        " name='sandbox-provisioner')\n"
        "print(found.load().__name__)\n"
    )
    assert "SandboxProvisioner" in run(environment, str(environment / "bin/python"), "-c", code)
    assert run(environment, str(environment / "bin/jupyter-sandbox"), "--version").strip()


def test_a_kernel_can_be_installed_from_there(environment: Path) -> None:
    program = str(environment / "bin/jupyter-sandbox")
    out = run(environment, program, "install", "--json", "--engine=/nonexistent.sock")
    assert str(environment) in out
    assert (environment / "share/jupyter/kernels/sandbox-python/kernel.json").is_file()
