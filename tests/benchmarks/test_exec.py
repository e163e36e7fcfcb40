"""The benchmark of commands runs, and keeps what it measures in the shape that is documented."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sandbox_kernel.engine.endpoint import Endpoint

ROOT = Path(__file__).parent.parent.parent
KEYS = ["true", "output", "many", "cpu_inside", "cpu_here", "stop", "stop_tree", "left"]


def test_the_exec_benchmark_compares_three_ways_and_keeps_the_figures(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    """Issue 3, W24: one run gives a table with ratios and a JSON file; no time is judged here."""
    file = tmp_path / "out" / "exec.json"
    env = {**os.environ, "SANDBOX_DOCKER_HOST": endpoint.url, "COLUMNS": "150"}
    if endpoint.tls is not None:
        for name in ("cert", "key", "ca"):
            env[f"SANDBOX_DOCKER_TLS_{name.upper()}_PATH"] = str(getattr(endpoint.tls, name))
    done = subprocess.run(
        [sys.executable, "benchmarks/exec.py", "--quick", "--json", str(file)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "stop of a tree" in done.stdout

    summary = json.loads(file.read_text())
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
