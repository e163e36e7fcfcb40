"""Where what comes out of a sandbox lands: in memory, or on the disk of this machine.

On the disk everything is prepared aside, in the file system of its target, and put into place
in one go when all of it is there and was judged. Nothing outside of the target is ever
touched: its folder is opened once, and from there no link is followed.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_kernel.process.files.folder import HAS_OPEN_FOLDERS, Folder, Stage
from sandbox_kernel.process.files.rules import safe_mode, safe_time
from sandbox_kernel.process.files.trouble import EXISTS, IS_FOLDER, TroubleError, about
from sandbox_kernel.process.files.wire import Entry


class Memory:
    """Keeps one small file."""

    def __init__(self) -> None:
        self.content = bytearray()

    def folder(self, parts: list[str], mode: int) -> None:
        """Never called: the judge lets one file pass."""
        raise AssertionError("a folder cannot be kept in memory")

    def file(self, parts: list[str], entry: Entry) -> None:
        """Take the beginning of the file."""

    def data(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self.content += data

    def end(self) -> None:
        """Take the end of the file."""


class Landing:
    """A target on this machine's disk.

    Parameters
    ----------
    target
        The path that the file or folder shall have. Its folder must be there; the path to it
        is the caller's, and links in it are followed.
    overwrite
        Whether files that are there may be replaced. Folders are merged.
    held
        Whether folders can be held open; else paths take their place.
    """

    def __init__(self, target: Path, overwrite: bool, held: bool = HAS_OPEN_FOLDERS) -> None:
        self._target = target
        self._overwrite = overwrite
        self._held = held
        self._base: Folder | None = None
        self._stage: Stage | None = None
        self._merges = False
        self._fd: int | None = None
        self._mtime = 0

    def check(self) -> None:
        """Raise when the target can never take anything, before anything is asked for."""
        with about(str(self._target.parent)):
            Folder.open(str(self._target.parent), True, self._held).close()
        if not self._overwrite and self._is_there() and not self._target.is_dir():
            raise TroubleError(EXISTS, str(self._target))

    def _is_there(self) -> bool:
        return os.path.lexists(self._target)

    def folder(self, parts: list[str], mode: int) -> None:
        """Make a folder aside."""
        if not parts:
            self._merges = self._target.is_dir()
        with about("/".join(parts)):
            self._prepared().make_folder(parts, safe_mode(mode, True))

    def file(self, parts: list[str], entry: Entry) -> None:
        """Begin a file aside."""
        if not parts and self._target.is_dir():
            raise TroubleError(IS_FOLDER, str(self._target))
        with about("/".join(parts)):
            self._fd = self._prepared().new_file(parts, safe_mode(entry.mode, False))
        self._mtime = safe_time(entry.mtime_ns)

    def data(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        assert self._fd is not None
        view = memoryview(data)
        with about(str(self._target)):
            while view:
                view = view[os.write(self._fd, view) :]

    def end(self) -> None:
        """End the file that was begun."""
        assert self._fd is not None
        fd, self._fd = self._fd, None
        try:
            if os.utime in os.supports_fd:
                os.utime(fd, ns=(self._mtime, self._mtime))
        finally:
            # Where writing is put off, a full disk may show itself only here.
            with about(str(self._target)):
                os.close(fd)

    def commit(self) -> None:
        """Put everything into place.

        Raises
        ------
        TroubleError
            Something is in the way; nothing was replaced.
        """
        if self._stage is None or self._base is None:
            return
        if self._merges:
            self._stage.merge(self._base, self._overwrite)
        else:
            self._stage.place(self._base, self._target.name, self._overwrite)

    def close(self) -> None:
        """Remove what is left aside. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._stage is not None:
            self._stage.remove()
            self._stage = None
        if self._base is not None:
            self._base.close()
            self._base = None

    def _prepared(self) -> Stage:
        if self._stage is None:
            # A folder that is there may be a mount, into which nothing can be moved from beside.
            base = self._target if self._merges else self._target.parent
            self._base = Folder.open(str(base), True, self._held)
            self._stage = Stage(self._base)
        return self._stage
