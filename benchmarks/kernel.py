"""Compare kernelspecs side by side, in one run: ``python benchmarks/kernel.py [NAME …]``.

A machine's figures vary by a third from one minute to the next, so only ratios within one run
mean anything: the kernels take turns round by round, and each is compared with the first one
named. Every measurement goes through jupyter_client, as a notebook's would.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure import MEASUREMENTS, Round, Sizes, measure
from report import RESULTS, circumstances, compare, keep, table
from rich.console import Console
from rich.progress import Progress

FULL = Sizes(round_trips=200, printed=50_000_000, displayed=20_000_000)
QUICK = Sizes(round_trips=10, printed=1_000_000, displayed=1_000_000)
PACKAGES = ("jupyter_client", "pyzmq", "sandbox-kernel")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        default=["python3", "sandbox-python"],
        help="kernelspecs; the first is what the others are compared with (python3 sandbox-python)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kernel (3)")
    parser.add_argument("--json", type=Path, help=f"the file to write (a new one in {RESULTS})")
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work at all?")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return chosen


async def run(names: list[str], rounds: int, sizes: Sizes, console: Console) -> list[Round]:
    """Let the kernels take turns, and return what each turn gave."""
    turns: list[Round] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=rounds * len(names))
        for number in range(rounds):
            # Every other round in reverse, so that a drift of the machine favours nobody.
            for name in names if number % 2 == 0 else reversed(names):
                progress.update(task, description=f"round {number + 1}: {name}")
                turns.append(await measure(name, sizes))
                progress.advance(task)
    return turns


def summarise(turns: list[Round], names: list[str], sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Return everything that was found out, ready for JSON."""
    values = {
        name: {
            m.key: [t.values[m.key] for t in turns if t.kernel == name and m.key in t.values]
            for m in MEASUREMENTS
        }
        for name in names
    }
    kernels = compare(values, names[0])
    for turn in turns:
        kernels[turn.kernel]["versions"] = turn.versions
    return {
        **circumstances(),
        "baseline": names[0],
        "rounds": rounds,
        "sizes": asdict(sizes),
        "packages": {name: version(name) for name in PACKAGES},
        "measurements": {m.key: asdict(m) for m in MEASUREMENTS},
        "kernels": kernels,
    }


def differing(kernels: dict[str, Any]) -> list[str]:
    """Return what makes the comparison unfair: versions that differ among the kernels."""
    names = dict.fromkeys(what for kernel in kernels.values() for what in kernel["versions"])
    found = []
    for what in names:
        each = {name: kernel["versions"].get(what) for name, kernel in kernels.items()}
        if len(set(each.values())) > 1:
            found.append(f"{what}: " + ", ".join(f"{v} in {name}" for name, v in each.items()))
    return found


def main() -> None:
    """Measure, show and keep."""
    options = parse()
    console = Console(stderr=True)
    sizes = QUICK if options.quick else FULL
    rounds = 1 if options.quick else options.rounds
    names = list(dict.fromkeys(options.names))
    turns = asyncio.run(run(names, rounds, sizes, console))
    summary = summarise(turns, names, sizes, rounds)
    title = f"Medians of {rounds} rounds, load {summary['machine']['load'][0]} at the end"
    Console().print(table(title, MEASUREMENTS, summary["kernels"], names[0]))
    for difference in differing(summary["kernels"]):
        console.print(f"[yellow]Not quite the same:[/] {difference}")
    file = keep(summary, "kernel", options.json)
    console.print(f"Written to {file}")


if __name__ == "__main__":
    main()
