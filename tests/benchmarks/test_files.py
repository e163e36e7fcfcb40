"""The benchmark of files runs, and keeps what it measures in the shape that is documented."""

from __future__ import annotations

import shutil

import pytest

from tests.benchmarks.conftest import Benchmark

KEYS = ["file_in", "file_out", "tree_in", "tree_out", "memory"]


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker to compare with")
def test_the_files_benchmark_compares_with_docker_cp_and_keeps_the_figures(
    benchmark: Benchmark,
) -> None:
    """F1, issue 4: one run gives a table with ratios and a JSON file; no time is judged here."""
    shown, summary = benchmark("files")
    assert "many small files out" in shown
    assert summary["baseline"] == "docker cp"
    assert list(summary["ways"]) == ["docker cp", "Files"]
    for way in summary["ways"].values():
        assert sorted(way["values"]) == sorted(KEYS)
        assert all(value > 0 for key in KEYS[:4] for value in way["values"][key])
