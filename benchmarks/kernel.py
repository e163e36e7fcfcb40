"""Compare kernelspecs side by side, in one run: ``python benchmarks/kernel.py [NAME …]``.

A machine's figures vary by a third from one minute to the next, so only ratios within one run
mean anything: the kernels take turns round by round, and each is compared with the first one
named. Every measurement goes through jupyter_client, as a notebook's would.
"""

from __future__ import annotations

import asyncio
from typing import Any

from measure import MEASUREMENTS, Round, Sizes, measure
from report import circumstances, compare, keep, table
from rich.console import Console
from turns import PROGRESS, command_line, read, turns

FULL = Sizes(round_trips=200, printed=50_000_000, displayed=20_000_000)
QUICK = Sizes(round_trips=10, printed=1_000_000, displayed=1_000_000)
PACKAGES = ("jupyter_client", "pyzmq", "sandbox-kernel")


async def run(names: list[str], rounds: int, sizes: Sizes) -> list[Round]:
    """Let the kernels take turns, and return what each turn gave."""
    return [await measure(name, sizes) for _, name in turns(names, names, rounds)]


def summarise(done: list[Round], names: list[str], sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Return everything that was found out, ready for JSON."""
    values = {
        name: {
            m.key: [t.values[m.key] for t in done if t.kernel == name and m.key in t.values]
            for m in MEASUREMENTS
        }
        for name in names
    }
    kernels = compare(values, names[0])
    for turn in done:
        kernels[turn.kernel]["versions"] = turn.versions
    return {
        **circumstances(rounds, sizes, PACKAGES, MEASUREMENTS),
        "baseline": names[0],
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
    parser = command_line(__doc__ or "", rounds=3)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        default=["python3", "sandbox-python"],
        help="kernelspecs; the first is what the others are compared with (python3 sandbox-python)",
    )
    options = read(parser)
    sizes, rounds = QUICK if options.quick else FULL, options.rounds
    names = list(dict.fromkeys(options.names))
    summary = summarise(asyncio.run(run(names, rounds, sizes)), names, sizes, rounds)
    title = f"Medians of {rounds} rounds, load {summary['machine']['load'][0]} at the end"
    Console().print(table(title, MEASUREMENTS, summary["kernels"], names[0]))
    for difference in differing(summary["kernels"]):
        PROGRESS.print(f"[yellow]Not quite the same:[/] {difference}")
    PROGRESS.print(f"Written to {keep(summary, 'kernel', options.json)}")


if __name__ == "__main__":
    main()
