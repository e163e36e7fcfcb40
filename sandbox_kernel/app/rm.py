"""``jupyter sandbox rm``: end sandboxes (B13)."""

from __future__ import annotations

from typing import Any

from traitlets import Bool

from sandbox_kernel.app.command import ENGINE_FLAGS
from sandbox_kernel.app.each import EachCommand
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError, SandboxGoneError
from sandbox_kernel.sandbox.found import SandboxInfo
from sandbox_kernel.sandbox.visit import remove_found

_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("f", "force"): ({"RmApp": {"force": True}}, "Say nothing of those that are not there."),
}

_EXAMPLES = """\
jupyter sandbox rm 3f2a
jupyter sandbox rm $(jupyter sandbox ls -q)
"""


class RmApp(EachCommand):
    """``jupyter sandbox rm``."""

    name = "jupyter-sandbox-rm"
    description = """End sandboxes with everything that runs in them, for everybody who uses them,
    and remove them. Persistent workspaces stay; see jupyter sandbox workspaces."""
    examples = _EXAMPLES

    flags = _FLAGS
    done = "removed"

    force = Bool(False, help="Say nothing of those that are not there. Since 0.2.").tag(config=True)

    async def do(self, engine: Engine, info: SandboxInfo) -> None:
        """Remove one."""
        await remove_found(engine, info)

    def forgives(self, error: SandboxError) -> bool:
        """Forgive that it is not there, if that was asked for."""
        return self.force and isinstance(error, SandboxGoneError)
