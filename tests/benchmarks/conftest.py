"""How a benchmark is run in a test: with small amounts, and its figures read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.endpoint import Endpoint

ROOT = Path(__file__).parent.parent.parent

Benchmark = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def benchmark(tmp_path: Path, engine_unix: Endpoint) -> Benchmark:
    """Run a benchmark quickly; return the text that it shows and the figures that it keeps."""

    def run(name: str, *arguments: str, **variables: str) -> tuple[str, dict[str, Any]]:
        file = tmp_path / "out" / f"{name}.json"
        done = subprocess.run(
            [sys.executable, f"benchmarks/{name}.py", "--quick", "--json", file, *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "SANDBOX_DOCKER_HOST": engine_unix.url,
                "COLUMNS": "150",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads(file.read_text())

    return run
