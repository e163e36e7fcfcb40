"""Tables for people: aligned columns under a line of titles, and times in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sandbox_kernel.app.display import plain

__all__ = ["span", "table_lines"]

_GAP = "  "


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; what comes from elsewhere cannot change the terminal.

    Parameters
    ----------
    titles
        Of the columns.
    rows
        The cells of each line; an empty one is shown as a dash.
    """
    shown = [[plain(cell).replace("\n", " ") or "-" for cell in row] for row in rows]
    lines = [list(titles), *shown]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return [
        _GAP.join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def span(duration: timedelta) -> str:
    """Return a length of time in words, to its largest unit.

    Examples
    --------
    >>> span(timedelta(minutes=90))
    '90 min'
    """
    seconds = max(duration.total_seconds(), 0.0)
    for unit, length, least in (("d", 86400, 2), ("h", 3600, 2), ("min", 60, 2)):
        if seconds >= length * least:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def now() -> datetime:
    """Return the time, in UTC."""
    return datetime.now(UTC)
