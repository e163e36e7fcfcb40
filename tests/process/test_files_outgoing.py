"""What of this machine is sent, and what is refused before anything is (F1)."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pathspec
import pytest

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.process.files import trouble as codes
from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.outgoing import BATCH, Batches, Bytes, Source, Stream, Tree
from sandbox_kernel.process.files.result import TransferLimits
from sandbox_kernel.process.files.trouble import TroubleError

LIMITS = TransferLimits()


def sent(source: Source) -> tuple[list[wire.Entry], dict[str, bytes]]:
    """Return the entries that a source sends, and what is in its files."""
    entries: list[wire.Entry] = []
    content: dict[str, bytes] = {}
    decoder = wire.Decoder()
    batches = Batches(source)
    while pieces := batches.next():
        assert sum(map(len, pieces)) <= BATCH + wire.MAX_DATA
        for piece in pieces:
            for kind, payload in decoder.feed(piece):
                if kind == wire.ENTRY:
                    entries.append(wire.decode_entry(bytes(payload)))
                    if entries[-1].kind == wire.FILE:
                        content[entries[-1].path.decode("utf-8", "surrogateescape")] = b""
                elif kind == wire.DATA:
                    content[entries[-1].path.decode("utf-8", "surrogateescape")] += bytes(payload)
                else:
                    assert kind == wire.END
                    size, _ = wire.decode_end(bytes(payload))
                    assert size == len(content[entries[-1].path.decode("utf-8", "surrogateescape")])
    batches.close()
    assert source.tally.size == sum(map(len, content.values()))
    assert source.tally.files == len(content)
    return entries, content


def tree(path: Path, limits: TransferLimits = LIMITS, ignore: Any = None) -> Tree:
    return Tree(path, limits, ignore)


def make(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(os.fsencode(path))
    return root


def test_a_tree_is_sent_each_folder_before_what_is_in_it(tmp_path: Path) -> None:
    """F1: with modes and times, and names that are no text."""
    odd = os.fsdecode(b"line\nbreak \xff")
    make(tmp_path, "a/b/c", "a/x", odd)
    (tmp_path / "a" / "x").chmod(0o4755)
    os.utime(tmp_path / "a" / "x", ns=(0, 1234567890123456789))
    (tmp_path / "large").write_bytes(os.urandom(3_000_001))
    source = tree(tmp_path)
    assert source.total == 3_000_001 + len("a/b/c") + len("a/x") + len(os.fsencode(odd))
    entries, content = sent(source)
    assert [entry.path for entry in entries] == sorted(
        (entry.path for entry in entries), key=lambda p: p.split(b"/")
    )
    assert [e.path for e in entries if e.kind == wire.FOLDER] == [b"", b"a", b"a/b"]
    assert content[odd] == os.fsencode(odd)
    assert content["large"] == (tmp_path / "large").read_bytes()
    [x] = [entry for entry in entries if entry.path == b"a/x"]
    assert (x.mode, x.mtime_ns) == (0o4755, 1234567890123456789)
    assert source.tally.changed == []


def test_links_that_stay_inside_are_sent_as_links(tmp_path: Path) -> None:
    """F1: also those that lead nowhere yet."""
    make(tmp_path, "a/x", "b/y")
    (tmp_path / "a" / "link").symlink_to("../b/y")
    (tmp_path / "a" / "folder").symlink_to("../b")
    (tmp_path / "dangling").symlink_to("not/there")
    entries, content = sent(tree(tmp_path))
    links = {entry.path: entry.target for entry in entries if entry.kind == wire.LINK}
    assert links == {b"a/link": b"../b/y", b"a/folder": b"../b", b"dangling": b"not/there"}
    assert set(content) == {"a/x", "b/y"}


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../outside", "../tree/x", "sub/../../outside", "through/secret"]
)
def test_a_link_that_leads_out_is_refused_by_its_name(tmp_path: Path, target: str) -> None:
    """F1: as it is written and as it leads; nothing was sent."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("x")
    root = make(tmp_path / "tree", "x", "sub/y")
    if target.startswith("through"):
        # Inside as it is written, and out as it leads.
        (root / "through").symlink_to(tmp_path / "outside")
        spec = pathspec.PathSpec.from_lines("gitignore", ["/through"])
    else:
        spec = pathspec.PathSpec.from_lines("gitignore", [])
    (root / "link").symlink_to(target)
    with pytest.raises(SandboxSpecRejectedError, match=r"link.*leads out"):
        tree(root, ignore=spec)


def test_a_link_that_was_swapped_after_the_look_is_refused_too(tmp_path: Path) -> None:
    """F1: and a file that became a link is not followed."""
    root = make(tmp_path / "tree", "x", "y")
    (root / "link").symlink_to("x")
    source = tree(root)
    (root / "link").unlink()
    (root / "link").symlink_to("/etc/passwd")
    with pytest.raises(SandboxSpecRejectedError, match="leads out"):
        sent(source)
    source = tree(make(tmp_path / "other", "x"))
    (tmp_path / "other" / "x").unlink()
    (tmp_path / "other" / "x").symlink_to("/etc/passwd")
    with pytest.raises(TroubleError) as caught:
        sent(source)
    assert (caught.value.code, caught.value.path) == (codes.IS_LINK, "x")


def test_what_is_no_file_is_left_out_of_a_tree_and_refused_alone(tmp_path: Path) -> None:
    """TAR-13: FIFOs, sockets and devices; nothing waits for them."""
    root = make(tmp_path / "tree", "x")
    os.mkfifo(root / "fifo")
    source = tree(root)
    assert [(s.path, s.reason) for s in source.skipped] == [("fifo", "not-regular")]
    assert set(sent(source)[1]) == {"x"}
    with pytest.raises(TroubleError) as caught:
        tree(root / "fifo")
    assert caught.value.code == codes.NOT_REGULAR
    with pytest.raises(TroubleError) as caught:
        tree(root / "missing")
    assert caught.value.code == codes.NOT_FOUND


def test_hard_links_are_files_of_their_own(tmp_path: Path) -> None:
    """TAR-13."""
    make(tmp_path, "x")
    os.link(tmp_path / "x", tmp_path / "y")
    entries, content = sent(tree(tmp_path))
    assert content == {"x": b"x", "y": b"x"}
    assert all(entry.kind != wire.LINK for entry in entries)


def test_the_callers_own_path_may_be_a_link(tmp_path: Path) -> None:
    """F1: what somebody names is what they mean."""
    make(tmp_path / "real", "x")
    (tmp_path / "name").symlink_to("real")
    (tmp_path / "file").symlink_to("real/x")
    assert set(sent(tree(tmp_path / "name"))[1]) == {"x"}
    assert sent(tree(tmp_path / "file"))[1] == {"": b"x"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], {"keep.py", "build/out", "build/keep", "data/raw/x.csv", "sub/build/z"}),
        (["build/"], {"keep.py", "data/raw/x.csv"}),
        (["/build/"], {"keep.py", "data/raw/x.csv", "sub/build/z"}),
        (["build/*", "!build/keep"], {"keep.py", "build/keep", "data/raw/x.csv", "sub/build/z"}),
        (["*", "!*.py"], {"keep.py"}),
        (["**/raw/*.csv"], {"keep.py", "build/out", "build/keep", "sub/build/z"}),
    ],
)
def test_ignore_rules_are_those_of_the_caller(
    tmp_path: Path, lines: list[str], expected: set[str]
) -> None:
    """F1, B11: as git reads them, where that is the kind that is given."""
    make(tmp_path, "keep.py", "build/out", "build/keep", "data/raw/x.csv", "sub/build/z")
    spec = pathspec.GitIgnoreSpec.from_lines(lines)
    assert set(sent(tree(tmp_path, ignore=spec))[1]) == expected


def test_what_is_ignored_is_not_even_looked_at(tmp_path: Path) -> None:
    """F1: an ignored link or folder can be as it likes."""
    make(tmp_path, "x", "cache/y")
    (tmp_path / "cache" / "out").symlink_to("/etc/passwd")
    (tmp_path / "out").symlink_to("/etc/passwd")
    spec = pathspec.GitIgnoreSpec.from_lines(["cache/", "/out"])
    source = tree(tmp_path, TransferLimits(entries=2), spec)
    assert set(sent(source)[1]) == {"x"}


def test_a_folder_that_is_ignored_but_for_a_file_is_sent_with_that_file(tmp_path: Path) -> None:
    """F1: as .dockerignore has it, where the folder itself matches."""
    make(tmp_path, "dir/a", "dir/keep", "x")
    spec = pathspec.PathSpec.from_lines("gitignore", ["dir", "!dir/keep"])
    entries, content = sent(tree(tmp_path, ignore=spec))
    assert set(content) == {"dir/keep", "x"}
    assert [e.path for e in entries if e.kind == wire.FOLDER] == [b"", b"dir"]


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (TransferLimits(entries=3), codes.TOO_MANY),
        (TransferLimits(file_size=9), codes.TOO_LARGE),
        (TransferLimits(total_size=25), codes.TOO_MUCH),
    ],
)
def test_too_much_is_refused_before_anything_is_sent(
    tmp_path: Path, limits: TransferLimits, code: int
) -> None:
    """F1: by looking alone."""
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(10))
    with pytest.raises(TroubleError) as caught:
        tree(tmp_path, limits)
    assert caught.value.code == code
    with pytest.raises(TroubleError):
        Bytes(bytes(30), TransferLimits(file_size=29))


def test_a_file_that_grew_after_the_look_does_not_pass_the_limit(tmp_path: Path) -> None:
    """F1."""
    (tmp_path / "x").write_bytes(bytes(10))
    source = tree(tmp_path, TransferLimits(file_size=20))
    (tmp_path / "x").write_bytes(bytes(30))
    with pytest.raises(TroubleError) as caught:
        sent(source)
    assert caught.value.code == codes.TOO_LARGE


def test_a_file_that_shrinks_while_it_is_sent_is_named(tmp_path: Path) -> None:
    """TAR-07, on this side: the size is that of the bytes that were there."""
    (tmp_path / "x").write_bytes(bytes(5_000_000))
    source = tree(tmp_path / "x")
    frames = source.frames()
    taken = [next(frames), next(frames)]
    os.truncate(tmp_path / "x", 2_000_000)
    rest = list(frames)
    decoder = wire.Decoder()
    found = [frame for piece in (*taken, *rest) for frame in decoder.feed(piece)]
    size, changed = wire.decode_end(bytes(found[-1].payload))
    assert size == source.tally.size < 5_000_000
    assert changed
    assert source.tally.changed == [""]


def test_a_stream_is_read_to_its_end_and_must_give_bytes() -> None:
    """F1."""
    data = os.urandom(700_000)
    assert sent(Stream(io.BytesIO(data), LIMITS))[1] == {"": data}
    with pytest.raises(SandboxSpecRejectedError, match="binary"):
        Stream(io.StringIO("x"), LIMITS)  # type: ignore[arg-type]

    class Odd:
        def read(self, size: int) -> str:
            return "text"

    with pytest.raises(SandboxSpecRejectedError, match="binary"):
        sent(Stream(Odd(), LIMITS))  # type: ignore[arg-type]
    with pytest.raises(TroubleError) as caught:
        sent(Stream(io.BytesIO(data), TransferLimits(file_size=699_999)))
    assert caught.value.code == codes.TOO_LARGE


def test_a_reader_that_gives_more_than_asked_breaks_nothing() -> None:
    """F1: a file object need not keep to the size."""

    class Generous(io.RawIOBase):
        gone = False

        def read(self, size: int = -1) -> bytes:
            data, self.gone = b"" if self.gone else bytes(3 * wire.MAX_DATA + 1), True
            return data

    assert sent(Stream(Generous(), LIMITS))[1] == {"": bytes(3 * wire.MAX_DATA + 1)}  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"x", bytes(700_000)])
def test_bytes_are_sent_as_a_file(data: bytes) -> None:
    """F1: of any kind that holds bytes."""
    for content in (data, bytearray(data), memoryview(data)):
        source = Bytes(content, LIMITS)
        assert source.total == len(data)
        assert sent(source)[1] == {"": data}


def test_a_tree_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """TAR-10: by its name, and not by running out of something."""
    deep = tmp_path.joinpath(*["d"] * 120)
    deep.mkdir(parents=True)
    with pytest.raises(TroubleError) as caught:
        tree(tmp_path)
    assert caught.value.code == codes.TOO_DEEP
