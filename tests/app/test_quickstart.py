"""``jupyter sandbox quickstart`` and the notebook that it runs."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import nbformat
import pytest

from sandbox_kernel.app.quickstart import facts
from tests.app.conftest import CommandLine
from tests.engines import Engines

NOTEBOOK = files("sandbox_kernel.notebooks").joinpath("quickstart.ipynb")


@pytest.mark.timeout(180)
def test_one_command_leads_to_a_notebook_that_ran_in_a_sandbox(
    cli: CommandLine, engines: Engines, tmp_path: Path
) -> None:
    """K1, B1: and a second time it does the same again."""
    output = tmp_path / "out" / "ran.ipynb"
    for _ in range(2):
        done = cli(
            "quickstart", f"--engine={engines.unix}", f"--prefix={cli.prefix}",
            f"--output={output}", timeout=90,
        )  # fmt: skip
        assert done.code == 0, done.err
        assert "10001 (sandbox)" in done.out
        assert "network devices  lo\n" in done.out
        assert "0000000000000000 (of 0000000000000000)" in done.out
        assert f"lab {output}" in done.out.replace("\n", " ")
    ran = json.loads(output.read_text())
    [plot] = [c for c in ran["cells"] if "plt.show()" in "".join(c["source"])]
    assert any("image/png" in output.get("data", {}) for output in plot["outputs"])
    spec = json.loads((cli.prefix / "share/jupyter/kernels/sandbox-python/kernel.json").read_text())
    assert spec["metadata"]["kernel_provisioner"]["config"]["host"] == engines.unix


def test_without_an_engine_it_says_so_and_installs_nothing(cli: CommandLine) -> None:
    """E4"""
    done = cli("quickstart", "--engine=/nonexistent.sock", f"--prefix={cli.prefix}")
    assert done.code == 1
    assert "nonexistent.sock" in done.err
    assert not cli.prefix.exists()


def test_the_notebook_that_ships_has_its_outputs_and_the_right_kernel() -> None:
    """K1: people read it before they run it."""
    notebook = nbformat.reads(NOTEBOOK.read_text(), as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "sandbox-python"
    assert "10001 (sandbox)" in facts(notebook)
    assert all(c.outputs for c in notebook.cells if c.cell_type == "code")
