"""The benchmark of files runs, and keeps what it measures in the shape that is documented."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_kernel.engine.endpoint import Endpoint

ROOT = Path(__file__).parent.parent.parent
KEYS = ["file_in", "file_out", "tree_in", "tree_out", "memory"]


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker to compare with")
def test_the_files_benchmark_compares_with_docker_cp_and_keeps_the_figures(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    """F1, issue 4: one run gives a table with ratios and a JSON file; no time is judged here."""
    file = tmp_path / "out" / "files.json"
    env = {**os.environ, "SANDBOX_DOCKER_HOST": endpoint.url, "COLUMNS": "150"}
    if endpoint.tls is not None:
        for name in ("cert", "key", "ca"):
            env[f"SANDBOX_DOCKER_TLS_{name.upper()}_PATH"] = str(getattr(endpoint.tls, name))
    done = subprocess.run(
        [sys.executable, "benchmarks/files.py", "--quick", "--json", str(file)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "many small files out" in done.stdout

    summary = json.loads(file.read_text())
    assert summary["baseline"] == "docker cp"
    assert list(summary["ways"]) == ["docker cp", "Files"]
    for way in summary["ways"].values():
        assert sorted(way["values"]) == sorted(KEYS)
        assert all(value > 0 for key in KEYS[:4] for value in way["values"][key])
