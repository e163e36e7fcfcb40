"""``jupyter sandbox pause`` and ``resume``: freeze sandboxes with their memory, and thaw (B8)."""

from __future__ import annotations

from typing import Any

from traitlets import Float

from sandbox_kernel.app.each import EachCommand
from sandbox_kernel.app.sandboxes import OWNER_ALIASES
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.sandbox.found import SandboxInfo
from sandbox_kernel.sandbox.pause import LONGEST_PAUSE
from sandbox_kernel.sandbox.visit import pause_found, resume_found

_ALIASES: dict[Any, Any] = {
    **OWNER_ALIASES,
    "longest": ("PauseApp.longest", "Seconds after which it may be removed (default: a day)."),
}

_EXAMPLES = """\
jupyter sandbox pause 3f2a
jupyter sandbox resume 3f2a
"""


class PauseApp(EachCommand):
    """``jupyter sandbox pause``."""

    name = "jupyter-sandbox-pause"
    description = """Freeze sandboxes with everything in their memory. The next command in one
    resumes it; one that nobody resumes in time may be removed."""
    examples = _EXAMPLES

    aliases = _ALIASES
    done = "paused"

    longest = Float(
        LONGEST_PAUSE, min=1, help="Seconds after which it may be removed. Since 0.2."
    ).tag(config=True)

    async def do(self, engine: Engine, info: SandboxInfo) -> None:
        """Pause one."""
        await pause_found(engine, info, self.longest)


class ResumeApp(EachCommand):
    """``jupyter sandbox resume``."""

    name = "jupyter-sandbox-resume"
    description = "Let paused sandboxes go on."
    examples = _EXAMPLES

    done = "resumed"

    async def do(self, engine: Engine, info: SandboxInfo) -> None:
        """Resume one."""
        await resume_found(engine, info)
