"""Which names and modes cross the border, and what a pattern matches; no I/O.

Both sides use this module, so that what the program in the sandbox leaves out with a note, an
honest one never sends, and the host takes anything else for an attack. Standard library and
Python 3.8, as this module is sent along.
"""

from __future__ import annotations

import fnmatch
import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    States = frozenset[tuple[int, int]]

MAX_NAME = 255
"""Bytes of one part of a path, on every file system that matters."""

MAX_PATH = 4096
MAX_PARTS = 100
"""Of a path below what is carried; each costs an open folder on both sides."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_DRIVE = re.compile("[A-Za-z]:")
_WINDOWS_CHARACTERS = re.compile('[<>:"|?*\ud800-\udfff]')
_WINDOWS_DEVICE = re.compile(
    r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|COM[0-9\u00b9\u00b2\u00b3]|LPT[0-9\u00b9\u00b2\u00b3])"
    r"[ ]*(\..*)?",
    re.IGNORECASE | re.DOTALL,
)


def is_safe_name(name: str, windows: bool) -> bool:
    """Say whether a file of the sandbox may have this name on the host.

    Refused are names that mean another place somewhere, or that change a terminal on which
    they are shown; on Windows also those that it keeps for devices or cannot store.
    """
    if name in {"", ".", ".."} or "/" in name or "\\" in name:
        return False
    if _CONTROL.search(name) or _DRIVE.match(name):
        return False
    if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME:
        return False
    if not windows:
        return True
    return not (
        _WINDOWS_CHARACTERS.search(name)
        or _WINDOWS_DEVICE.fullmatch(name)
        or name.endswith((".", " "))
    )


def folded(name: str) -> str:
    """Return what two names have in common that some file systems take for one."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def safe_mode(mode: int, is_folder: bool) -> int:
    """Return the permissions that cross: never set-id bits, never writable by others.

    The owner can read and write everything, and enter each folder.
    """
    return mode & 0o755 | (0o700 if is_folder else 0o600)


def safe_time(mtime_ns: int) -> int:
    """Return a time that every side can store: from 1970 to the year 2262."""
    return min(max(mtime_ns, 0), (1 << 63) - 1)


class Globs:
    """Patterns for relative paths, matched part by part.

    ``*``, ``?`` and ``[…]`` stay within a part; ``**`` as a part stands for any number of
    folders. A leading dot is nothing special. A path is followed through the patterns by its
    states: begin with `start`, `step` over each part, and ask.

    Parameters
    ----------
    patterns
        As written, relative and without ``..``.
    whole
        Whether everything below a folder that matches does too.
    """

    def __init__(self, patterns: Sequence[str], whole: bool) -> None:
        self._patterns = [
            tuple(part for part in pattern.split("/") if part not in {"", "."})
            for pattern in patterns
        ]
        self._whole = whole
        self.start = self._closed({(number, 0) for number in range(len(self._patterns))})

    def step(self, states: States, name: str) -> States:
        """Return the states below a folder, or of a file, with this name."""
        found = set()
        for number, place in states:
            parts = self._patterns[number]
            if place == len(parts):
                if self._whole:
                    found.add((number, place))
            elif parts[place] == "**":
                found.add((number, place))
            elif fnmatch.fnmatchcase(name, parts[place]):
                found.add((number, place + 1))
        return self._closed(found)

    def matched(self, states: States) -> set[int]:
        """Return the numbers of the patterns that match; none means that the path does not."""
        return {number for number, place in states if place == len(self._patterns[number])}

    def _closed(self, states: set[tuple[int, int]]) -> States:
        todo = list(states)
        while todo:
            number, place = todo.pop()
            parts = self._patterns[number]
            if place < len(parts) and parts[place] == "**" and (number, place + 1) not in states:
                states.add((number, place + 1))
                todo.append((number, place + 1))
        return frozenset(states)


def is_literal(pattern: str) -> bool:
    """Say whether a pattern means one path only."""
    return not any(character in pattern for character in "*?[")
