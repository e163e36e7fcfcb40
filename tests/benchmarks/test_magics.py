"""The benchmark of the magics runs, and keeps what it measures in the shape that is documented."""

from __future__ import annotations

import shutil

from tests.benchmarks.conftest import Benchmark


def test_the_magics_benchmark_compares_and_keeps_the_figures(benchmark: Benchmark) -> None:
    """Issue 6: one run gives tables with ratios and a JSON file; no time is judged here."""
    shown, summary = benchmark("magics")
    assert "much output" in shown
    assert list(summary["cells"]) == ["%%bash", "%%sandbox", "%%sandbox, all shown"]
    for way in summary["cells"].values():
        assert way["medians"]["shown"] == summary["sizes"]["output"]
        assert len(way["values"]["true"]) == summary["sizes"]["cells"]
    docker = ["docker run --rm"] if shutil.which("docker") else []
    assert list(summary["programs"]) == [*docker, "%sandbox_run"]
