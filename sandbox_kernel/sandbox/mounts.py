"""Folders of the engine's machine in a sandbox (B11): when that is possible at all.

The policy says which folders; here is what cannot be said beforehand. The engine follows links as
root, so that a link in a folder that was granted could lead to one that was not: a path counts
only as it stands, without any link on the way. Who can rename a folder on the way can still
exchange it at the moment of the start, which is why a grant belongs to folders whose path nobody
else can change.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.mounts import host_folder
from sandbox_kernel.sandbox.spec import SandboxSpec

__all__ = ["check_mounts"]


def check_mounts(spec: SandboxSpec, endpoint: Endpoint, info: Mapping[str, Any]) -> None:
    """Refuse folders that this engine cannot give, before anything is created.

    Parameters
    ----------
    spec
        What is wanted.
    endpoint
        The engine.
    info
        Its answer to ``/info``.

    Raises
    ------
    SandboxSpecRejectedError
        The engine is on another machine or confines with SELinux, or a folder is none.
    """
    if not spec.mounts:
        return
    if endpoint.socket_path is None:
        _refuse(
            "mounts",
            sorted(spec.mounts),
            f"the engine at {endpoint.url} is not on this machine, or cannot be known to be",
            "Use an engine's Unix socket; or a project's snapshot, or a volume as data set.",
        )
    there = (str(info.get("Name") or ""), str(info.get("KernelVersion") or ""))
    if there != (socket.gethostname(), os.uname().release):
        _refuse(
            "mounts",
            sorted(spec.mounts),
            f"the engine runs on another machine ({there[0]!r}, kernel {there[1]!r}): its socket "
            "is a forwarded one, or that of a virtual machine",
            "Use an engine of this machine; or a project's snapshot, or a volume as data set.",
        )
    if any(
        str(option).split(",")[0] == "name=selinux" for option in info.get("SecurityOptions") or ()
    ):
        _refuse(
            "mounts",
            sorted(spec.mounts),
            "the engine's machine confines with SELinux, so that the folder would have to be given "
            "another label (:z), with all in it and for everybody",
            "Use a project's snapshot, or a volume as data set.",
        )
    for name, text in spec.mounts.items():
        path = host_folder(text).path
        setting = f"mounts[{name!r}]"
        if os.path.realpath(path) != path:
            reason = "a link is on the way to it, which can lead anywhere"
            _refuse(setting, path, reason, f"Name the folder itself: {os.path.realpath(path)}.")
        if not Path(path).is_dir():
            _refuse(setting, path, "there is no such folder on this machine", "Name a folder.")


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
