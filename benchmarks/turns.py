"""What every benchmark is asked for, and how its contestants take turns."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from report import RESULTS
from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")

PROGRESS = Console(stderr=True)
"""Where progress is shown; the table alone goes to standard output."""


def command_line(documentation: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark.

    Parameters
    ----------
    documentation
        Of the module; its first line is left out.
    rounds
        How many there are by default.
    """
    parser = argparse.ArgumentParser(description=documentation.partition("\n\n")[2])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each way ({rounds})")
    parser.add_argument("--json", type=Path, help=f"the file to write (a new one in {RESULTS})")
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work at all?")
    return parser


def read(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Return what was asked for; a quick run has one round."""
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if chosen.quick:
        chosen.rounds = 1
    return chosen


def turns(ways: Sequence[T], names: Sequence[str], rounds: int) -> Iterator[tuple[int, T]]:
    """Give the number of the round and whose turn it is, with a bar that shows it.

    Every other round is in reverse, so that a drift of the machine favours nobody.
    """
    order = list(zip(ways, names, strict=True))
    with Progress(console=PROGRESS, transient=True) as progress:
        task = progress.add_task("", total=rounds * len(order))
        for number in range(rounds):
            for way, name in order if number % 2 == 0 else reversed(order):
                progress.update(task, description=f"round {number + 1}: {name}")
                yield number, way
                progress.advance(task)
