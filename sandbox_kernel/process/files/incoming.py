"""Judging what comes out of a sandbox, byte by byte (F2, F3; the TAR cases of the corpus).

Everything that a courier sends may be the work of the code in its sandbox. A `Receiver` takes
the bytes as they come and hands on what is allowed, or raises: `WireError` for what an honest
courier never sends, `InsideTroubleError` for trouble that it reports and
for more than the limits allow. It does no I/O itself; what it hands to writes to the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sandbox_kernel.process.files import trouble as codes
from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.failures import InsideTroubleError, skip_reason
from sandbox_kernel.process.files.result import (
    FileEntry,
    Kind,
    Skipped,
    SkipReason,
    TransferLimits,
)
from sandbox_kernel.process.files.rules import (
    MAX_PARTS,
    MAX_PATH,
    Globs,
    folded,
    is_safe_name,
)
from sandbox_kernel.process.files.trouble import TroubleError
from sandbox_kernel.process.files.wire import Decoder, Entry, Frame, WireError

_KINDS: dict[int, Kind] = {
    wire.FILE: "file",
    wire.FOLDER: "folder",
    wire.LINK: "link",
    wire.OTHER: "other",
}


class Sink(Protocol):
    """Who gets what was judged. Paths are the parts below what was asked for."""

    def folder(self, parts: list[str], mode: int) -> None:
        """Take a folder."""

    def file(self, parts: list[str], entry: Entry) -> None:
        """Take the beginning of a file."""

    def data(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the file."""

    def end(self) -> None:
        """Take the end of the file."""


class Judge(Protocol):
    """Says of each entry whether it may come; what is between END and ENTRY is the receiver's."""

    def entry(self, entry: Entry) -> None:
        """Take an entry, or raise."""

    def data(self, data: bytes | memoryview) -> None:
        """Take bytes of the last entry, or raise."""

    def end(self, size: int, changed: bool) -> None:
        """Take the end of the last entry, or raise."""

    def planned(self, count: int, size: int) -> None:
        """Take what the courier says that it will send, or raise."""

    def done(self, count: int, size: int) -> None:
        """Take what the courier says that it has sent, or raise."""


class Receiver:
    """The host's end of the protocol for one order.

    Parameters
    ----------
    nonce
        What the courier must answer with first.
    judge
        What takes the entries.
    most_skipped
        How many notes about what was left out may come.

    Attributes
    ----------
    greeted, finished
        Whether the first and the last frame have come.
    """

    def __init__(self, nonce: str, judge: Judge, most_skipped: int) -> None:
        self.greeted = False
        self.finished = False
        self.skipped: list[Skipped] = []
        self._nonce = nonce.encode()
        self._judge = judge
        self._most_skipped = most_skipped
        self._decoder = Decoder()

    def feed(self, data: bytes) -> None:
        """Take the next received bytes.

        Raises
        ------
        WireError
            They cannot come from an honest courier.
        InsideTroubleError
            The courier reports trouble, or there is more than the limits allow.
        TroubleError
            The sink could not take it.
        """
        for frame in self._decoder.feed(data):
            if self.finished:
                raise WireError("a frame after the last one")
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        kind, payload = frame
        if kind == wire.DATA:
            if not self.greeted:
                raise WireError("data before the hello")
            self._judge.data(payload)
            return
        payload = bytes(payload)
        if not self.greeted:
            if kind != wire.HELLO or payload != self._nonce:
                raise WireError("the first frame is not the courier's")
            self.greeted = True
        elif kind == wire.ENTRY:
            self._judge.entry(wire.decode_entry(payload))
        elif kind == wire.END:
            self._judge.end(*wire.decode_end(payload))
        elif kind == wire.PLAN:
            self._judge.planned(*wire.decode_pair(payload))
        elif kind == wire.SKIPPED:
            self._skip(wire.decode_why(payload))
        elif kind == wire.FAILED:
            why = wire.decode_why(payload)
            raise InsideTroubleError(TroubleError(why.code, text_of(why.path), why.errno))
        elif kind == wire.DONE:
            self._judge.done(*wire.decode_pair(payload))
            self.finished = True
        elif kind != wire.KEEP:
            raise WireError(f"frame kind {kind} from the courier")

    def _skip(self, why: wire.Why) -> None:
        if len(self.skipped) >= self._most_skipped:
            raise InsideTroubleError(TroubleError(codes.TOO_MANY))
        self.skipped.append(Skipped(text_of(why.path), skip_reason(why.code)))


def text_of(path: bytes) -> str:
    """Return a path of a sandbox as text; the bytes come back by the same rule."""
    return path.decode("utf-8", "surrogateescape")


@dataclass
class Tally:
    """How much has been carried."""

    files: int = 0
    folders: int = 0
    links: int = 0
    size: int = 0
    changed: list[str] = field(default_factory=list)

    @property
    def entries(self) -> int:
        """All of them."""
        return self.files + self.folders + self.links


class Content:
    """Judges files and folders that come out with what is in them.

    Parameters
    ----------
    sink
        Who gets what is allowed.
    limits
        What it may come to.
    tree
        Whether a folder may come, and not only one file.
    windows
        Whether the names must do for Windows.
    globs
        What was asked for, where that was patterns.
    """

    def __init__(
        self,
        sink: Sink,
        limits: TransferLimits,
        *,
        tree: bool,
        windows: bool,
        globs: Globs | None = None,
    ) -> None:
        self.tally = Tally()
        self.total: int | None = None
        self._sink = sink
        self._limits = limits
        self._tree = tree
        self._windows = windows
        self._globs = globs
        # The folders that may have something in them, with their states in the patterns; and
        # every path, folded, so that nothing lands on something else.
        self._folders: dict[str, frozenset[tuple[int, int]]] = {}
        self._taken: set[str] = set()
        self._only_file = False
        self._announced = 0
        self._file: Entry | None = None
        self._received = 0

    def planned(self, count: int, size: int) -> None:
        """Refuse at once what would be too much at its end."""
        if self.total is not None or self._taken:
            raise WireError("a plan after something else")
        if count > self._limits.entries:
            raise InsideTroubleError(TroubleError(codes.TOO_MANY))
        if size > self._limits.total_size:
            raise InsideTroubleError(TroubleError(codes.TOO_MUCH))
        self.total = size

    def entry(self, entry: Entry) -> None:
        """Take a file or folder where one may be."""
        if self._file is not None:
            raise WireError("an entry within a file")
        if entry.kind not in (wire.FILE, wire.FOLDER):
            raise WireError("an entry that is neither file nor folder")
        path = text_of(entry.path)
        if self._only_file or (path == "") != (not self._taken):
            raise WireError("an entry in the wrong place")
        parts = path.split("/") if path else []
        states = self._states(path, parts, entry.kind == wire.FOLDER)
        if self.tally.entries >= self._limits.entries:
            raise InsideTroubleError(TroubleError(codes.TOO_MANY))
        if entry.kind == wire.FOLDER:
            self._folders[path] = states
            self.tally.folders += 1
            self._sink.folder(parts, entry.mode)
            return
        self._only_file = not parts
        self._announced += entry.size
        if entry.size > self._limits.file_size:
            raise InsideTroubleError(TroubleError(codes.TOO_LARGE, path))
        if self._announced > self._limits.total_size:
            raise InsideTroubleError(TroubleError(codes.TOO_MUCH))
        self._file = entry
        self._received = 0
        self._sink.file(parts, entry)

    def _states(self, path: str, parts: list[str], is_folder: bool) -> frozenset[tuple[int, int]]:
        """Return where in the patterns an entry is, having made sure that it may come."""
        start = self._globs.start if self._globs else frozenset()
        if not parts:
            if (self._globs and not is_folder) or (is_folder and not self._tree):
                raise WireError("not what was asked for")
            self._taken.add("")
            return start
        above = None if path.startswith("/") else self._folders.get("/".join(parts[:-1]))
        if above is None:
            raise WireError("an entry in a folder that never came")
        if len(parts) > MAX_PARTS or len(path.encode("utf-8", "surrogateescape")) > MAX_PATH:
            raise WireError("a path that is too long")
        if not is_safe_name(parts[-1], self._windows):
            raise WireError("a name that is not safe")
        key = folded(path)
        if key in self._taken:
            raise WireError("an entry that came already")
        self._taken.add(key)
        if self._globs is None:
            return start
        states = self._globs.step(above, parts[-1])
        if not states or not (is_folder or self._globs.matched(states)):
            raise WireError("an entry that nobody asked for")
        return states

    def data(self, data: bytes | memoryview) -> None:
        """Take bytes, but never more than were announced."""
        if self._file is None:
            raise WireError("data outside of a file")
        self._received += len(data)
        if self._received > self._file.size:
            raise WireError("a file with more bytes than were announced")
        self.tally.size += len(data)
        self._sink.data(data)

    def end(self, size: int, changed: bool) -> None:
        """Take the end of a file, which has exactly the bytes that came."""
        entry = self._file
        if entry is None:
            raise WireError("the end of a file that never began")
        if size != self._received or (size != entry.size and not changed):
            raise WireError("a file of another size than was said")
        self._file = None
        self.tally.files += 1
        if changed:
            self.tally.changed.append(text_of(entry.path))
        self._sink.end()

    def done(self, count: int, size: int) -> None:
        """Take the end of everything, which must be what came."""
        if self._file is not None or (count, size) != (self.tally.entries, self.tally.size):
            raise WireError("an end that does not fit what came")
        if not self._taken and not self._globs:
            raise WireError("an end without a beginning")


class Nothing:
    """Judges an order that gives nothing but its end; `expected` says how much it was."""

    def __init__(self, expected: Callable[[], tuple[int, int]]) -> None:
        self._expected = expected

    def entry(self, entry: Entry) -> None:
        """Refuse an entry."""
        raise WireError("an entry where none was asked for")

    def data(self, data: bytes | memoryview) -> None:
        """Refuse bytes."""
        raise WireError("data where none was asked for")

    def end(self, size: int, changed: bool) -> None:
        """Refuse the end of a file."""
        raise WireError("the end of a file where none was asked for")

    def planned(self, count: int, size: int) -> None:
        """Refuse a plan."""
        raise WireError("a plan where none was asked for")

    def done(self, count: int, size: int) -> None:
        """Take the end, which must be what was sent."""
        if (count, size) != self._expected():
            raise WireError("an end that does not fit what was sent")


class Listing(Nothing):
    """Judges entries without what is in them, for a list.

    Names are shown and no more here, so that all but impossible ones may come.

    Parameters
    ----------
    path
        The absolute path of what is listed.
    most
        How many entries there may be.
    windows
        Whether names must do for Windows, for what is said to be refused.
    """

    def __init__(self, path: str, most: int, windows: bool) -> None:
        super().__init__(lambda: (len(self.entries), 0))
        self.entries: list[FileEntry] = []
        self._path = path
        self._most = most
        self._windows = windows

    def entry(self, entry: Entry) -> None:
        """Take an entry of the list."""
        path = text_of(entry.path)
        parts = path.split("/") if path else []
        if any(part in {"", ".", ".."} or "\0" in part for part in parts):
            raise WireError("a path that cannot be")
        if len(self.entries) >= self._most:
            raise InsideTroubleError(TroubleError(codes.TOO_MANY))
        full = f"{self._path}/{path}" if path else self._path
        self.entries.append(
            FileEntry(
                full,
                _KINDS[entry.kind],
                entry.size,
                entry.mode,
                entry.mtime_ns / 1e9,
                self._refused(entry.kind, full.rpartition("/")[2]),
            )
        )

    def _refused(self, kind: int, name: str) -> SkipReason | None:
        if kind == wire.LINK:
            return "link"
        if kind == wire.OTHER:
            return "not-regular"
        return None if is_safe_name(name, self._windows) else "name"
