"""How runs, results and tables look: text for terminals and logs, HTML for notebooks.

The words are the same in both; colour and shape only repeat what they say. Everything that comes
from a sandbox or a person is cleaned and escaped here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from sandbox_magics.text import clean

if TYPE_CHECKING:
    from sandbox_magics.result import SandboxResult
    from sandbox_magics.runs import Run

__all__ = [
    "cell_name",
    "command_text",
    "escaped",
    "footer_html",
    "footer_text",
    "memory",
    "one_line",
    "result_html",
    "run_html",
    "seconds",
    "table_html",
]

_COLLAPSED: Final = 64 * 1024
_TAIL: Final = 20
_COLOURS: Final = {"✓": "#2e7d32", "✗": "#c62828", "⏱": "#b26a00", "■": "#b26a00", "☠": "#c62828"}

# Only what fits light and dark themes: the colour of the mark; all else is inherited.
_STYLE: Final = "font-family:var(--jp-code-font-family,monospace);font-size:0.9em"
_FAINT: Final = "opacity:0.7"

_WORDS: Final = {
    "timeout": ("⏱", "stopped"),
    "idle-timeout": ("⏱", "stopped"),
    "interrupted": ("■", "stopped"),
    "killed": ("■", "killed"),
    "out-of-memory": ("☠", "out of memory"),
    "pids-limit": ("☠", "out of processes"),
    "disk-full": ("☠", "disk full"),
    "output-limit": ("■", "stopped: too much output"),
    "engine-lost": ("✗", "the engine was lost; it may still be running"),
    "start-failed": ("✗", "could not be started"),
    "unknown": ("✗", "how it ended is not known"),
}


# -- amounts ------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """Write a duration.

    Examples
    --------
    >>> seconds(0.25), seconds(3.21), seconds(64), seconds(7500)
    ('0.25 s', '3.2 s', '1m04s', '2h05m')
    """
    if value < 0.995:
        return f"{value:.2f} s"
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def memory(size: float) -> str:
    """Write an amount of bytes, in powers of 1000.

    Examples
    --------
    >>> memory(999), memory(41_300_000), memory(2_150_000_000)
    ('999 B', '41 MB', '2.2 GB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.{0 if size / factor >= 10 else 1}f} {unit}"
    return f"{size:.0f} B"


def plural(count: int, noun: str) -> str:
    """Write a number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


# -- text that comes from elsewhere -------------------------------------------------------------


def one_line(text: str, limit: int = 200) -> str:
    """Return text for one line of a table: without control characters, and not too long.

    What has no shape of its own, or turns the direction of writing, is shown by its number.
    """
    shown = "".join(
        c if c.isprintable() else {"\n": "⏎", "\t": " "}.get(c, ascii(c)[1:-1])
        for c in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def command_text(argv: Sequence[str], limit: int = 60) -> str:
    """Return a command for one line; of a script the first line that does something."""
    if len(argv) >= 3 and argv[-2] == "-c":
        lines = (line.strip() for line in argv[-1].splitlines())
        script = next((line for line in lines if line and not line.startswith("#")), "")
        return one_line(script, limit)
    return one_line(" ".join(argv), limit)


def cell_name(number: object) -> str:
    """Return what a run of a cell is called that has no name."""
    return f"[{number}]" if number else "cell"


def escaped(text: str, limit: int | None = None) -> str:
    """Return text for HTML, in one line when there is a limit."""
    return html.escape(clean(text) if limit is None else one_line(text, limit))


# -- runs ---------------------------------------------------------------------------------------


def ending(result: SandboxResult) -> tuple[str, str]:
    """Return the mark and the words for how a run ended."""
    if result.reason == "finished":
        if result.returncode is None:
            return "✗", "exit code not known"
        return ("✓" if result.returncode == 0 else "✗"), f"exit {result.returncode}"
    mark, words = _WORDS[result.reason]
    if result.detail:
        detail = one_line(result.detail)
        words = f"{words} {detail}" if mark == "⏱" else f"{words} ({detail})"
    if result.survivors:
        words += "; something of it may still run"
    return mark, words


def footer_parts(result: SandboxResult) -> list[str]:
    """Return what the footer says after the ending."""
    parts = [seconds(result.duration)]
    if result.peak_memory is not None:
        parts.append(f"{memory(result.peak_memory)} peak")
    if result.network != "none":
        parts.append(f"network {result.network}")
    for stream, cut in result.truncated.items():
        parts.append(f"{memory(cut)} of {stream} not kept")
    if result.artifacts:
        parts.append(plural(len(result.artifacts), "artifact"))
    return parts


def footer_text(result: SandboxResult) -> str:
    """Return the line that ends a run.

    For example ``✓ exit 0 · 3.2 s · 41 MB peak``.
    """
    mark, words = ending(result)
    return " · ".join([f"{mark} {words}", *footer_parts(result)])


def footer_html(result: SandboxResult) -> str:
    """Return the same as HTML."""
    mark, words = ending(result)
    parts = [f"<span>{escaped(part, 200)}</span>" for part in footer_parts(result)]
    head = (
        f'<span style="color:{_COLOURS[mark]}" aria-hidden="true">{mark}</span> '
        f"<span>{escaped(words, 300)}</span>"
    )
    rest = f' <span style="{_FAINT}">· {" · ".join(parts)}</span>'
    return f'<div role="status" style="{_STYLE}">{head}{rest}</div>'


def run_html(run: Run) -> str:
    """Return a run that may still go on: how it stands, and its last lines."""
    if run.result is not None:
        return result_html(run.result)
    if run.error is not None:
        return phase_html(f"{run.id} {type(run.error).__name__}: {run.error}")
    tail = escaped(_without_colours(run.tail(_TAIL)))
    return (
        phase_html(f"▸ {run.id} {run.waiting_for} · {seconds(run.duration)}")
        + f'<pre style="white-space:pre-wrap;{_STYLE}">{tail}</pre>'
    )


def phase_html(text: str) -> str:
    """Return the line that shows what a run is waiting for."""
    return f'<div role="status" style="{_STYLE};{_FAINT}">{escaped(text, 300)}</div>'


def result_html(result: SandboxResult) -> str:
    """Return a result: its ending, its output to unfold, and its artifacts."""
    shown = [footer_html(result)]
    if result.output:
        text = result.output
        if len(text) > _COLLAPSED:
            half = _COLLAPSED // 2
            left_out = len(text) - 2 * half
            text = f"{text[:half]}\n[... {left_out} characters not shown ...]\n{text[-half:]}"
        size = memory(sum(result.totals.values()))
        shown.append(
            f'<details style="{_STYLE}"><summary>output · {size}</summary>'
            f'<pre style="white-space:pre-wrap">{escaped(_without_colours(text))}</pre></details>'
        )
    if result.artifacts:
        shown.append(result.artifacts._repr_html_())
    return "".join(shown)


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;:]*m", "", clean(text)).replace("\r", "\n")


# -- tables -------------------------------------------------------------------------------------


def table_html(rows: Iterable[Sequence[str]], head: Sequence[str] = (), caption: str = "") -> str:
    """Return a table of texts; the first column of a table without a head is its head.

    Parameters
    ----------
    rows
        Of cells, which are escaped here.
    head
        The names of the columns.
    caption
        For screen readers, and shown.
    """
    title = f"<caption style='text-align:left'>{escaped(caption, 200)}</caption>" if caption else ""
    top = "".join(f'<th scope="col" style="text-align:left">{escaped(h, 200)}</th>' for h in head)
    body = []
    for row in rows:
        cells = [
            f'<th scope="row" style="text-align:left">{escaped(cell, 400)}</th>'
            if number == 0 and not head
            else f'<td style="text-align:left">{escaped(cell, 400)}</td>'
            for number, cell in enumerate(row)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    header = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<table style="{_STYLE}">{title}{header}<tbody>{"".join(body)}</tbody></table>'
