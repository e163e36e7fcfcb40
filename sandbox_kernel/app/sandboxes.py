"""What the commands about sandboxes share: whose they are, and how a person names one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from traitlets import Unicode

from sandbox_kernel.app.command import ENGINE_ALIASES, SandboxCommand
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.sandbox.found import SandboxInfo, choose, list_sandboxes
from sandbox_kernel.sandbox.owner import current_owner

__all__ = ["OWNER_ALIASES", "SandboxesCommand"]

T = TypeVar("T")

OWNER_ALIASES: dict[Any, Any] = {
    **ENGINE_ALIASES,
    "owner": ("SandboxesCommand.owner", "Whose sandboxes (default: your own)."),
}


class SandboxesCommand(SandboxCommand):
    """Base of the commands about sandboxes that are there."""

    aliases = OWNER_ALIASES

    owner = Unicode("", help="Whose sandboxes; by default one's own. Since 0.2.").tag(config=True)

    def whose(self) -> str:
        """Return the owner whose sandboxes are meant."""
        return self.owner or current_owner()

    def at_engine(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """Do something in the loop of the engine thread, and wait for it."""
        endpoint, thread = self.endpoint(), EngineThread.current()

        async def do() -> T:
            return await work(await thread.engine(endpoint))

        return thread.run(do)

    def sandboxes(self) -> list[SandboxInfo]:
        """Return the sandboxes of the owner."""
        owner = self.whose()
        return self.at_engine(lambda engine: list_sandboxes(engine, owner))

    def find(self, which: str) -> SandboxInfo:
        """Return the one that a person means.

        Raises
        ------
        SandboxGoneError, SandboxConflictError
            There is none, or several can be meant.
        """
        return choose(self.sandboxes(), which)
