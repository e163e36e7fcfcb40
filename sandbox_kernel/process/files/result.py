"""What a transfer is limited to and what it gave: the values that cross from here to callers.

Nothing here does I/O. Paths of a sandbox are text in which bytes that are no UTF-8 stand as
surrogates; whoever shows them makes them printable (`printable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sandbox_kernel.errors import SandboxSpecRejectedError

Kind = Literal["file", "folder", "link", "other"]
"""Of an entry; the last is a FIFO, a socket or a device."""

SkipReason = Literal[
    "link", "not-regular", "name", "duplicate", "denied", "vanished", "not-a-folder", "other"
]
"""Why something was left out; `SKIP_TEXTS` says it for people."""

SKIP_TEXTS: dict[SkipReason, str] = {
    "link": "it is a symbolic link",
    "not-regular": "it is a FIFO, a socket or a device",
    "name": "its name is not a safe one",
    "duplicate": "its name differs only in case or accents from another one",
    "denied": "it may not be read",
    "vanished": "it was removed meanwhile",
    "not-a-folder": "it was replaced meanwhile",
    "other": "it cannot be read",
}

Progress = Callable[[int, int | None], None]
"""Called with the bytes carried so far and, where it is known, how many it will be.

It is called in the engine's loop, at most ten times a second, and must return at once.
"""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """What one transfer may come to; more is refused, and nothing of it stays.

    Parameters
    ----------
    entries
        Files, folders and links, those included that are left out.
    file_size
        Bytes of one file. A sandbox can have none larger than 2 GiB.
    total_size
        Bytes of all files.
    seconds
        Of the whole transfer.

    Raises
    ------
    SandboxSpecRejectedError
        A limit is not a positive number.
    """

    entries: int = 50_000
    file_size: int = 2 * 1024**3
    total_size: int = 4 * 1024**3
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("entries", "file_size", "total_size", "seconds"):
            value = getattr(self, name)
            whole = isinstance(value, int) or (name == "seconds" and isinstance(value, float))
            if not whole or isinstance(value, bool) or not 0 < value < 1 << 62:
                raise SandboxSpecRejectedError(
                    f"limits.{name}", value, "this is not a positive number", "Use one."
                )


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Something in a sandbox, as a listing shows it.

    Parameters
    ----------
    path
        Where it is, absolute.
    kind
        What it is; links are not followed.
    size
        Bytes of a file, else 0.
    mode
        Permission bits.
    mtime
        When it was last changed, in seconds since 1970.
    refused
        Why it would be left out when its folder is fetched, or `None`.
    """

    path: str
    kind: Kind
    size: int
    mode: int
    mtime: float
    refused: SkipReason | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was left out of a transfer, by its path below what was carried."""

    path: str
    reason: SkipReason

    def __str__(self) -> str:
        return f"{printable(self.path)}: {SKIP_TEXTS[self.reason]}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """What was carried.

    Parameters
    ----------
    path
        Where it is now: a path of the sandbox for what went in, else one of this machine.
    files, folders, links
        How many there were; the folder that was asked for counts.
    size
        Bytes of all files, as they were actually sent.
    skipped
        What was left out and why.
    changed
        Files, by their paths below what was carried, that changed while they were read: each
        has bytes that it had at some moment, but perhaps not all of one moment. A program that
        is in the middle of writing a file is not noticed by this, only a write that begins.
    duration
        Seconds that it took.
    """

    path: str
    files: int
    folders: int
    links: int
    size: int
    skipped: tuple[Skipped, ...] = ()
    changed: tuple[str, ...] = ()
    duration: float = 0.0


def printable(text: str) -> str:
    """Return text of a sandbox as it may be shown: what could change a display is escaped."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )
