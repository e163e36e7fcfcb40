"""Folders of the engine's machine in a sandbox: what is there, and what is refused (B11)."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.mounts import check_mounts
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import Engines
from tests.sandbox.conftest import marks, sh

LOCAL = Endpoint("unix:///run/docker.sock")
HERE = {"Name": socket.gethostname(), "KernelVersion": os.uname().release}
CERTS = TlsFiles(Path("/c"), Path("/k"), Path("/a"))


async def test_a_folder_is_there_under_its_name_and_for_what_was_asked(
    engines: Engines, busybox_image: str, run_labels: dict[str, str], tmp_path: Path
) -> None:
    """B11, B2: to be read or written to, without what is of the engine's machine besides."""
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro" / "file").write_text("here\n")
    (tmp_path / "ro" / "out").symlink_to("/etc/passwd")
    (tmp_path / "rw").mkdir(mode=0o777)
    (tmp_path / "rw").chmod(0o777)
    spec = SandboxSpec(
        image=busybox_image,
        mounts={"in": str(tmp_path / "ro"), "out": f"{tmp_path / 'rw'}:rw"},
    )
    async with Engine(engines.unix_endpoint) as engine:
        sandbox = await LiveSandbox.create(
            engine, spec, owner="tester", extra_labels=marks(run_labels)
        )
        try:
            assert (await sh(sandbox, "cat /mnt/in/file")).out == "here\n"
            # A link leads to what is there in the sandbox, and no further.
            inside = await sh(sandbox, "cat /etc/passwd")
            assert (await sh(sandbox, "cat /mnt/in/out")).out == inside.out
            denied = await sh(sandbox, "touch /mnt/in/new")
            assert "Read-only" in denied.err
            assert (await sh(sandbox, "echo result > /mnt/out/file")).code == 0
        finally:
            await sandbox.destroy()
    assert (tmp_path / "rw" / "file").read_text() == "result\n"


@pytest.mark.parametrize(
    "endpoint",
    [Endpoint("https://engine:2376", CERTS), Endpoint("http://127.0.0.1:2375")],
)
def test_an_engine_that_may_be_elsewhere_gives_no_folder(endpoint: Endpoint) -> None:
    """B11: a path of this machine would be any folder of that one; loopback may be a tunnel."""
    with pytest.raises(SandboxSpecRejectedError, match=r"mounts.*not on this machine"):
        check_mounts(SandboxSpec(mounts={"x": "/"}), endpoint, {})
    check_mounts(SandboxSpec(), endpoint, {})


@pytest.mark.parametrize("other", [{"Name": "elsewhere"}, {"KernelVersion": "0.0"}, {"Name": ""}])
def test_a_socket_that_leads_to_another_machine_gives_no_folder(other: dict[str, str]) -> None:
    """B11: a forwarded one, or that of a virtual machine; the engine's answer is made up."""
    with pytest.raises(SandboxSpecRejectedError, match=r"mounts.*forwarded"):
        check_mounts(SandboxSpec(mounts={"x": "/"}), LOCAL, {**HERE, **other})


def test_a_machine_with_selinux_is_refused_with_the_reason() -> None:
    """B11: no engine with SELinux is at hand, so its answer is made up."""
    info = {**HERE, "SecurityOptions": ["name=seccomp,profile=default", "name=selinux"]}
    with pytest.raises(SandboxSpecRejectedError, match=r"mounts.*SELinux.*:z"):
        check_mounts(SandboxSpec(mounts={"x": "/"}), LOCAL, info)


def test_what_is_no_folder_or_has_a_link_on_the_way_is_refused(tmp_path: Path) -> None:
    """B11: the engine would follow it as root."""
    (tmp_path / "real").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "up").symlink_to("/")
    check_mounts(SandboxSpec(mounts={"x": str(tmp_path / "real")}), LOCAL, HERE)
    for place, said in (("link", "link"), ("up/etc", "link"), ("file", "folder"), ("no", "folder")):
        with pytest.raises(SandboxSpecRejectedError, match=rf"mounts\['x'\].*{said}"):
            check_mounts(SandboxSpec(mounts={"x": str(tmp_path / place)}), LOCAL, HERE)


@pytest.mark.parametrize(
    "mounts",
    [
        {"../x": "/srv"}, {"": "/srv"}, {"x": "srv"}, {"x": "/srv/../etc"}, {"x": "/srv:z"},
        {"x": "/srv:ro:rw"}, ["/srv"], {"x": 7}, {f"m{n}": "/srv" for n in range(17)},
    ],
)  # fmt: skip
def test_what_can_be_no_mount_is_refused_at_once(mounts: Any) -> None:
    """B11"""
    with pytest.raises(SandboxSpecRejectedError, match="mounts"):
        SandboxSpec(mounts=mounts)
