"""The benchmark of kernels runs, and keeps what it measures in the shape that is documented."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.kernel.kernelspec import COMMAND, PROVISIONER
from tests.benchmarks.conftest import Benchmark

TIMES = {
    "start",
    "round_trip",
    "print",
    "display",
    "interrupt",
    "interrupt_child",
    "restart",
    "shutdown",
}


def write_kernelspec(folder: Path, name: str, spec: dict[str, object]) -> None:
    path = folder / "kernels" / name / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"display_name": name, "language": "python", **spec}))


@pytest.fixture
def jupyter_path(tmp_path: Path, engine_unix: Endpoint) -> Path:
    """A folder with a local and a sandboxed kernelspec."""
    local = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    write_kernelspec(tmp_path, "bench-local", {"argv": local})
    provisioner = {"provisioner_name": PROVISIONER, "config": {"host": engine_unix.url}}
    write_kernelspec(
        tmp_path,
        "bench-sandbox",
        {
            "argv": list(COMMAND),
            "interrupt_mode": "message",
            "metadata": {"kernel_provisioner": provisioner},
        },
    )
    return tmp_path


def test_the_kernel_benchmark_compares_two_kernels_and_keeps_the_figures(
    jupyter_path: Path, benchmark: Benchmark
) -> None:
    """Item 8: one run gives a table with ratios and a JSON file; no figure is judged here."""
    shown, summary = benchmark(
        "kernel", "bench-local", "bench-sandbox", JUPYTER_PATH=str(jupyter_path)
    )
    assert "start to first result" in shown
    assert summary["baseline"] == "bench-local"
    assert list(summary["kernels"]) == ["bench-local", "bench-sandbox"]
    local, sandbox = summary["kernels"].values()
    assert set(local["medians"]) == TIMES
    assert set(sandbox["medians"]) == TIMES | {"relay_memory"}
    assert set(sandbox["ratios"]) == TIMES
    assert all(ratio == 1 for ratio in local["ratios"].values())
    assert sandbox["medians"]["relay_memory"] > 1 << 20
    for kernel in (local, sandbox):
        assert {"Python", "ipykernel"} <= set(kernel["versions"])
        assert all(len(values) <= summary["rounds"] for values in kernel["values"].values())
