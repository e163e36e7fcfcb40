"""The package's public names: there, typed, and cheap until they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sandbox_kernel
from sandbox_kernel import errors

ROOT = Path(sandbox_kernel.__file__).parent.parent
HEAVY = ("aiodocker", "aiohttp", "asyncio", "traitlets", "jupyter_client", "zmq", "tornado", "rich")


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_loads_nothing_else() -> None:
    """Issue 3: until a name is used, no engine, no Jupyter, not even the errors."""
    code = (
        "import sys, sandbox_kernel\n"
        "dir(sandbox_kernel)\n"
        f"print([m for m in sys.modules if m.partition('.')[0] in {HEAVY}"
        " or m.startswith('sandbox_kernel.')])\n"
        "sandbox_kernel.SandboxError, sandbox_kernel.SandboxSpec\n"
        "print('aiodocker' in sys.modules)\n"
        "sandbox_kernel.Sandbox\n"
        "print('aiodocker' in sys.modules)\n"
    )
    assert python(code).splitlines()[0] == "[]"
    assert python(code).splitlines()[2] == "True"


def test_errors_can_be_named_without_the_engine() -> None:
    """Issue 3: a handler of errors need not load what it has not used."""
    code = "import sys; from sandbox_kernel import SandboxError; print('aiohttp' in sys.modules)"
    assert python(code) == "False\n"


@pytest.mark.parametrize("name", sandbox_kernel.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """Issue 3: listed, found, and shown by completion."""
    assert getattr(sandbox_kernel, name).__name__ == name
    assert name in dir(sandbox_kernel)


def test_every_error_is_public() -> None:
    """Issue 3: whoever calls can name what is raised."""
    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.SandboxError)
    }
    assert names <= set(sandbox_kernel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Sandbax'"):
        sandbox_kernel.Sandbax  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.timeout(180)
def test_type_checkers_see_the_names_and_the_twins_types(tmp_path: Path) -> None:
    """Issue 3: `mypy --strict` on a caller's code."""
    caller = tmp_path / "caller.py"
    caller.write_text(
        "from sandbox_kernel import BlockingSandbox, Chunk, Sandbox, SandboxSpec, open_sandbox\n"
        "async def use() -> None:\n"
        "    async with Sandbox.create(SandboxSpec()) as sandbox:\n"
        "        reveal_type(await sandbox.run(['ls']))\n"
        "        async with sandbox.start(['ls']) as process:\n"
        "            async for item in process.output:\n"
        "                reveal_type(item)\n"
        "with open_sandbox(owner='me') as blocking:\n"
        "    reveal_type(blocking.run(['ls'], timeout=3))\n"
        "    with blocking.start(['ls']) as running:\n"
        "        for one in running.output:\n"
        "            reveal_type(one)\n"
        "    blocking.run(['ls'], timeuot=3)\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*mypy, str(caller)],
        cwd=tmp_path,
        # An editable installation is not visible to mypy.
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    # Not errors in the package: of an installed one they would not be shown.
    lines = [x.partition(" ")[2] for x in done.stdout.splitlines() if x.startswith("caller.py:")]
    revealed = [line.partition('"')[2].rstrip('"') for line in lines if "Revealed" in line]
    package = "sandbox_kernel.process.result"
    result, item = f"{package}.RunResult", f"{package}.Chunk | {package}.Exit"
    assert revealed == [result, item, result, item], done.stdout
    errors_ = [line for line in lines if line.startswith("error")]
    assert len(errors_) == 1, done.stdout
    assert "timeuot" in errors_[0]
