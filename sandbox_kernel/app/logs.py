"""``jupyter sandbox logs``: what happened to a sandbox, and why it ended (K4)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sandbox_kernel.app.command import ENGINE_FLAGS
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.sandboxes import SandboxesCommand
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxGoneError
from sandbox_kernel.sandbox.found import choose, list_sandboxes
from sandbox_kernel.sandbox.past import PastSandbox, past_sandboxes

_FLAGS: dict[Any, Any] = ENGINE_FLAGS

_EXAMPLES = """\
jupyter sandbox logs 3f2a
jupyter sandbox logs 3f2a --json
"""


class LogsApp(SandboxesCommand):
    """``jupyter sandbox logs``."""

    name = "jupyter-sandbox-logs"
    description = """Tell what the engine remembers of a sandbox, also of one that has ended, and
    why it ended. Engines remember their last few hundred events only. What programs wrote is
    not kept; it went to whoever ran them."""
    examples = _EXAMPLES
    arguments = "SANDBOX"

    flags = _FLAGS

    def take(self, words: list[str]) -> None:
        """Take the sandbox."""
        if len(words) != 1:
            self._usage("needs one sandbox: its id or the beginning of it, its name, or a key")
        self._which = words[0]

    def run(self) -> int:
        """Tell it."""
        past, state = self.at_engine(self._look)
        if self.json_output:
            self.print_json(
                {
                    "ok": True,
                    "id": past.id,
                    "name": past.name,
                    "state": state or None,
                    "happened": [{"time": t.isoformat(), "what": w} for t, w in past.happened],
                    "ended": past.ended and asdict(past.ended),
                }
            )
            return 0
        for moment, what in past.happened:
            self.out.print(f"{moment:%Y-%m-%d %H:%M:%S}  {what}", markup=False)
        if past.ended is not None:
            self.out.print(plain(past.ended.text), markup=False)
        elif state:
            self.out.print(f"It is {state}.")
        else:
            self.out.print("It is gone, and the engine does not remember why.")
        return 0

    async def _look(self, engine: Engine) -> tuple[PastSandbox, str]:
        owner = self.whose()
        there = await list_sandboxes(engine, owner)
        past = await past_sandboxes(engine, owner)
        try:
            info = choose(there, self._which)
        except SandboxGoneError as error:
            try:
                return choose(past, self._which), ""
            except SandboxGoneError:
                raise error from None
        for one in past:
            if one.id == info.id:
                return one, info.state
        # Other containers' events have pushed its own out.
        nothing = PastSandbox(info.id, info.name, info.owner, info.workspace, (), None)
        return nothing, info.state
