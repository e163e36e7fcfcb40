"""``jupyter sandbox exec``: a program in a sandbox that runs already (B8, C1)."""

from __future__ import annotations

from sandbox_kernel.app.programs import ProgramCommand
from sandbox_kernel.app.streaming import Signals, run_guarded
from sandbox_kernel.sandbox.visit import visit

_EXAMPLES = """\
jupyter sandbox exec 3f2a ps
jupyter sandbox exec -it 3f2a bash
jupyter sandbox exec --shell 'du -sh .' 3f2a
"""


class ExecApp(ProgramCommand):
    """``jupyter sandbox exec``."""

    name = "jupyter-sandbox-exec"
    description = """Run a program in a running sandbox, as the unprivileged user of its code; a
    paused sandbox is resumed. SANDBOX is the beginning of its id, its name or the key of its
    workspace. Exit codes are those of jupyter sandbox run."""
    examples = _EXAMPLES
    arguments = "SANDBOX PROGRAM [ARGUMENT…]"

    def take(self, words: list[str]) -> None:
        """Take the sandbox and the program."""
        if not words:
            self._usage("needs a sandbox and a program (see --help)")
        self._which = words[0]
        self.take_program(words[1:])

    def run(self) -> int:
        """Run it."""
        info = self.find(self._which)
        timeouts = self.settle({"image": info.image}).timeouts
        options = self.start_options(timeouts)

        async def work(signals: Signals) -> int:
            async with visit(self.endpoint(), info, timeouts, {}) as there:
                return await self.talk(there.start(self._argv, **options), signals)

        return run_guarded(work)
