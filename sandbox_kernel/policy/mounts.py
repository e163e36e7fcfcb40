"""A folder of the engine's machine, as a request names it: ``/path``, with ``:ro`` or ``:rw``."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from sandbox_kernel.errors import SandboxSpecRejectedError

__all__ = ["HostFolder", "host_folder"]


@dataclass(frozen=True, slots=True)
class HostFolder:
    """A folder of the engine's machine that a sandbox is to see.

    Parameters
    ----------
    path
        Absolute, and without anything that leads back up.
    read_only
        Whether code in the sandbox can only read it.
    """

    path: str
    read_only: bool = True


def host_folder(text: str, setting: str = "mounts") -> HostFolder:
    """Read a folder; without a mode it can only be read.

    Parameters
    ----------
    text
        Its path, and after a colon ``ro`` or ``rw``.
    setting
        What an error names.

    Raises
    ------
    SandboxSpecRejectedError
        It is not that.
    """
    path, colon, mode = text.rpartition(":")
    if not colon or mode not in {"ro", "rw"}:
        path, mode = text, "ro"
    # Docker's own notation has more options after a comma or a colon; none of them is taken.
    plain = path.startswith("/") and posixpath.normpath(path) == path and not path.startswith("//")
    if not plain or any(sign in path for sign in ":,\0") or not path.isprintable():
        raise SandboxSpecRejectedError(
            setting,
            text[:200],
            "this is not the plain absolute path of a folder, with ':ro' or ':rw' if wanted",
            "Write it as /srv/data or /srv/data:rw, without '..', ':' or ','.",
        )
    return HostFolder(path, mode == "ro")
