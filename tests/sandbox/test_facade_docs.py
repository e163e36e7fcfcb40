"""What the documentation shows is run as it stands, and prints what it says."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import sandbox_kernel
from sandbox_kernel import (
    BlockingFiles,
    BlockingProcess,
    BlockingSandbox,
    BlockingWorkspaces,
    Sandbox,
    SandboxFiles,
    SandboxProcess,
    SandboxWorkspaces,
)
from sandbox_kernel.sandbox.blocking import open_sandbox
from tests.engines import Engines

PAGE = Path(__file__).parent.parent.parent / "docs" / "python-api.md"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
OWNERS = (Sandbox, SandboxProcess, BlockingSandbox, BlockingProcess)


def examples() -> list[tuple[str, str]]:
    """Return the name and the text of every docstring that has an example."""
    documented = {"open_sandbox": open_sandbox.__doc__ or ""}
    for owner in OWNERS:
        documented[owner.__name__] = owner.__doc__ or ""
        for name, member in vars(owner).items():
            documented[f"{owner.__name__}.{name}"] = inspect.getdoc(member) or ""
    documented["SandboxWorkspaces"] = SandboxWorkspaces.__doc__ or ""
    documented["BlockingWorkspaces"] = BlockingWorkspaces.__doc__ or ""
    # Those of its methods are the ones of `process.files`.
    documented["SandboxFiles"] = SandboxFiles.__doc__ or ""
    return [(name, text) for name, text in documented.items() if ">>> " in text]


async def run(source: str, mode: str, scope: dict[str, Any]) -> None:
    """Run code in which a cell's ``await`` may stand."""
    code = compile(source, "<example>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = types.FunctionType(code, scope)()
    if inspect.iscoroutine(result):
        await result


@pytest.fixture
def scope(engines: Engines, owner: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The public names, with the test's engine and owner configured."""
    monkeypatch.setenv("SANDBOX_DOCKER_HOST", engines.unix)
    monkeypatch.setenv("JUPYTERHUB_USER", owner)
    return {name: getattr(sandbox_kernel, name) for name in sandbox_kernel.__all__}


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


async def test_the_page_on_the_python_api_shows_what_happens(scope: dict[str, Any]) -> None:
    """Issue 3: one example after the other, as a reader would."""
    shown = blocks()
    assert len(shown) == 9
    del scope["Chunk"]  # the page has to import what it uses
    own: dict[str, Any] = {}
    for source, expected in shown:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            await run(source, "exec", own)
        assert said.getvalue().split() == expected.split(), source


@pytest.mark.parametrize(("name", "text"), [pytest.param(*e, id=e[0]) for e in examples()])
async def test_the_example_of_a_docstring_shows_what_happens(
    name: str, text: str, scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 3: of every public method, async and blocking."""
    twin = await Sandbox.create()
    async with twin:
        scope["sandbox"] = BlockingSandbox(twin) if "await " not in text else twin
        parsed = doctest.DocTestParser().get_examples(text)
        assert parsed
        for example in parsed:
            said = io.StringIO()
            # The hook that `pytest` or an earlier example may have replaced.
            monkeypatch.setattr(sys, "displayhook", sys.__displayhook__)
            with contextlib.redirect_stdout(said):
                await run(example.source, "single", scope)
            checker = doctest.OutputChecker()
            assert checker.check_output(example.want, said.getvalue(), doctest.ELLIPSIS), (
                example.source,
                said.getvalue(),
            )


def test_every_public_method_has_a_description_and_every_doing_an_example() -> None:
    """Issue 3: numpydoc, with one example each."""
    with_example = {name for name, _ in examples()}
    for owner in (Sandbox, SandboxProcess, SandboxFiles, BlockingFiles):
        for name, member in vars(owner).items():
            if name.startswith("_"):
                continue
            assert inspect.getdoc(member), f"{owner.__name__}.{name}"
            if owner not in (Sandbox, SandboxProcess) or isinstance(member, property):
                continue
            if name not in {"close", "read_now"}:
                assert f"{owner.__name__}.{name}" in with_example
