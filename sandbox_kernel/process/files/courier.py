"""The courier: carries files into and out of a sandbox, from inside of it.

Contract. This file is a program. It runs inside the sandbox as the user of the code, started
as ``python3 -I -S`` with cwd ``/`` and its text read from stdin, on Python 3.8 or later with
the standard library alone. It

* serves one order of the host, in the frames of ``wire.py`` on stdin and stdout, and ends;
* reaches every file part by part from one of the roots that the order names, without
  following a link, and never waits for a FIFO, a device or a lock of somebody's;
* takes in what it is sent aside, in a folder of its own that is removed whatever happens, and
  puts it into place in one go when the host says that this was all;
* gives out regular files only, says what it leaves out and why, and which file changed while
  it was read; it sends no more than the host has given credit for;
* reports trouble as codes, and writes nothing to stderr unless it is broken itself;
* ends when stdin ends or nothing was heard for the time that the order allows: a host that
  is gone leaves no courier and nothing half written behind.

It has the rights of the code beside which it runs, and nothing that it says is trusted.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import select
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.folder import Chain, Folder, Stage, remove_tree, settled, version
from sandbox_kernel.process.files.rules import (
    MAX_PARTS,
    MAX_PATH,
    Globs,
    folded,
    is_literal,
    is_safe_name,
    safe_mode,
    safe_time,
)
from sandbox_kernel.process.files.trouble import (
    BAD_NAME,
    DUPLICATE,
    EXISTS,
    IS_FOLDER,
    IS_LINK,
    NOT_FOUND,
    NOT_REGULAR,
    TOO_DEEP,
    TOO_LARGE,
    TOO_MANY,
    TOO_MUCH,
    TroubleError,
    about,
    trouble_of,
)

if TYPE_CHECKING:
    from sandbox_kernel.process.files.rules import States

PIPE_SIZE = 1 << 20
"""Bytes of the pipes to and from the engine: with larger ones it copies less often."""

READ_SIZE = 1 << 18
FLUSH_SIZE = 1 << 16
MOST_PIECES = 64

_F_SETPIPE_SZ = 1031  # named in fcntl since Python 3.10
_KINDS = {stat.S_IFREG: wire.FILE, stat.S_IFDIR: wire.FOLDER, stat.S_IFLNK: wire.LINK}


class HostGoneError(Exception):
    """The host has ended the connection, or is not heard of any more."""


class Host:
    """The connection to the host: frames in, frames out against credit."""

    def __init__(self) -> None:
        self.silence = 60.0
        self.credit = wire.WINDOW
        self._decoder = wire.Decoder()
        self._frames: collections.deque[wire.Frame] = collections.deque()
        self._output: list[bytes | memoryview] = []
        self._output_size = 0
        self._input = memoryview(bytearray(READ_SIZE))
        self._file_data = memoryview(bytearray(READ_SIZE))
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        for pipe in (0, 1):
            # Not beyond the user's share of the system's limit, nor on what is no pipe.
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, _F_SETPIPE_SZ, PIPE_SIZE)

    def order(self) -> dict:  # type: ignore[type-arg]
        """Return the order, which is the first frame."""
        frame = self.frame()
        if frame.kind != wire.ORDER:
            raise wire.WireError("the first frame is no order")
        return json.loads(bytes(frame.payload).decode())  # type: ignore[no-any-return]

    def frame(self) -> wire.Frame:
        """Wait for the next frame that is not about the connection itself.

        The payload of DATA is good until the next call: it lies where more is read to.
        """
        while not self._frames:
            self._receive()
        return self._frames.popleft()

    def send(self, data: bytes) -> None:
        """Send a frame, not necessarily at once."""
        self._output.append(data)
        self._output_size += len(data)
        if self._output_size >= FLUSH_SIZE:
            self.flush()

    def send_from(self, fd: int, most: int) -> int:
        """Send what a file has next, as one DATA frame; return how much that was."""
        count = os.readv(fd, [self._file_data[:most]])
        if count:
            self._output.append(wire.header(wire.DATA, count))
            if count < FLUSH_SIZE:
                self.send(bytes(self._file_data[:count]))
            else:
                # Nothing of it may wait, since the next piece will lie in the same place.
                self._output.append(self._file_data[:count])
                self.flush()
        return count

    def flush(self) -> None:
        """Send all that is due, waiting for credit and for the engine to take it."""
        pieces, self._output, self._output_size = self._output, [], 0
        while pieces:
            while not self.credit:
                self._receive()
            batch = pieces[:MOST_PIECES]
            if sum(map(len, batch)) > self.credit:
                batch = [memoryview(b"".join(batch))[: self.credit]]
            try:
                count = os.writev(1, batch)
            except BlockingIOError:
                self._wait(1, select.POLLOUT)
                continue
            except BrokenPipeError:
                raise HostGoneError from None
            self.credit -= count
            done = 0
            while done < len(pieces) and count >= len(pieces[done]):
                count -= len(pieces[done])
                done += 1
            del pieces[:done]
            if count:
                pieces[0] = memoryview(pieces[0])[count:]

    def drain(self) -> None:
        """Wait for the host to end the connection: the engine drops what is unread at an exit."""
        self.flush()
        with contextlib.suppress(HostGoneError):
            while True:
                self._frames.clear()
                self._receive()

    def _receive(self) -> None:
        while True:
            try:
                count = os.readv(0, [self._input])
                break
            except BlockingIOError:
                self._wait(0, select.POLLIN)
        if not count:
            raise HostGoneError
        for frame in self._decoder.feed(self._input[:count]):
            if frame.kind == wire.CREDIT:
                self.credit += wire.decode_credit(bytes(frame.payload))
            elif frame.kind != wire.KEEP:
                self._frames.append(frame)

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(self.silence * 1000):
            raise HostGoneError


def local(text: str) -> str:
    """Return text of the order as this Python names files, whatever its locale."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


class Place:
    """Where an order works: a root, the path below it, and what that is called.

    Closing it closes the folders; the path need not exist.
    """

    def __init__(self, order: dict) -> None:  # type: ignore[type-arg]
        self.root = order["root"]
        self.parts = [local(part) for part in order["parts"]]
        with about(self.root):
            self.base = Folder.open(self.root, False)
        self.chain = Chain(self.base)

    def parent(self, make: bool = False) -> Folder:
        """Return the folder in which the place lies."""
        with self.named():
            return self.chain.at(self.parts[:-1], make)

    def find(self) -> os.stat_result:
        """Return what is known of the place itself."""
        if not self.parts:
            return self.base.own_stat()
        with self.named(), about("/".join(self.parts)):
            return self.parent().stat(self.parts[-1])

    def folder(self) -> Folder:
        """Return the place itself, which is a folder."""
        with self.named():
            return self.chain.at(self.parts)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Give trouble inside its full path."""
        try:
            yield
        except TroubleError as trouble:
            if not trouble.path.startswith("/"):
                trouble.path = self.path(trouble.path)
            raise

    def path(self, below_root: str) -> str:
        """Return the full path of something below the root."""
        return f"{self.root}/{below_root}" if below_root else self.root

    def path_below(self, below: str) -> str:
        """Return the full path of something below the place."""
        return self.path("/".join([*self.parts, below] if below else self.parts))

    def close(self) -> None:
        """Let go of the folders."""
        self.chain.close()
        self.base.close()


def kind_of(mode: int) -> int:
    """Return the kind of an entry by its mode."""
    return _KINDS.get(stat.S_IFMT(mode), wire.OTHER)


def entry_of(found: os.stat_result, path: str) -> bytes:
    """Return the ENTRY frame of something, with its size as it is now."""
    kind = kind_of(found.st_mode)
    size = found.st_size if kind == wire.FILE else 0
    mode = stat.S_IMODE(found.st_mode)
    mtime = safe_time(found.st_mtime_ns)
    return wire.encode_entry(wire.Entry(kind, mode, size, mtime, os.fsencode(path)))


# -- in ---------------------------------------------------------------------------------------


def take(host: Host, order: dict) -> None:  # type: ignore[type-arg]
    """Take in a file, a link or a tree, and put it into place at the end."""
    place = Place(order)
    try:
        if place.parts:
            # What cannot become right is told before everything is sent.
            check_target(place, order["overwrite"])
        with about(place.root):
            stage = Stage(place.base)
        try:
            count, size, is_folder = receive(host, stage, place)
            if place.parts:
                _put_into_place(place, stage, order["overwrite"])
            elif is_folder:
                with place.named():
                    stage.merge(place.base, order["overwrite"])
            else:
                raise TroubleError(IS_FOLDER, place.root)
        finally:
            stage.remove()
    finally:
        place.close()
    host.send(wire.encode_pair(wire.DONE, count, size))


def check_target(place: Place, overwrite: bool) -> None:
    """Raise when the target is there and may not be replaced by anything."""
    try:
        found = place.find()
    except TroubleError as trouble:
        if trouble.code != NOT_FOUND:
            raise
        return
    if not overwrite and not stat.S_ISDIR(found.st_mode):
        raise TroubleError(EXISTS, place.path_below(""))


def _put_into_place(place: Place, stage: Stage, overwrite: bool) -> None:
    folder = place.parent(make=True)
    try:
        stage.place(folder, place.parts[-1], overwrite)
    except TroubleError as trouble:
        trouble.path = place.path_below(trouble.path)
        raise


def receive(host: Host, stage: Stage, place: Place) -> tuple[int, int, bool]:
    """Receive everything into the stage; return how much it was, and whether a folder."""
    count = total = 0
    is_folder = False
    while True:
        frame = host.frame()
        if frame.kind == wire.COMMIT and count:
            return count, total, is_folder
        if frame.kind != wire.ENTRY:
            raise wire.WireError(f"frame kind {frame.kind} where an entry was due")
        entry = wire.decode_entry(bytes(frame.payload))
        path = os.fsdecode(entry.path)
        parts = path.split("/") if path else []
        try:
            with about(path):
                if entry.kind == wire.FOLDER:
                    stage.make_folder(parts, safe_mode(entry.mode, True))
                elif entry.kind == wire.LINK:
                    stage.make_link(parts, os.fsdecode(entry.target))
                else:
                    total += receive_file(host, stage, parts, entry)
        except TroubleError as trouble:
            trouble.path = place.path_below(path)
            raise
        is_folder = is_folder or (not parts and entry.kind == wire.FOLDER)
        count += 1


def receive_file(host: Host, stage: Stage, parts: Sequence[str], entry: wire.Entry) -> int:
    """Receive one file into the stage; return its size."""
    mode = safe_mode(entry.mode, False)
    fd = stage.new_file(parts, mode)
    try:
        size = 0
        while True:
            frame = host.frame()
            if frame.kind == wire.END:
                break
            if frame.kind != wire.DATA:
                raise wire.WireError(f"frame kind {frame.kind} in a file")
            size += len(frame.payload)
            view = memoryview(frame.payload)
            while view:
                view = view[os.write(fd, view) :]
        if wire.decode_end(bytes(frame.payload))[0] != size:
            raise wire.WireError("a file of another size")
        os.fchmod(fd, mode)
        os.utime(fd, ns=(safe_time(entry.mtime_ns),) * 2)
    finally:
        os.close(fd)
    return size


# -- out --------------------------------------------------------------------------------------


class Plan:
    """What will be sent: paths below the place, each folder before what is in it."""

    def __init__(self, host: Host, limits: dict) -> None:  # type: ignore[type-arg]
        self.items: list[tuple[str, bool]] = []
        self.size = 0
        self._host = host
        self._limits = limits
        self._skipped = 0

    def folder(self, path: str) -> None:
        """Plan a folder."""
        self.items.append((path, True))
        self._count(path)

    def file(self, path: str, size: int) -> None:
        """Plan a file."""
        if size > self._limits["file_size"]:
            raise TroubleError(TOO_LARGE, path)
        self.size += size
        if self.size > self._limits["total_size"]:
            raise TroubleError(TOO_MUCH)
        self.items.append((path, False))
        self._count(path)

    def skip(self, path: str, code: int, number: int = 0) -> None:
        """Tell the host what is left out, and why."""
        why = wire.Why(code, number, os.fsencode(path))
        self._host.send(wire.encode_why(wire.SKIPPED, why))
        self._skipped += 1
        self._count(path)

    def _count(self, path: str) -> None:
        if len(self.items) + self._skipped > self._limits["entries"]:
            raise TroubleError(TOO_MANY)


class Walk:
    """Goes through a tree and plans what may leave it.

    Parameters
    ----------
    plan
        What to fill.
    windows
        Whether the names must do for Windows.
    globs
        What to take; everything by default.
    """

    def __init__(self, plan: Plan, windows: bool, globs: Globs | None = None) -> None:
        self.found: set[int] = set()
        self._plan = plan
        self._windows = windows
        self._globs = globs
        self._owed: list[str] = []

    def folder(self, folder: Folder, path: str, states: States, depth: int = 0) -> None:
        """Plan what is in a folder; that itself is planned already, or with the first of it."""
        taken = set()
        for name in folder.names():
            if depth == MAX_PARTS:
                raise TroubleError(TOO_DEEP, path)
            below = self._globs.step(states, name) if self._globs else states
            if self._globs and not below:
                continue
            child = f"{path}/{name}" if path else name
            found = folder.find(name)
            if found is None:
                continue
            is_folder = stat.S_ISDIR(found.st_mode)
            matched = self._globs.matched(below) if self._globs else {0}
            self.found |= matched
            if not (matched or is_folder):
                continue
            code = self._fault(name, child, found.st_mode)
            if not code and folded(name) in taken:
                code = DUPLICATE
            if code:
                self._plan.skip(child, code)
                continue
            taken.add(folded(name))
            if is_folder:
                self._go_into(folder, name, child, below, depth, bool(matched))
            else:
                self._pay()
                self._plan.file(child, found.st_size)

    def _go_into(
        self,
        folder: Folder,
        name: str,
        path: str,
        states: States,
        depth: int,
        matched: bool,
    ) -> None:
        try:
            inner = folder.folder(name)
        except (OSError, TroubleError) as error:
            trouble = error if isinstance(error, TroubleError) else trouble_of(error, path)
            self._plan.skip(path, trouble.code, trouble.number)
            return
        with inner:
            self._owed.append(path)
            if matched:
                self._pay()
            try:
                self.folder(inner, path, states, depth + 1)
            except OSError as error:
                self._plan.skip(path, trouble_of(error, path).code, error.errno or 0)
            if self._owed and self._owed[-1] == path:
                self._owed.pop()

    def _pay(self) -> None:
        """Plan the folders on the way to something that matched."""
        for path in self._owed:
            self._plan.folder(path)
        self._owed = []

    def _fault(self, name: str, path: str, mode: int) -> int:
        if not is_safe_name(name, self._windows) or len(os.fsencode(path)) > MAX_PATH:
            return BAD_NAME
        kind = kind_of(mode)
        if kind == wire.LINK:
            return IS_LINK
        return NOT_REGULAR if kind == wire.OTHER else 0


def give(host: Host, order: dict) -> None:  # type: ignore[type-arg]
    """Give out a file, or where the order allows it a tree."""
    place = Place(order)
    try:
        found = place.find()
        plan = Plan(host, order["limits"])
        if stat.S_ISDIR(found.st_mode):
            if not order["tree"]:
                raise TroubleError(IS_FOLDER, place.path_below(""))
            plan.folder("")
            with below(place):
                Walk(plan, order["windows"]).folder(place.folder(), "", frozenset())
            send_planned(host, plan, place.folder())
        else:
            give_one(host, plan, place, found)
    finally:
        place.close()


def give_one(host: Host, plan: Plan, place: Place, found: os.stat_result) -> None:
    """Give out the file that the place is."""
    path = place.path_below("")
    plan_file(plan, found, path)
    with about(path):
        fd = place.parent().read_file(place.parts[-1])
    host.send(wire.encode_pair(wire.PLAN, 1, found.st_size))
    size = send_file(host, fd, "")
    host.send(wire.encode_pair(wire.DONE, 1, size))


def plan_file(plan: Plan, found: os.stat_result, path: str) -> None:
    """Plan a single file, which must be a regular one."""
    kind = kind_of(found.st_mode)
    if kind != wire.FILE:
        raise TroubleError(IS_LINK if kind == wire.LINK else NOT_REGULAR, path)
    try:
        plan.file("", found.st_size)
    except TroubleError as trouble:
        trouble.path = path
        raise


def collect(host: Host, order: dict) -> None:  # type: ignore[type-arg]
    """Give out what matches patterns below a folder."""
    patterns = [local(pattern) for pattern in order["patterns"]]
    globs = Globs(patterns, whole=True)
    plan = Plan(host, order["limits"])
    walk = Walk(plan, order["windows"], globs)
    with contextlib.ExitStack() as opened:
        folder = None
        path = "/".join([order["root"], *order["parts"]])
        try:
            place = Place(order)
            opened.callback(place.close)
            folder = place.folder()
        except TroubleError as trouble:
            if trouble.code != NOT_FOUND:
                raise
        if folder is not None:
            plan.folder("")
            with below(place):
                walk.folder(folder, "", globs.start)
        for number, pattern in enumerate(patterns):
            if number not in walk.found and is_literal(pattern):
                raise TroubleError(NOT_FOUND, f"{path}/{pattern}")
        send_planned(host, plan, folder)


@contextlib.contextmanager
def below(place: Place) -> Iterator[None]:
    """Give trouble inside, which is named from the place on, its full path."""
    try:
        with about(""):
            yield
    except TroubleError as trouble:
        if not trouble.path.startswith("/"):
            trouble.path = place.path_below(trouble.path)
        raise


def send_planned(host: Host, plan: Plan, base: Folder | None) -> None:
    """Send what was planned, as far as it is still there; without a folder nothing was."""
    host.send(wire.encode_pair(wire.PLAN, len(plan.items), plan.size))
    count = total = 0
    if base is None:
        host.send(wire.encode_pair(wire.DONE, 0, 0))
        return
    chain = Chain(base)
    # A folder that was a link for a moment may be one again when its files' turn comes; without
    # the folder they have no place with whoever receives them.
    lost: set[str] = set()
    try:
        for path, is_folder in plan.items:
            parts = path.split("/") if path else []
            try:
                with about(path):
                    if parts and "/".join(parts[:-1]) in lost:
                        raise TroubleError(NOT_FOUND)
                    if is_folder:
                        found = chain.at(parts).own_stat()
                        host.send(entry_of(found, path))
                    else:
                        fd = chain.at(parts[:-1]).read_file(parts[-1])
                        total += send_file(host, fd, path)
                count += 1
            except TroubleError as trouble:
                plan.skip(path, trouble.code, trouble.number)
                if is_folder:
                    lost.add(path)
    finally:
        chain.close()
    host.send(wire.encode_pair(wire.DONE, count, total))


def send_file(host: Host, fd: int, path: str) -> int:
    """Send a file as far as it went when it was opened, and say whether it has changed."""
    try:
        before, fresh = settled(fd)
        host.send(entry_of(before, path))
        sent = 0
        trouble = False
        while sent < before.st_size:
            try:
                count = host.send_from(fd, before.st_size - sent)
            except OSError:
                # The entry is on its way: what is missing is said at its end.
                trouble = True
                break
            if not count:
                break
            sent += count
        changed = trouble or fresh or sent != before.st_size
        host.send(wire.encode_end(sent, changed or version(before) != version(os.fstat(fd))))
    finally:
        os.close(fd)
    return sent


# -- looking and tidying ----------------------------------------------------------------------


def show(host: Host, order: dict) -> None:  # type: ignore[type-arg]
    """List a folder, or the one entry that the place is."""
    place = Place(order)
    try:
        found = place.find()
        lister = Lister(host, order)
        if stat.S_ISDIR(found.st_mode):
            with below(place):
                lister.folder(place.folder(), "", lister.start)
        else:
            lister.entry(found, "")
        host.send(wire.encode_pair(wire.DONE, lister.count, 0))
    finally:
        place.close()


class Lister:
    """Sends an ENTRY for all that is found, whatever its kind."""

    def __init__(self, host: Host, order: dict) -> None:  # type: ignore[type-arg]
        self.count = 0
        pattern = local(order["pattern"])
        self._globs = Globs([pattern], whole=False) if pattern else None
        self.start = self._globs.start if self._globs else frozenset()
        self._host = host
        self._most = order["limits"]["entries"]
        self._deep = order["recursive"] or bool(pattern)

    def entry(self, found: os.stat_result, path: str) -> None:
        """Send one entry."""
        if len(os.fsencode(path)) > MAX_PATH:
            return
        self.count += 1
        if self.count > self._most:
            raise TroubleError(TOO_MANY)
        self._host.send(entry_of(found, path))

    def folder(self, folder: Folder, path: str, states: States, depth: int = 0) -> None:
        """Send what is in a folder."""
        for name in folder.names():
            below = self._globs.step(states, name) if self._globs else states
            found = folder.find(name)
            if found is None or (self._globs and not below):
                continue
            child = f"{path}/{name}" if path else name
            if self._globs is None or self._globs.matched(below):
                self.entry(found, child)
            if self._deep and stat.S_ISDIR(found.st_mode) and depth + 1 < MAX_PARTS:
                try:
                    inner = folder.folder(name)
                except (OSError, TroubleError):
                    continue  # what cannot be entered is listed, and no more
                with inner, contextlib.suppress(OSError):
                    # One that may be read and not entered is listed, and no more, too.
                    self.folder(inner, child, below, depth + 1)


def remove(host: Host, order: dict) -> None:  # type: ignore[type-arg]
    """Remove a file, or a folder: an empty one, or with the order's leave with all in it."""
    place = Place(order)
    path = place.path_below("")
    try:
        found = place.find()
        with about(path):
            if order["recursive"]:
                remove_tree(place.parent(), place.parts[-1])
            elif stat.S_ISDIR(found.st_mode):
                place.parent().remove_folder(place.parts[-1])
            else:
                place.parent().unlink(place.parts[-1])
    except RecursionError:
        raise TroubleError(TOO_DEEP, path) from None
    finally:
        place.close()
    host.send(wire.encode_pair(wire.DONE, 1, 0))


def make(host: Host, order: dict) -> None:  # type: ignore[type-arg]
    """Make a folder and those above it; one that is there is fine."""
    place = Place(order)
    try:
        with place.named():
            place.chain.at(place.parts, make=True)
    finally:
        place.close()
    host.send(wire.encode_pair(wire.DONE, 1, 0))


ORDERS: dict[str, Callable[[Host, dict], None]] = {  # type: ignore[type-arg]
    "take": take,
    "give": give,
    "collect": collect,
    "show": show,
    "remove": remove,
    "make": make,
}


def main() -> None:
    """Serve the order."""
    host = Host()
    with contextlib.suppress(HostGoneError):
        order = host.order()
        host.silence = order["silence"]
        host.send(wire.encode(wire.HELLO, order["nonce"].encode()))
        host.flush()
        try:
            ORDERS[order["do"]](host, order)
        except TroubleError as trouble:
            why = wire.Why(trouble.code, trouble.number, os.fsencode(trouble.path))
            host.send(wire.encode_why(wire.FAILED, why))
        host.drain()


main()
