"""`%sandbox_build` and `%sandbox_doctor`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import Engines
from tests.magics.conftest import Open
from tests.magics.notebook import Notebook


@pytest.fixture
def tag(engines: Engines) -> Iterator[str]:
    name = f"sandbox-kernel-test/built:{uuid.uuid4().hex[:8]}"
    yield name
    engines.api.remove_image(name)


def test_a_cell_is_a_dockerfile(notebook: Notebook, busybox_image: str, tag: str) -> None:
    """Magics: `%%sandbox_build -t TAG`; the image can be run; its commands have no network."""
    text = f"FROM {busybox_image}\nRUN cat /proc/net/dev > /devices; echo made > /made"
    cell = notebook.run(f"%%sandbox_build -t {tag}\n{text}", ok=True)
    assert "Step 2/2" in cell.out
    assert f"built {tag}" in cell.out
    told = notebook.run(f"_ = %sandbox_run -i {tag} cat /made /devices", ok=True).out
    assert told.startswith("made\n")
    assert "eth0" not in told


def test_cells_run_where_nearly_everything_is_missing(
    notebook: Notebook, busybox_image: str, tag: str
) -> None:
    """Acceptance: no bash, no ps, a uid without a name, and nothing that can be written."""
    gone = "bash ps pgrep pkill killall id whoami nohup script timeout stty"
    removed = " ".join(f"/bin/{name}" for name in gone.split())
    recipe = f"FROM {busybox_image}\nRUN rm -f {removed} /etc/passwd /etc/group"
    notebook.run(f"%%sandbox_build -q -t {tag}\n{recipe}", ok=True)
    flags = f"--fresh -i {tag}"
    script = "grep ^Uid: /proc/self/status; touch /x /bin/x /etc/x || echo read-only"
    cell = notebook.run(f"%%sandbox {flags}\n{script}", ok=True)
    assert cell.out.split() == ["Uid:", *["10001"] * 4, "read-only"]
    stubborn = "trap '' INT TERM; sleep 7411 & echo up; sleep 7411"
    cell = notebook.run(f"%%sandbox {flags}\n{stubborn}", interrupt_at="up")
    assert cell.error[0] == "KeyboardInterrupt"
    assert "nothing of it runs any more" in cell.error[1]


def test_a_folder_has_a_dockerfile(
    notebook: Notebook, busybox_image: str, tag: str, tmp_path: Path
) -> None:
    """Magics: `%sandbox_build DIR -t TAG --file F -q`; a missing one is an error."""
    (tmp_path / "Other").write_text(f"FROM {busybox_image}\nCOPY x /x\n")
    (tmp_path / "x").write_text("hello\n")
    cell = notebook.run(f"%sandbox_build -q -t {tag} --file Other {tmp_path}", ok=True)
    assert cell.out.splitlines()[0].startswith(f"built {tag}")
    assert notebook.run(f"_ = %sandbox_run -i {tag} cat /x", ok=True).out == "hello\n"
    missing = notebook.run(f"%sandbox_build -t {tag} {tmp_path}")
    assert missing.error[0] == "SandboxSpecRejectedError"
    unnamed = notebook.run(f"%sandbox_build {tmp_path}")
    assert unnamed.error[0] == "UsageError"


def test_a_step_that_fails_shows_its_last_lines(
    notebook: Notebook, busybox_image: str, tag: str
) -> None:
    """E6: the error ends with the output of the build."""
    cell = notebook.run(f"%%sandbox_build -q -t {tag}\nFROM {busybox_image}\nRUN echo why; exit 9")
    assert cell.error[0] == "SandboxBuildError"
    assert "why" in cell.error[1]


def test_the_network_of_a_build_needs_a_person(
    notebook: Notebook, busybox_image: str, tag: str
) -> None:
    """C5: a build is no way around the question."""
    text = f"%%sandbox_build --network -t {tag}\nFROM {busybox_image}\nRUN cat /proc/net/dev"
    assert notebook.run(text).error[0] == "SandboxNetworkDenied"
    assert notebook.run(text, answers=["no"]).error[0] == "SandboxNetworkDenied"
    assert "eth0" in notebook.run(text, answers=["yes"], ok=True).out


def test_where_a_policy_lists_images_none_is_built(
    open_one: Open, busybox_image: str, tag: str, tmp_path: Path
) -> None:
    """A1: an image of one's own under an allowed name would be a way around the list."""
    config = tmp_path / "config"
    config.mkdir(mode=0o755)
    policy = {"images": ["sandbox-kernel*/*"]}
    (config / "jupyter_sandbox_policy.json").write_text(json.dumps(policy))
    with open_one(JUPYTER_CONFIG_DIR=str(config)) as notebook:
        cell = notebook.run(f"%%sandbox_build -t {tag}\nFROM {busybox_image}")
        assert cell.error[0] == "SandboxSpecRejectedError"
        assert "lists the images" in cell.error[1]


def test_the_image_of_sandbox_kernel_is_built_by_its_command(open_one: Open) -> None:
    """Magics: without a folder it is `jupyter sandbox build`, with its output and its failures."""
    with open_one(SANDBOX_DOCKER_HOST="unix:///nowhere/docker.sock") as notebook:
        cell = notebook.run("%sandbox_build --pip polars -t sandbox-kernel-test/none:1")
        assert cell.error[0] == "SandboxBuildError"
        assert "/nowhere/docker.sock" in cell.out
        wrong = notebook.run("%sandbox_build --network")
        assert wrong.error[0] == "UsageError"


def test_the_doctor_looks_at_everything(open_one: Open, notebook: Notebook) -> None:
    """Magics: engine, limits, users, image, network; each problem with a remedy."""
    cell = notebook.run("%sandbox_doctor", ok=True)
    data = cell.of("execute_result")[0]["data"]
    for name in ("engine", "seccomp", "limits", "image", "policy"):
        assert name in data["text/plain"]
    assert "<table" in data["text/html"]
    with open_one(SANDBOX_DOCKER_HOST="unix:///nowhere/docker.sock") as other:
        ill = other.run("%sandbox_doctor", ok=True).value
        assert "/nowhere/docker.sock" in ill
        assert "→" in ill
