"""How the progress of long work is shown: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from sandbox_kernel.engine.images import Progress

# What a step of our Dockerfile does, in words; the first that fits is taken.
_IN_WORDS = (
    ("FROM scratch", "starting the image"),
    ("FROM ", "getting the base image"),
    ("apt-get -qq install", "installing system packages"),
    ("pip install", "installing Python packages"),
    ("apt-get clean", "cleaning up"),
    ("find / -xdev", "cleaning up"),
    ("COPY --from=", "assembling the image"),
)
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Take terminal control sequences out of text that comes from elsewhere."""
    return _ESCAPES.sub("", text)


class BuildDisplay:
    """Shows a build; an instance is the callback that `build_image` reports to.

    Parameters
    ----------
    console
        Where to show it.
    title
        What is being built.
    verbose
        Show every line of the output.
    """

    def __init__(self, console: Console, title: str, *, verbose: bool = False) -> None:
        self._console = console
        self._title = title
        self._verbose = verbose
        self._said = ""
        self._started = time.monotonic()
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, news: Progress) -> None:
        """Show one piece of news; called in the engine's thread."""
        text = plain(news.text).strip()
        if self._verbose and text:
            self._console.print(text, markup=False)
        if news.phase == "pull":
            self._say("getting the base image", None, None)
        elif text.startswith("Step "):
            step = text.partition(" : ")[2]
            words = next((words for part, words in _IN_WORDS if part in step), "")
            self._say(words or self._said or "preparing", news.current, news.total)

    def _say(self, words: str, current: int | None, total: int | None) -> None:
        self._bars.update(
            self._task,
            description=f"{self._title}: {words}",
            completed=current or 0,
            total=total,
        )
        if words != self._said and not self._console.is_terminal and not self._verbose:
            seconds = time.monotonic() - self._started
            self._console.print(f"  {self._title}: {words} ({seconds:.0f} s)", markup=False)
        self._said = words
