"""A command that does the same to each sandbox that it is given: rm, pause, resume."""

from __future__ import annotations

from typing import Any

from sandbox_kernel.app.command import ENGINE_FLAGS, error_record
from sandbox_kernel.app.sandboxes import SandboxesCommand
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.sandbox.found import SandboxInfo, choose

__all__ = ["EachCommand"]


class EachCommand(SandboxesCommand):
    """Base of them; what cannot be done to one does not keep it from the others."""

    arguments = "SANDBOX…"
    flags: dict[Any, Any] = ENGINE_FLAGS

    done = ""
    """What has been done to a sandbox, as the key of ``--json``."""

    def take(self, words: list[str]) -> None:
        """Take the sandboxes."""
        if not words:
            self._usage("needs a sandbox: its id or the beginning of it, its name, or a key")
        self._words = list(dict.fromkeys(words))

    async def do(self, engine: Engine, info: SandboxInfo) -> None:
        """Do it to one; runs in the engine's loop."""
        raise NotImplementedError

    def forgives(self, error: SandboxError) -> bool:
        """Say whether an error is none."""
        return False

    def run(self) -> int:
        """Do it to each, and name it as it was named."""
        infos = self.sandboxes()
        done: list[str] = []
        failed: list[dict[str, object]] = []
        for word in self._words:
            try:
                info = choose(infos, word)
                self.at_engine(lambda engine, info=info: self.do(engine, info))  # type: ignore[misc]
            except SandboxError as error:
                if self.forgives(error):
                    continue
                failed.append({"sandbox": word, **error_record(error)})
                if not self.json_output:
                    self.fail(error)
                continue
            done.append(info.id)
            if not self.json_output:
                self.out.print(word, markup=False)
        if self.json_output:
            self.print_json({"ok": not failed, self.done: done, "errors": failed})
        return 1 if failed else 0
