"""The benchmark of the magics runs, and keeps what it measures in the shape that is documented."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sandbox_kernel.engine.endpoint import Endpoint

ROOT = Path(__file__).parent.parent.parent


def test_the_magics_benchmark_compares_and_keeps_the_figures(
    tmp_path: Path, engine_unix: Endpoint
) -> None:
    """Issue 6: one run gives tables with ratios and a JSON file; no time is judged here."""
    file = tmp_path / "magics.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/magics.py", "--quick", "--json", str(file)],
        cwd=ROOT,
        env={**os.environ, "SANDBOX_DOCKER_HOST": engine_unix.url, "COLUMNS": "150"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "much output" in done.stdout
    summary = json.loads(file.read_text())
    assert list(summary["cells"]) == ["%%bash", "%%sandbox", "%%sandbox, all shown"]
    for way in summary["cells"].values():
        assert way["medians"]["shown"] == summary["sizes"]["output"]
        assert len(way["values"]["true"]) == summary["sizes"]["cells"]
    docker = ["docker run --rm"] if shutil.which("docker") else []
    assert list(summary["programs"]) == [*docker, "%sandbox_run"]
