"""Translation of failures: pure, on what aiodocker, aiohttp and ssl were seen to raise."""

from __future__ import annotations

import ssl
import traceback

import aiohttp
import pytest
from aiodocker import DockerError
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.faults import (
    Subject,
    image_missing,
    translate,
    without_engine_paths,
    without_host_paths,
)
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxEngineError,
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxImageMissingError,
    SandboxPausedError,
    SandboxUnavailableError,
)

ENDPOINT = Endpoint("unix:///var/run/docker.sock", None, "a test")
LONG = "0123456789abcdef" * 4
CONTAINER = Subject("container", LONG)


def told(status: int, message: str, subject: Subject = CONTAINER) -> SandboxError:
    return translate(DockerError(status, message), ENDPOINT, "do it", subject)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, f"No such container: {LONG}", SandboxGoneError),
        (404, "No such image: x:1", SandboxImageMissingError),
        (409, f"Container {LONG} is not running", SandboxGoneError),
        (409, f"Container {LONG} is paused, unpause the container before exec", SandboxPausedError),
        (500, f"cannot exec in a paused container: {LONG} is paused", SandboxPausedError),
        (409, "Conflict. The container name is already in use", SandboxConflictError),
        (500, "write /var/lib/docker/x: no space left on device", SandboxDiskFullError),
        (500, "mkdir /x: disk quota exceeded", SandboxDiskFullError),
        (400, "Client sent an HTTP request to an HTTPS server.\n", SandboxUnavailableError),
        (500, "Cannot upgrade connection to vendored tcp protocol, ", SandboxUnavailableError),
        (500, "anything else", SandboxEngineError),
    ],
)
def test_answers_of_the_engine_have_a_class_each(
    status: int, message: str, kind: type[SandboxError]
) -> None:
    """E4: the class says what the caller can do."""
    error = told(status, message)
    assert type(error) is kind
    assert LONG not in str(error)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (TimeoutError(), SandboxEngineTimeoutError),
        (aiohttp.ServerTimeoutError(), SandboxEngineTimeoutError),
        (aiohttp.ConnectionTimeoutError(), SandboxUnavailableError),
        (AssertionError(), SandboxUnavailableError),
        (RuntimeError("Session is closed"), SandboxUnavailableError),
        (ConnectionResetError(), SandboxUnavailableError),
        (aiohttp.ServerDisconnectedError(), SandboxUnavailableError),
        (ssl.SSLError(1, "handshake"), SandboxUnavailableError),
        (ValueError("not JSON"), SandboxUnavailableError),
    ],
)
def test_trouble_with_the_line_has_a_class_each(
    raised: Exception, kind: type[SandboxError]
) -> None:
    """E4: also the assertions that aiodocker fails with on a lost stream."""
    assert type(translate(raised, ENDPOINT, "do it", CONTAINER, 3)) is kind


@pytest.mark.parametrize(
    "message",
    [
        "error evaluating symlinks: lstat /var/lib/docker/overlay2/abc/merged/etc: no such file",
        'open "/var/lib/docker/containers/0123/hosts": permission denied',
        "error mounting /srv/engine data/overlay2/l/AB:/srv/engine data/overlay2/0a/diff: busy",
        "failed: /run/containerd/io.containerd.runtime.v2.task/moby/0123/rootfs",
        "src=/mnt/docker/volumes/sbx-x/_data,dst=/workspace",
    ],
)
def test_paths_of_the_engines_machine_do_not_reach_people(message: str) -> None:
    """SEC-05: the text is kept, the paths are not."""
    cause = DockerError(500, message)
    error = translate(cause, ENDPOINT, "do it", CONTAINER)
    error.__cause__ = cause
    shown = "".join(traceback.format_exception(error))
    for part in ("/var/lib", "overlay2", "/srv", "containerd/", "_data", "/mnt", "containers/"):
        assert part not in shown
    assert "<path>" in shown


def test_a_path_that_the_caller_named_is_shown() -> None:
    """SEC-05: the working directory that was asked for helps to understand the error."""
    subject = Subject("container", "x", ("/workspace/no",))
    shown = str(told(400, 'chdir to cwd ("/workspace/no") failed: /var/x', subject))
    assert "/workspace/no" in shown
    assert "/var/x" not in shown


def test_addresses_and_image_names_are_not_taken_for_paths() -> None:
    """SEC-05: what a person needs to see stays."""
    text = "Get https://registry.example/v2/: sandbox-kernel/python:latest, 10/20, ./x"
    assert without_host_paths(text) == text


def test_what_a_dockerfile_names_is_shown() -> None:
    """E6, SEC-05: of a failed step only the engine's own folders are hidden."""
    text = "The command '/bin/sh -c cp /a /b' returned 1: /srv/x/tmp/docker-builder12/a"
    assert without_engine_paths(text) == "The command '/bin/sh -c cp /a /b' returned 1: <path>"


@given(st.text())
def test_any_text_can_be_cleaned_and_stays_clean(text: str) -> None:
    """SEC-05: cleaning twice is cleaning once, and never fails."""
    once = without_host_paths(text)
    assert without_host_paths(once) == once


def test_our_own_image_names_the_command_that_makes_it() -> None:
    """E5: and another image the way to get that one."""
    assert "Build it with: jupyter sandbox build" in str(
        image_missing("sandbox-kernel/python:latest")
    )
    assert "docker pull other:1" in str(image_missing("other:1"))
    for name, options in (
        ("sandbox-kernel/python:latest", ""),
        ("docker.io/sandbox-kernel/python:ml", " --tag docker.io/sandbox-kernel/python:ml"),
        ("sandbox-kernel/python:full", " --tag sandbox-kernel/python:full"),
        ("sandbox-kernel/r", " --language r"),
    ):
        said = str(image_missing(name))
        assert said.endswith(f"Build it with: jupyter sandbox build{options}")
        assert "docker pull" not in said
