"""What every benchmark does with its figures: compare, show as a table, keep as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measurement:
    """What is measured, and the ratio to the baseline that it should not exceed."""

    key: str
    title: str
    unit: str = "s"
    target: float | None = None

    def text(self, value: float) -> str:
        """Return a value for people."""
        if self.unit == "bytes":
            return f"{value / (1 << 20):.1f} MiB"
        if self.unit == "count":
            return f"{value:g}"
        return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"


def compare(
    values: Mapping[str, Mapping[str, list[float]]], baseline: str
) -> dict[str, dict[str, Any]]:
    """Return the values of each contestant with their medians and the ratios to the baseline's."""
    compared: dict[str, dict[str, Any]] = {
        name: {
            "values": {key: list(each) for key, each in own.items()},
            "medians": {key: statistics.median(each) for key, each in own.items() if each},
        }
        for name, own in values.items()
    }
    base = compared[baseline]["medians"]
    for one in compared.values():
        one["ratios"] = {
            key: value / base[key] for key, value in one["medians"].items() if base.get(key)
        }
    return compared


def circumstances(
    rounds: int, sizes: Any, packages: Iterable[str], measurements: Iterable[Measurement]
) -> dict[str, Any]:
    """Return when, where, with what and how much was measured.

    Parameters
    ----------
    rounds
        Turns of each contestant.
    sizes
        A dataclass instance: how much was done in a turn.
    packages
        Distributions whose versions matter.
    measurements
        What was measured.
    """
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "load": [round(value, 2) for value in os.getloadavg()],
            "system": platform.platform(),
        },
        "rounds": rounds,
        "sizes": asdict(sizes),
        "packages": {name: version(name) for name in packages},
        "measurements": {m.key: asdict(m) for m in measurements},
    }


def table(
    title: str,
    measurements: Iterable[Measurement],
    compared: Mapping[str, Mapping[str, Any]],
    baseline: str,
) -> Table:
    """Return a table for people: medians, ratios, targets."""
    result = Table(title=title)
    result.add_column("")
    for name in compared:
        result.add_column(name, justify="right")
        if name != baseline:
            result.add_column("ratio", justify="right")
    result.add_column("target", justify="right")
    for measurement in measurements:
        cells = [measurement.title]
        for name, one in compared.items():
            value = one["medians"].get(measurement.key)
            cells.append("" if value is None else measurement.text(value))
            if name != baseline:
                cells.append(_ratio(one["ratios"].get(measurement.key), measurement.target))
        cells.append("" if measurement.target is None else f"≤ {measurement.target:g}")
        result.add_row(*cells)
    return result


def keep(summary: Mapping[str, Any], kind: str, file: Path | None) -> Path:
    """Write a summary as JSON, by default to a new file of `RESULTS`, and return the file."""
    file = file or RESULTS / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return file


def _ratio(ratio: float | None, target: float | None) -> str:
    if ratio is None:
        return ""
    if target is None:
        return f"{ratio:.2f}"
    return f"[green]{ratio:.2f} ✓[/]" if ratio <= target else f"[red]{ratio:.2f} ✗[/]"
