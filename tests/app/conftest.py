"""A command line to call, in a home and an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(sys.executable).with_name("jupyter-sandbox")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class CommandLine:
    """Calls ``jupyter sandbox`` as a person does, away from this machine's own settings."""

    home: Path
    environ: Mapping[str, str]

    @property
    def prefix(self) -> Path:
        """A folder for kernelspecs that Jupyter looks into."""
        return self.home / "prefix"

    def __call__(self, *arguments: str, timeout: float = 60, **environ: str) -> Outcome:
        done = subprocess.run(
            [str(PROGRAM), *arguments],
            cwd=self.home,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Outcome(done.returncode, done.stdout, done.stderr)


def clean_environ(home: Path) -> dict[str, str]:
    """Return an environment in which nothing of this machine's own settings is seen."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SANDBOX_", "DOCKER_", "JUPYTER", "XDG_"))
    }
    return {
        **ours,
        "HOME": str(home),
        "JUPYTER_PATH": str(home / "prefix/share/jupyter"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_PLATFORM_DIRS": "1",
    }


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    home = tmp_path / "home"
    home.mkdir()
    return CommandLine(home, clean_environ(home))
