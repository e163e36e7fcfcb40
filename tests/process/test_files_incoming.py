"""A hostile courier, played by the test: bytes go straight into the host's parser (F2, F3).

Whatever is sent, it lands whole below the target or not at all, and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import subprocess
import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_kernel.process.files import trouble as codes
from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.failures import InsideTroubleError
from sandbox_kernel.process.files.incoming import Content, Listing, Nothing, Receiver
from sandbox_kernel.process.files.landing import Landing, Memory
from sandbox_kernel.process.files.result import TransferLimits
from sandbox_kernel.process.files.rules import Globs
from sandbox_kernel.process.files.trouble import TroubleError
from sandbox_kernel.process.files.wire import Entry, Why, WireError

NONCE = "0123456789abcdef" * 2
HELLO = wire.encode(wire.HELLO, NONCE.encode())
LIMITS = TransferLimits(entries=200, file_size=10_000, total_size=20_000)
ROOT = wire.encode_entry(Entry(wire.FOLDER, 0o755, 0, 0, b""))


def folder(path: bytes, mode: int = 0o755) -> bytes:
    return wire.encode_entry(Entry(wire.FOLDER, mode, 0, 0, path))


def begin(path: bytes, size: int, mode: int = 0o644, mtime: int = 0) -> bytes:
    return wire.encode_entry(Entry(wire.FILE, mode, size, mtime, path))


def file(path: bytes, data: bytes, mode: int = 0o644, mtime: int = 0) -> bytes:
    content = wire.encode(wire.DATA, data) if data else b""
    return begin(path, len(data), mode, mtime) + content + wire.encode_end(len(data), False)


def done(count: int, size: int) -> bytes:
    return wire.encode_pair(wire.DONE, count, size)


def tree(*frames: bytes) -> bytes:
    return HELLO + ROOT + b"".join(frames)


@dataclass
class Side:
    """The host's side of one transfer, with a target in a folder of its own."""

    base: Path
    windows: bool = False
    tree: bool = True
    globs: Globs | None = None
    limits: TransferLimits = LIMITS
    overwrite: bool = False

    def __post_init__(self) -> None:
        self.target = self.base / "target"
        self.landing = Landing(self.target, self.overwrite)
        self.judge = Content(
            self.landing, self.limits, tree=self.tree, windows=self.windows, globs=self.globs
        )
        self.receiver = Receiver(NONCE, self.judge, self.limits.entries)

    def take(self, data: bytes, seed: int | None = None) -> None:
        """Do what a transfer does, and clear up whatever happens."""
        chance = random.Random(seed)
        try:
            while data:
                size = len(data) if seed is None else chance.choice([1, 7, 30, 200, len(data)])
                self.receiver.feed(data[:size])
                data = data[size:]
            if self.receiver.finished:
                self.landing.commit()
        finally:
            self.landing.close()

    def found(self) -> dict[str, bytes | None]:
        """Return all that is in the base."""
        return {
            str(path.relative_to(self.base)): None if path.is_dir() else path.read_bytes()
            for path in self.base.rglob("*")
        }


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


def test_what_an_honest_courier_sends_lands(side: Side) -> None:
    """F1."""
    side.take(
        HELLO
        + wire.encode_pair(wire.PLAN, 4, 3)
        + tree(
            folder(b"a"),
            wire.encode_why(wire.SKIPPED, Why(codes.IS_LINK, 0, b"a/link")),
            file(b"a/b", b"abc", 0o4777, 10**18),
            wire.encode(wire.KEEP),
            file(b"empty", b""),
            done(4, 3),
        )[len(HELLO) :]
    )
    assert side.found() == {
        "target": None,
        "target/a": None,
        "target/a/b": b"abc",
        "target/empty": b"",
    }
    assert [(s.path, s.reason) for s in side.receiver.skipped] == [("a/link", "link")]
    found = (side.target / "a" / "b").stat()
    assert stat.S_IMODE(found.st_mode) == 0o755
    assert found.st_mtime == 10**9
    assert found.st_uid == os.geteuid()


BAD_NAMES = {
    "parent": b"..",
    "escape": b"../x",
    "inner escape": b"a/../../x",
    "absolute": b"/abs",
    "backslashes": b"a\\..\\x",
    "drive": b"C:x",
    "dot": b".",
    "dot within": b"a/./x",
    "nul": b"a\0b",
    "slash at the end": b"x/",
    "double slash": b"a//x",
    "escape sequence": b"\x1b]0;x\x07",
    "newline": b"a\nb",
    "long name": b"x" * 256,
    "deep": b"/".join([b"a"] * 101),
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_names_that_lead_elsewhere_end_the_transfer(side: Side, name: bytes, kind: str) -> None:
    """TAR-02: nothing is written, neither outside of the target nor in it."""
    entry = file(name, b"x") if kind == "file" else folder(name)
    # The folders on the way, so that the name alone is what is wrong.
    parts = name.split(b"/")
    above = [folder(b"/".join(parts[:n])) for n in range(1, len(parts)) if all(parts[:n])]
    with pytest.raises(WireError):
        side.take(tree(*above, entry, done(2 + len(above), 1)))
    assert side.found() == {}


@pytest.mark.parametrize("name", [b"CON", b"nul.txt", b"a:b", b"x.", b"\xff"])
def test_names_that_windows_cannot_store_end_the_transfer_there(
    tmp_path: Path, name: bytes
) -> None:
    """F3, TAR-02."""
    with pytest.raises(WireError, match="not safe"):
        Side(tmp_path, windows=True).take(tree(file(name, b"x")))
    if name != b"a:b":
        Side(tmp_path).take(tree(file(name, b"x"), done(2, 1)))


DUPLICATES = {
    "the same": (b"a", b"a"),
    "case": (b"Makefile", b"MAKEFILE"),
    "accents": ("\u00e9".encode(), "e\u0301".encode()),
    "sharp s": ("stra\u00dfe".encode(), b"strasse"),
}


@pytest.mark.parametrize("names", DUPLICATES.values(), ids=DUPLICATES)
def test_two_names_that_some_file_system_takes_for_one_end_the_transfer(
    side: Side, names: tuple[bytes, bytes]
) -> None:
    """F3: nothing that was judged is replaced by something else."""
    with pytest.raises(WireError, match="already"):
        side.take(tree(file(names[0], b"x"), file(names[1], b"y")))
    assert side.found() == {}


HOSTILE = {
    "no hello": ROOT,
    "a hello with another nonce": wire.encode(wire.HELLO, b"x" * 32),
    "data first": wire.encode(wire.DATA, b"x"),
    "the engine's own words": b"OCI runtime exec failed: exec failed: unable to start\r\n",
    "no root": HELLO + file(b"a", b"x"),
    "two roots": tree(ROOT),
    "a second file": HELLO + file(b"", b"x") + file(b"b", b"y"),
    "something in a file": HELLO + file(b"", b"x") + folder(b"b"),
    "a folder that never came": tree(file(b"a/b", b"x")),
    "a file as a folder": tree(file(b"a", b"x"), file(b"a/b", b"y")),
    "a link": tree(wire.encode_entry(Entry(wire.LINK, 0o777, 0, 0, b"l", b"/etc/passwd"))),
    "a device": tree(wire.encode_entry(Entry(wire.OTHER, 0o666, 0, 0, b"null"))),
    "an entry within a file": tree(begin(b"a", 5), file(b"b", b"")),
    "data outside of a file": tree(wire.encode(wire.DATA, b"x")),
    "data after a file": tree(file(b"a", b"x"), wire.encode(wire.DATA, b"x")),
    "an end without a file": tree(wire.encode_end(0, False)),
    "more bytes than announced": tree(begin(b"a", 3), wire.encode(wire.DATA, b"abcd")),
    "fewer bytes than said": tree(
        begin(b"a", 3), wire.encode(wire.DATA, b"ab"), wire.encode_end(3, False)
    ),
    "fewer bytes, unchanged": tree(
        begin(b"a", 3), wire.encode(wire.DATA, b"ab"), wire.encode_end(2, False)
    ),
    "no bytes, unchanged": tree(begin(b"a", 3), wire.encode_end(0, False)),
    "done within a file": tree(begin(b"a", 3), done(1, 0)),
    "done too early": tree(file(b"a", b"x"), done(3, 1)),
    "done with other bytes": tree(file(b"a", b"x"), done(2, 7)),
    "done with nothing": HELLO + done(0, 0),
    "something after done": tree(done(1, 0), wire.encode(wire.KEEP)),
    "a plan after an entry": tree(wire.encode_pair(wire.PLAN, 1, 1)),
    "two plans": HELLO + wire.encode_pair(wire.PLAN, 1, 1) * 2,
    "a frame of the host's": tree(wire.encode(wire.COMMIT)),
    "credit": tree(wire.encode_credit(1)),
    "two hellos": HELLO + HELLO,
    "an unknown frame": tree(b"\x63" + bytes(4)),
    "a claim of 4 GiB": tree(bytes([wire.ENTRY]) + b"\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("seed", [None, 1])
def test_what_no_courier_sends_ends_the_transfer_and_leaves_nothing(
    side: Side, data: bytes, seed: int | None
) -> None:
    """TAR-01, TAR-04, TAR-07, TAR-14: however the bytes are cut."""
    with pytest.raises(WireError):
        side.take(data, seed)
    assert side.found() == {}


TOO_MUCH = {
    "a file, announced": (tree(begin(b"big", 1 << 40)), codes.TOO_LARGE),
    "all files, announced": (
        tree(*(file(b"%d" % i, bytes(9000)) for i in range(3))),
        codes.TOO_MUCH,
    ),
    "all files, planned": (HELLO + wire.encode_pair(wire.PLAN, 1, 1 << 40), codes.TOO_MUCH),
    "entries, planned": (HELLO + wire.encode_pair(wire.PLAN, 201, 0), codes.TOO_MANY),
    "folders": (tree(*(folder(b"%d" % i) for i in range(250))), codes.TOO_MANY),
    "empty files": (tree(*(file(b"%d" % i, b"") for i in range(250))), codes.TOO_MANY),
    "notes": (
        tree(*(wire.encode_why(wire.SKIPPED, Why(2, 0, b"%d" % i)) for i in range(250))),
        codes.TOO_MANY,
    ),
}


@pytest.mark.parametrize(("data", "code"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_more_than_the_limits_is_refused_as_soon_as_it_shows(
    side: Side, data: bytes, code: int
) -> None:
    """TAR-05, TAR-10: before its bytes, and nothing of it stays."""
    with pytest.raises(InsideTroubleError) as caught:
        side.take(data)
    assert caught.value.trouble.code == code
    assert side.found() == {}


def test_what_a_courier_reports_is_trouble_with_that_file(side: Side) -> None:
    """F1: a code, never a text that is parsed."""
    with pytest.raises(InsideTroubleError) as caught:
        side.take(tree(wire.encode_why(wire.FAILED, Why(codes.NOT_FOUND, 2, b"/workspace/x"))))
    trouble = caught.value.trouble
    assert (trouble.code, trouble.path, trouble.number) == (codes.NOT_FOUND, "/workspace/x", 2)
    assert side.found() == {}


def test_a_file_that_changed_lands_with_the_bytes_that_came_and_is_named(side: Side) -> None:
    """TAR-07: never padded, and never reported as if nothing had happened."""
    side.take(
        tree(begin(b"log", 9), wire.encode(wire.DATA, b"abc"), wire.encode_end(3, True), done(2, 3))
    )
    assert (side.target / "log").read_bytes() == b"abc"
    assert side.judge.tally.changed == ["log"]
    assert side.judge.tally.size == 3


@pytest.mark.parametrize("cut", range(0, 200, 9))
def test_a_stream_that_is_cut_leaves_nothing(side: Side, cut: int) -> None:
    """TAR-14: the last frame is what makes it whole."""
    whole = tree(folder(b"a"), file(b"a/b", b"x" * 100), done(3, 100))
    assert cut < len(whole)
    side.take(whole[:cut])
    assert not side.receiver.finished
    assert side.found() == {}


def test_only_what_was_asked_for_may_come(tmp_path: Path) -> None:
    """F3: a courier cannot add a file to the artifacts."""
    globs = Globs(["*.png", "report/**"], whole=True)
    for extra in (file(b"evil.sh", b"x"), folder(b"other"), file(b"a.png.sh", b"x")):
        with pytest.raises(WireError, match="nobody asked"):
            Side(tmp_path, globs=globs).take(tree(extra))
    side = Side(tmp_path, globs=globs)
    side.take(tree(file(b"a.png", b"x"), folder(b"report"), file(b"report/r", b"y"), done(4, 2)))
    assert set(side.found()) == {"target", "target/a.png", "target/report", "target/report/r"}


def test_a_folder_cannot_come_where_a_file_was_asked_for(tmp_path: Path) -> None:
    """F2."""
    with pytest.raises(WireError):
        Side(tmp_path, tree=False).take(HELLO + ROOT)


def test_an_order_that_gives_nothing_takes_nothing() -> None:
    """F1: while something is put, a courier can only say that it is done, once it can be."""
    sent = [0, 0]
    for data in (ROOT, wire.encode(wire.DATA, b"x"), wire.encode_pair(wire.PLAN, 0, 0), done(1, 5)):
        receiver = Receiver(NONCE, Nothing(lambda: (sent[0], sent[1])), 5)
        with pytest.raises(WireError):
            receiver.feed(HELLO + data)
    sent[:] = [1, 5]
    receiver = Receiver(NONCE, Nothing(lambda: (sent[0], sent[1])), 5)
    receiver.feed(HELLO + done(1, 5))
    assert receiver.finished


@pytest.mark.parametrize("path", [b"../x", b"/x", b"a//b", b".", b"a\0"])
def test_a_list_has_no_impossible_paths(path: bytes) -> None:
    """TAR-02: and at most as many entries as were asked for."""
    receiver = Receiver(NONCE, Listing("/workspace", 3, False), 5)
    with pytest.raises(WireError):
        receiver.feed(HELLO + file(path, b"")[: -len(wire.encode_end(0, False))])
    receiver = Receiver(NONCE, Listing("/workspace", 3, False), 5)
    with pytest.raises(InsideTroubleError):
        receiver.feed(HELLO + b"".join(begin(b"%d" % i, 0) for i in range(4)))


def test_a_list_says_what_would_be_left_out(tmp_path: Path) -> None:
    """TAR-04: links, FIFOs and names that are not safe are shown, with the reason."""
    listing = Listing("/output", 10, False)
    Receiver(NONCE, listing, 5).feed(
        HELLO
        + wire.encode_entry(Entry(wire.LINK, 0o777, 0, 0, b"l"))
        + wire.encode_entry(Entry(wire.OTHER, 0o644, 0, 0, b"fifo"))
        + begin(b"a\nb", 5)
        + begin(b"ok", 7, 0o600, 1_500_000_000)
        + done(4, 0)
    )
    assert [(e.path, e.kind, e.refused) for e in listing.entries] == [
        ("/output/l", "link", "link"),
        ("/output/fifo", "other", "not-regular"),
        ("/output/a\nb", "file", "name"),
        ("/output/ok", "file", None),
    ]
    assert (listing.entries[3].name, listing.entries[3].size, listing.entries[3].mode) == (
        "ok",
        7,
        0o600,
    )
    assert listing.entries[3].mtime == 1.5


# -- where it lands ---------------------------------------------------------------------------


def test_a_target_in_which_folders_became_links_is_not_left(tmp_path: Path) -> None:
    """F3: somebody swaps a folder of the target while the files come."""
    outside = tmp_path / "outside"
    outside.mkdir()
    base = tmp_path / "base"
    (base / "target" / "sub").mkdir(parents=True)
    side = Side(base, overwrite=True)
    side.receiver.feed(tree(folder(b"sub"), file(b"sub/x", b"new"), done(3, 3)))
    (base / "target" / "sub").rename(base / "moved")
    (base / "target" / "sub").symlink_to(outside)
    with pytest.raises(TroubleError) as caught:
        side.landing.commit()
    side.landing.close()
    assert caught.value.code == codes.NOT_FOLDER
    assert os.listdir(outside) == []
    assert sorted(os.listdir(base)) == ["moved", "target"]
    assert os.listdir(base / "target") == ["sub"]


def test_a_target_folder_that_was_swapped_itself_gets_nothing_through_the_link(
    tmp_path: Path,
) -> None:
    """F3: it was opened once, and what was opened gets the files."""
    outside = tmp_path / "outside"
    outside.mkdir()
    base = tmp_path / "base"
    base.mkdir()
    side = Side(base)
    side.receiver.feed(tree(file(b"x", b"new"), done(2, 3)))
    base.rename(tmp_path / "moved")
    base.symlink_to(outside)
    side.landing.commit()
    side.landing.close()
    assert os.listdir(outside) == []
    assert (tmp_path / "moved" / "target" / "x").read_bytes() == b"new"


def test_a_file_lands_in_place_of_a_link_and_what_it_leads_to_is_kept(tmp_path: Path) -> None:
    """F2."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    base = tmp_path / "base"
    base.mkdir()
    (base / "target").symlink_to(victim)
    with pytest.raises(TroubleError) as caught:
        Side(base).take(HELLO + file(b"", b"new") + done(1, 3))
    assert caught.value.code == codes.EXISTS
    Side(base, overwrite=True).take(HELLO + file(b"", b"new") + done(1, 3))
    assert victim.read_text() == "kept"
    assert (base / "target").read_text() == "new"


def test_a_file_does_not_land_on_a_folder(side: Side) -> None:
    """F1."""
    side.target.mkdir()
    with pytest.raises(TroubleError) as caught:
        side.take(HELLO + file(b"", b"x") + done(1, 1))
    assert caught.value.code == codes.IS_FOLDER
    assert side.found() == {"target": None}


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 1 MiB."""
    mount = Path(tempfile.mkdtemp(prefix="sbxsmall-"))
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=True)
        try:
            yield mount
        finally:
            subprocess.run(["umount", mount], check=True)
    finally:
        mount.rmdir()


def test_a_full_disk_here_leaves_nothing(small_disk: Path) -> None:
    """F3: the trouble is that of the target, and the room is free again."""
    limits = TransferLimits(entries=10, file_size=4 << 20, total_size=8 << 20)
    data = wire.encode(wire.DATA, bytes(1 << 20))
    side = Side(small_disk, limits=limits)
    with pytest.raises(TroubleError) as caught:
        side.take(tree(begin(b"a", 3 << 20), data * 3, wire.encode_end(3 << 20, False)))
    assert caught.value.code == codes.DISK_FULL
    assert side.found() == {}
    assert os.statvfs(small_disk).f_bavail * 4096 > 900_000


@pytest.mark.parametrize("mtime", [-(2**63), -1, 2**63 - 1])
def test_no_time_of_a_file_breaks_its_landing(side: Side, mtime: int) -> None:
    """TAR-14: times before 1970 and as late as can be."""
    side.take(HELLO + file(b"", b"x", mtime=mtime) + done(1, 1))
    assert 0 <= side.target.stat().st_mtime <= 2**63 / 10**9


def test_a_small_file_in_memory() -> None:
    """F1."""
    memory = Memory()
    judge = Content(memory, LIMITS, tree=False, windows=False)
    Receiver(NONCE, judge, 1).feed(HELLO + file(b"", b"content") + done(1, 7))
    assert bytes(memory.content) == b"content"


# -- anything at all --------------------------------------------------------------------------

names = st.sampled_from([b"a", b"b", b"A", b"..", b".", b"", b"x/y", b"a\\b", b"\xff", b"\n", b"l"])
paths = st.lists(names, max_size=4).map(b"/".join)
frames = st.one_of(
    st.builds(folder, paths, st.integers(0, 0o7777)),
    st.builds(file, paths, st.binary(max_size=50), st.integers(0, 0o7777)),
    st.builds(begin, paths, st.integers(0, 100)),
    st.binary(min_size=1, max_size=50).map(lambda data: wire.encode(wire.DATA, data)),
    st.builds(wire.encode_end, st.integers(0, 100), st.booleans()),
    st.builds(
        lambda path, target: wire.encode_entry(Entry(wire.LINK, 0o777, 0, 0, path, target)),
        paths,
        paths,
    ),
    st.builds(done, st.integers(0, 6), st.integers(0, 100)),
    st.binary(min_size=1, max_size=30),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(frames, max_size=12), st.booleans(), st.integers())
def test_whatever_is_sent_only_plain_files_below_the_target_appear(
    sent: list[bytes], honest_start: bool, seed: int
) -> None:
    """F2, F3, TAR-02, TAR-14: three errors are possible, and no trace outside."""
    with tempfile.TemporaryDirectory() as name:
        outer = Path(name)
        (outer / "base").mkdir()
        (outer / "secret").write_text("kept")
        side = Side(outer / "base")
        data = b"".join(sent)
        with contextlib.suppress(WireError, InsideTroubleError, TroubleError):
            side.take(tree(data) if honest_start else HELLO + data, seed)
        assert sorted(os.listdir(outer)) == ["base", "secret"]
        assert (outer / "secret").read_text() == "kept"
        assert set(os.listdir(outer / "base")) <= {"target"}
        if not side.receiver.finished:
            assert os.listdir(outer / "base") == []
        for path in (outer / "base").rglob("*"):
            found = path.lstat()
            assert stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
            assert not stat.S_IMODE(found.st_mode) & 0o7022


trees = st.dictionaries(
    st.lists(st.sampled_from(["a", "b", "c", "\u00fc", ".d"]), min_size=1, max_size=4).map(
        "/".join
    ),
    st.binary(max_size=200),
    max_size=8,
)


@settings(max_examples=100, deadline=None)
@given(trees, st.integers())
def test_any_tree_lands_as_it_is(content: dict[str, bytes], seed: int) -> None:
    """F1: the round trip through frames and the disk."""
    # What would be a file and a folder at once is a file.
    files = {
        path: data
        for path, data in content.items()
        if not any(other != path and other.startswith(path + "/") for other in content)
    }
    folders = sorted(
        {"/".join(p.split("/")[:n]) for p in files for n in range(1, p.count("/") + 1)}
    )
    sent = [folder(path.encode()) for path in folders]
    sent += [file(path.encode(), data) for path, data in files.items()]
    size = sum(map(len, files.values()))
    with tempfile.TemporaryDirectory() as name:
        side = Side(Path(name))
        side.take(tree(*sent, done(1 + len(sent), size)), seed)
        expected: dict[str, bytes | None] = {f"target/{path}": data for path, data in files.items()}
        expected |= {f"target/{path}": None for path in folders}
        assert side.found() == {"target": None, **expected}


def test_memory_does_not_grow_with_what_comes(tmp_path: Path) -> None:
    """F1, TAR-14: 64 MiB of content, and claims without end, cost less than 8 MiB."""
    limits = TransferLimits(entries=1000, file_size=64 << 20, total_size=64 << 20)
    side = Side(tmp_path, limits=limits)
    data = wire.encode(wire.DATA, bytes(1 << 20))
    tracemalloc.start()
    try:
        side.receiver.feed(tree(begin(b"big", 64 << 20)))
        for _ in range(64):
            side.receiver.feed(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        side.landing.close()
    assert peak < 8 << 20
