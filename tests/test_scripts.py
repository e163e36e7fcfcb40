"""The scripts explain themselves and refuse what they do not know."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / command[0]), *command[1:]],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("script", ["quickstart", "test", "test-engine", "make-base-image"])
def test_each_script_explains_itself(script: str) -> None:
    done = call(f"scripts/{script}", "--help")
    assert done.returncode == 0
    assert f"scripts/{script}" in done.stdout


@pytest.mark.parametrize("script", ["quickstart", "make-base-image"])
def test_an_unknown_option_is_refused(script: str) -> None:
    done = call(f"scripts/{script}", "--ye")
    assert done.returncode != 0
    assert "--ye" in done.stderr


def test_no_tracked_file_names_a_mirror_or_registry_of_ours() -> None:
    listed = subprocess.run(
        ["git", "grep", "-lE", r"deb\.debian\.org|pypi\.org/simple"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert [name for name in listed.stdout.split() if name != "tests/test_scripts.py"] == []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with quickstart in it, and a docker command that only writes down its calls."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text(f'#!/bin/sh\necho "$DOCKER_HOST $*" >>{tmp_path}/calls\n')
    docker.chmod(0o755)
    (tmp_path / ".quickstart").mkdir()
    return tmp_path


def remove(clone: Path) -> tuple[str, list[str]]:
    env = {
        **os.environ,
        "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
        "DOCKER_HOST": "unix:///no",
    }
    done = subprocess.run(
        [clone / "scripts" / "quickstart", "--remove"],
        env=env, cwd=clone, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    calls = clone / "calls"
    return done.stdout, calls.read_text().splitlines() if calls.exists() else []


def test_removing_takes_only_the_images_that_were_built_here(clone: Path) -> None:
    """E6: from the engine where they were built, and none by force."""
    (clone / ".quickstart" / "engine").write_text("unix:///ours.sock\n")
    (clone / ".quickstart" / "images").write_text("sha256:one\nsha256:two\n")
    _, calls = remove(clone)
    assert {line.split()[0] for line in calls} == {"unix:///ours.sock"}
    removed = [line for line in calls if " image rm " in line]
    assert [line.split()[-1] for line in removed[:2]] == ["sha256:one", "sha256:two"]
    assert "--force" not in " ".join(calls)
    assert not (clone / ".quickstart").exists()


@pytest.mark.parametrize("images", ["", "sha256:one\n"])
def test_without_a_record_no_image_is_removed(clone: Path, images: str) -> None:
    """E6: nothing was built here, or on an engine that docker does not reach."""
    (clone / ".quickstart" / "images").write_text(images)
    said, calls = remove(clone)
    assert calls == []
    assert ("sha256:one" in said) == bool(images)
