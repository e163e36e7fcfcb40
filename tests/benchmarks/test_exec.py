"""The benchmark of commands runs, and keeps what it measures in the shape that is documented."""

from __future__ import annotations

import shutil

from tests.benchmarks.conftest import Benchmark

KEYS = ["true", "output", "many", "cpu_inside", "cpu_here", "stop", "stop_tree", "left"]


def test_the_exec_benchmark_compares_three_ways_and_keeps_the_figures(
    benchmark: Benchmark,
) -> None:
    """Issue 3, W24: one run gives a table with ratios and a JSON file; no time is judged here."""
    shown, summary = benchmark("exec")
    assert "stop of a tree" in shown
    assert summary["baseline"] == "bare exec"
    docker = ["docker exec"] if shutil.which("docker") else []
    assert list(summary["ways"]) == ["bare exec", *docker, "Sandbox"]
    sizes = summary["sizes"]
    for way in summary["ways"].values():
        assert sorted(way["values"]) == sorted(KEYS)
        assert len(way["values"]["true"]) == sizes["runs"]
        assert way["medians"]["true"] > 0
    # The one figure that is no time: who ends the whole tree.
    left = {name: way["medians"]["left"] for name, way in summary["ways"].items()}
    assert left.pop("Sandbox") == 0
    assert set(left.values()) == {sizes["tree"] - 1}
