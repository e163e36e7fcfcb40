"""`Screen`: where a cell's runs are shown, and `watch`, which shows one until it ends.

In a notebook there is a line that says what is waited for, the output as ordinary streams, and a
footer. Where nobody looks (batch runs) or there is no place for a line that changes (terminals),
only the footer of a run that failed is shown, on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from sandbox_magics import view
from sandbox_magics.capture import STDOUT
from sandbox_magics.outlet import SERVER_PACE, PaceKeeper, Piece
from sandbox_magics.worker import Worker

if TYPE_CHECKING:
    from sandbox_magics.artifacts import Artifacts
    from sandbox_magics.result import SandboxResult
    from sandbox_magics.runs import Run

__all__ = ["Screen", "can_be_asked", "is_notebook", "live", "server_pace", "stop_button", "watch"]

_PATIENCE: Final = 0.3
"""Seconds without output after which the line appears."""

_SOON, _OFTEN, _SELDOM = 10.0, 0.5, 1.0
_AFTER_STOP: Final = 20.0
_TICK: Final = 0.25
_LIVE: Final = 1.0


def can_be_asked(shell: Any) -> bool:
    """Whether somebody is there who can answer a question, in the cell that runs now.

    A front end says so with each cell that it has run; those that run notebooks by themselves say
    no, and so does a terminal that is none.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return bool(getattr(kernel, "_allow_stdin", False))
    return bool(sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty())


def is_notebook(shell: Any) -> bool:
    """Whether outputs can change after they were shown, and somebody looks at them."""
    return getattr(shell, "kernel", None) is not None and can_be_asked(shell)


class Screen:
    """Shows a run to whoever had it started.

    Parameters
    ----------
    rich
        Whether there is a notebook, and somebody looks.
    quiet
        Whether nothing shall be shown but that something failed.
    """

    def __init__(self, rich: bool, quiet: bool = False) -> None:
        self._quiet = quiet
        self._rich = rich and not quiet
        self._line = f"sandbox-{uuid.uuid4().hex}"
        self._line_text: str | None = None
        self._line_at = 0.0

    def write(self, piece: Piece) -> None:
        """Show output."""
        self._clear_line()
        stream = sys.stdout if piece.stream == STDOUT else sys.stderr
        stream.write(piece.text)
        # A notebook's streams would wait for more.
        stream.flush()

    def waiting(self, run: Run) -> None:
        """Show what a run without output is waiting for, not too often."""
        now = time.monotonic()
        pause = _OFTEN if run.duration < _SOON else _SELDOM
        if not self._rich or run.duration < _PATIENCE or now - self._line_at < pause:
            return
        self._line_at = now
        self._set_line(f"▸ {run.waiting_for} · {view.seconds(run.duration)}")

    def end(self, result: SandboxResult) -> None:
        """Show how a run ended."""
        self._clear_line()
        if self._rich:
            _publish(view.footer_text(result), view.footer_html(result))
        elif not result.ok:
            self.say(view.footer_text(result))
        if result.artifacts is not None and not self._quiet:
            self._show_artifacts(result.artifacts)

    def _show_artifacts(self, artifacts: Artifacts) -> None:
        from IPython.display import display

        for artifact in artifacts.shown:
            display(artifact)  # type: ignore[no-untyped-call]
        if artifacts.lines:
            sys.stdout.write("".join(f"[artifact] {line}\n" for line in artifacts.lines))
            sys.stdout.flush()

    def say(self, text: str) -> None:
        """Show a line of ours, apart from the output."""
        self._clear_line()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Take away what is only shown while a run goes."""
        self._clear_line()

    def _clear_line(self) -> None:
        if self._line_text:
            self._set_line("")

    def _set_line(self, text: str) -> None:
        new = self._line_text is None
        self._line_text = text
        html = view.phase_html(text) if text else ""
        _publish(text, html, self._line, update=not new)


def _publish(text: str, html: str, display_id: str = "", update: bool = False) -> None:
    from IPython.display import publish_display_data

    publish_display_data(  # type: ignore[no-untyped-call]
        {"text/plain": text, "text/html": html},
        transient={"display_id": display_id} if display_id else None,
        update=update,
    )


@contextlib.contextmanager
def stop_button(run: Run) -> Iterator[None]:
    """Have an interrupt of this process stop a run, and a further one stop it without grace.

    Nothing is raised by it meanwhile: an exception in the midst of anything could break off just
    the stop. Elsewhere than in the main thread there are no interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: run.stop("interrupted"))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


async def keep_shown(run: Run, publish: Callable[[bool], None]) -> None:
    """Keep the display of a run in the background up to date until it has ended.

    Parameters
    ----------
    run
        The run.
    publish
        Shows it, for the first time or anew; in another thread, since it may wait.
    """
    shown = ""
    while True:
        over = not run.running
        html = view.run_html(run)
        if html != shown:
            await asyncio.to_thread(publish, bool(shown))
            shown = html
        if over:
            return
        await asyncio.sleep(_LIVE)


def live(run: Run) -> None:
    """Show a run in the background in a display that changes with it; returns at once."""
    display_id = f"sandbox-{uuid.uuid4().hex}"
    # Of the cell that started it, also when others have run since.
    context = contextvars.copy_context()

    def publish(update: bool) -> None:
        context.run(_publish, repr(run), view.run_html(run), display_id, update)

    publish(False)
    Worker.current().submit(keep_shown(run, lambda _: publish(True)))


def watch(run: Run, screen: Screen) -> None:
    """Show a run until it has ended, or does not although it was told to stop."""
    limit_told = False
    try:
        while True:
            # Before looking, so that what comes in between is not missed.
            run.news.clear()
            over = not run.running
            shown = _write_due(run, screen, everything=over)
            if run.hidden and not limit_told and run.delay() is None:
                limit_told = True
                screen.say(_limit_text(run))
            if run.stopping and (over or run.stopping > _AFTER_STOP):
                return
            if over and run.delay() is None:
                return
            if not shown and not run.wrote:
                screen.waiting(run)
            delay = run.delay()
            run.news.wait(_TICK if delay is None else max(min(delay, _TICK), 0.001))
    finally:
        screen.close()


def _write_due(run: Run, screen: Screen, everything: bool = False) -> bool:
    while run.notes:
        screen.say(run.notes.popleft())
    pieces = run.due(everything)
    for piece in pieces:
        screen.write(piece)
    return bool(pieces)


def _limit_text(run: Run) -> str:
    shown = view.memory(run.request.display_limit)
    going = "; the run goes on" if run.running else ""
    return (
        f"[output beyond {shown} is not shown{going}; what is kept of it is in _sandbox.stdout and "
        "_sandbox.stderr]"
    )


_pace: PaceKeeper | None = None


def server_pace(environ: Any) -> PaceKeeper | None:
    """Return the bound on output that a Jupyter server sets, when this kernel is one of a server.

    Servers name the notebook to the kernels that they start, and nobody else does.
    """
    global _pace
    if "JPY_SESSION_NAME" not in environ:
        return None
    if _pace is None:
        _pace = PaceKeeper(SERVER_PACE, time.monotonic())
    return _pace
