"""Which places in a sandbox a path can mean: decided here, before anything runs (F2)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NoReturn

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.process.files.rules import MAX_NAME, MAX_PATH

ROOTS = ("/workspace", "/output", "/tmp", "/home/sbx")  # noqa: S108 # the sandbox's own
"""Where the code of a sandbox can write."""


@dataclass(frozen=True, slots=True)
class Place:
    """A path in a sandbox: a root and the parts below it.

    Parameters
    ----------
    root
        A folder that is always there.
    parts
        Of the path below it; none means the root itself.
    into
        Whether the path was written as that of a folder into which something shall go.
    """

    root: str
    parts: tuple[str, ...]
    into: bool = False

    @property
    def path(self) -> str:
        """The absolute path."""
        return "/".join((self.root, *self.parts))

    def below(self, name: str) -> Place:
        """Return the place of an entry."""
        return Place(self.root, (*self.parts, name))


def place_of(
    path: str | PurePosixPath, setting: str, workspace: str, roots: Sequence[str]
) -> Place:
    """Return the place that a caller's path means.

    Parameters
    ----------
    path
        Absolute below one of the roots, or relative to the workspace.
    setting
        What an error calls it.
    workspace
        Where relative paths begin.
    roots
        Where files may be.

    Raises
    ------
    SandboxSpecRejectedError
        The path leads, or could lead, anywhere else.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        _refuse(setting, path, "it is not text", "Write it as a str.")
    if "\0" in text:
        _refuse(setting, path, "it holds a NUL character", "Remove it.")
    parts = [part for part in text.split("/") if part not in {"", "."}]
    if ".." in parts:
        _refuse(setting, path, "it has '..' in it", "Write where it leads.")
    if not text.startswith("/"):
        parts = [*workspace.strip("/").split("/"), *parts]
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    if sum(sizes) + len(sizes) > MAX_PATH or max(sizes, default=0) > MAX_NAME:
        _refuse(setting, text[:80], "it is too long", f"Use at most {MAX_NAME} bytes for a name.")
    into = text.rpartition("/")[2] in {"", "."}
    for root in sorted(roots, key=len, reverse=True):
        above = root.strip("/").split("/")
        if parts[: len(above)] == above:
            return Place(root, tuple(parts[len(above) :]), into)
    allowed = ", ".join(roots)
    _refuse(setting, text, "it is outside of the places for files", f"Use one in {allowed}.")


def patterns_of(patterns: Sequence[str], setting: str) -> list[str]:
    """Return patterns of relative paths, checked.

    Raises
    ------
    SandboxSpecRejectedError
        One of them is empty, absolute or leads out.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    for pattern in patterns:
        parts = pattern.split("/")
        if not pattern or pattern.startswith("/"):
            _refuse(setting, pattern, "it is not a relative path", "Write it from the folder on.")
        if ".." in parts:
            _refuse(setting, pattern, "it has '..' in it", "Name what is in the folder only.")
        if "\0" in pattern or len(pattern) > MAX_PATH or len(parts) > MAX_NAME:
            _refuse(setting, pattern[:80], "no file can have such a path", "Correct it.")
    if not patterns or len(patterns) > MAX_NAME:
        _refuse(setting, None, "there must be 1 to 255 of them", "Name what shall come out.")
    return list(patterns)


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
