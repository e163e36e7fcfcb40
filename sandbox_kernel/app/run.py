"""``jupyter sandbox run``: one program in a fresh sandbox that is gone afterwards (C2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from traitlets import Float, Unicode

from sandbox_kernel.app.display import BuildDisplay, plain
from sandbox_kernel.app.programs import PROGRAM_ALIASES, ProgramCommand
from sandbox_kernel.app.streaming import Signals, run_guarded
from sandbox_kernel.app.verbatim import Verbatims
from sandbox_kernel.engine.images import Progress, ProgressCallback
from sandbox_kernel.sandbox.facade import Sandbox
from sandbox_kernel.sandbox.order import Order
from sandbox_kernel.sandbox.setup import prepared

_ALIASES: dict[Any, Any] = {
    **PROGRAM_ALIASES,
    "image": ("RunApp.image", "Image to run from (default: the configured one)."),
    "network": ("RunApp.network", "none, internal or egress (default: as configured)."),
    "workspace": ("RunApp.workspace", "Key of a workspace that stays; any text."),
    ("m", "memory"): ("RunApp.memory", "Memory, as in 512M or 2G."),
    "cpus": ("RunApp.cpus", "Processors, as in 1.5."),
    "pull": ("RunApp.pull", "When to pull the image: never, missing or always."),
    "setup": ("RunApp.setup", "A command line to run as root before; may be repeated."),
}

_EXAMPLES = """\
jupyter sandbox run python3 -c 'print(6 * 7)'
jupyter sandbox run --shell 'sort -n | tail -1' < numbers.txt
jupyter sandbox run -it bash
jupyter sandbox run --workspace thesis -e TOKEN --timeout 3600 python3 train.py
"""


class RunApp(ProgramCommand):
    """``jupyter sandbox run``."""

    name = "jupyter-sandbox-run"
    description = """Run a program in a fresh sandbox, which is gone afterwards whatever happens.
    Its output, its input when that is no terminal, and its exit code are passed on. Exit codes of
    our own: 124 for a timeout, 125 for a failure of ours or of the engine, 126 and 127 for a
    program that cannot be run or is not there."""
    examples = _EXAMPLES
    arguments = "PROGRAM [ARGUMENT…]"

    aliases = _ALIASES

    image = Unicode("", help="Image to run from. Since 0.2.").tag(config=True)
    network = Unicode("", help="Network tier. Since 0.2.").tag(config=True)
    workspace = Unicode("", help="Key of a persistent workspace. Since 0.2.").tag(config=True)
    memory = Unicode("", help="Memory, as in 2G. Since 0.2.").tag(config=True)
    cpus = Float(None, allow_none=True, help="Processors. Since 0.2.").tag(config=True)
    pull = Unicode("", help="When to pull the image. Since 0.2.").tag(config=True)
    setup = Verbatims(help="Command lines to run as root before. Since 0.2.").tag(config=True)

    def take(self, words: list[str]) -> None:
        """Take the program."""
        self.take_program(words)

    def run(self) -> int:
        """Run it."""
        order = self.settle(self._asked())
        options = self.start_options(order.timeouts)

        async def work(signals: Signals) -> int:
            async with contextlib.AsyncExitStack() as stack:
                ready = await self._prepared(order, stack)
                with self._pulling(ready.spec.image) as hear:
                    opening = Sandbox.from_order(ready, owner=self.whose(), progress=hear)
                    sandbox = await stack.enter_async_context(opening)
                return await self.talk(sandbox.start(self._argv, **options), signals)

        return run_guarded(work)

    def _asked(self) -> dict[str, object]:
        asked: dict[str, object] = {
            "image": self.image or None,
            "network": self.network or None,
            "mem_limit": self.memory or None,
            "cpu_limit": self.cpus,
            "pull_policy": self.pull or None,
        }
        if self.workspace:
            asked |= {"durability": "persistent", "workspace": self.workspace}
        return asked

    @contextlib.contextmanager
    def _pulling(self, image: str) -> Iterator[ProgressCallback]:
        """Show a pull of the image; where there is none, nothing."""
        display, is_shown = BuildDisplay(self.err, image), False
        with contextlib.ExitStack() as shown:

            def hear(news: Progress) -> None:
                nonlocal is_shown
                if not is_shown:
                    shown.enter_context(display)
                    is_shown = True
                display(news)

            yield hear

    async def _prepared(self, order: Order, stack: contextlib.AsyncExitStack) -> Order:
        if not self.setup:
            return order

        def hear(line: str) -> None:
            self.err.print(plain(line), markup=False)

        preparing = prepared(
            order, self.setup, owner=self.whose(), timeout=order.timeouts.most, hear=hear
        )
        return await stack.enter_async_context(preparing)
