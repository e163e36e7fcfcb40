"""A workspace that outlives the session, and is shared by notebooks."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.sandbox.workspaces import Workspaces
from tests.engines import Engines
from tests.magics.conftest import Open
from tests.magics.notebook import sandboxes


@pytest.fixture
async def key(engine_unix: Endpoint, prefix: str, kernel_env: dict[str, str]) -> AsyncIterator[str]:
    """The key of a workspace, which is removed at the end."""
    name = f"magics {uuid.uuid4().hex} é"
    yield name
    async with Engine(engine_unix) as engine:
        await Workspaces(engine, kernel_env["JUPYTERHUB_USER"], prefix=prefix).remove(name)


def test_files_outlive_the_session(open_one: Open, key: str) -> None:
    """B6: after the session, and after the kernel."""
    with open_one() as notebook:
        notebook.run(f"%config SandboxMagics.workspace = {key!r}", ok=True)
        notebook.run("%%sandbox\necho kept > file", ok=True)
        assert "durable" in notebook.run("%sandbox_status", ok=True).value
        notebook.run("%sandbox_kill --session -y", ok=True)
        assert notebook.run("%%sandbox\ncat file", ok=True).out == "kept\n"
    with open_one() as notebook:
        assert notebook.run("%%sandbox\nls", ok=True).out == ""
        changed = notebook.run(f"%config SandboxMagics.workspace = {key!r}\n%sandbox_ls")
        assert changed.error == ("", "")
        told = notebook.run("%%sandbox\nls", ok=True)
        assert "holds for the next session" in told.err
        notebook.run("%sandbox_kill --session -y", ok=True)
        assert notebook.run("%%sandbox\ncat file", ok=True).out == "kept\n"


def test_two_notebooks_share_one_volume(
    open_one: Open, key: str, engines: Engines, prefix: str
) -> None:
    """Acceptance: two notebooks on one volume; one that ends leaves it to the other."""
    use = f"%config SandboxMagics.workspace = {key!r}"
    with open_one() as one:
        one.run(use, ok=True)
        one.run("%%sandbox\necho from one > file", ok=True)
        with open_one() as other:
            other.run(use, ok=True)
            assert other.run("%%sandbox\ncat file", ok=True).out == "from one\n"
            assert len(sandboxes(engines, prefix)) == 1
            other.run("%%sandbox --bg\nsleep 1000", ok=True)
        assert one.run("%%sandbox\ncat file", ok=True).out == "from one\n"
