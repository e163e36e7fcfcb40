"""The codec between the host and the courier: whatever is sent arrives, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.wire import Decoder, Entry, Frame, Why, WireError

SOURCES = Path(wire.__file__).parent
SENT_ALONG = ("wire", "trouble", "rules", "folder", "courier")

paths = st.binary(max_size=300)
entries = st.builds(
    Entry,
    kind=st.sampled_from([wire.FILE, wire.FOLDER, wire.OTHER]),
    mode=st.integers(0, 0o7777),
    size=st.integers(0, 2**64 - 1),
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    path=paths,
    target=st.just(b""),
)
links = st.builds(lambda path, target: Entry(wire.LINK, 0o777, 0, 0, path, target), paths, paths)
numbers = st.integers(0, 2**64 - 1)
frames = st.one_of(
    st.one_of(entries, links).map(wire.encode_entry),
    st.binary(min_size=1, max_size=2000).map(lambda data: wire.encode(wire.DATA, data)),
    st.builds(wire.encode_end, numbers, st.booleans()),
    st.builds(wire.encode_pair, st.sampled_from([wire.PLAN, wire.DONE]), numbers, numbers),
    st.integers(0, 2**32 - 1).map(wire.encode_credit),
    st.sampled_from([wire.COMMIT, wire.KEEP]).map(wire.encode),
    st.builds(
        lambda kind, code, number, path: wire.encode_why(kind, Why(code, number, path)),
        st.sampled_from([wire.SKIPPED, wire.FAILED]),
        st.integers(0, 255),
        st.integers(0, 0xFFFF),
        paths,
    ),
)


def pieces_of(data: bytes, seed: int) -> list[bytes]:
    """Cut bytes where a network might."""
    chance = random.Random(seed)
    pieces = []
    while data:
        size = chance.choice([1, 2, 3, 7, 50, 1000, len(data)])
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def joined(found: list[Frame]) -> list[tuple[int, bytes]]:
    """Join the pieces of DATA that follow each other."""
    result: list[tuple[int, bytes]] = []
    for frame in found:
        payload = bytes(frame.payload)
        if frame.kind == wire.DATA and result and result[-1][0] == wire.DATA:
            result[-1] = (wire.DATA, result[-1][1] + payload)
        else:
            result.append((frame.kind, payload))
    return result


@given(st.lists(frames, max_size=20), st.integers())
def test_frames_arrive_however_the_bytes_are_cut(sent: list[bytes], seed: int) -> None:
    """F1: the codec has no state that depends on how the bytes come."""
    whole = joined(Decoder().feed(b"".join(sent)))
    decoder = Decoder()
    found: list[Frame] = []
    for piece in pieces_of(b"".join(sent), seed):
        # A view is good until the next call only.
        found += [Frame(kind, bytes(payload)) for kind, payload in decoder.feed(piece)]
    assert joined(found) == whole
    assert b"".join(
        wire.encode(kind, data) for kind, data in whole if kind != wire.DATA
    ) == b"".join(frame for frame in sent if frame[0] != wire.DATA)


@given(st.one_of(entries, links))
def test_an_entry_means_what_was_encoded(entry: Entry) -> None:
    """F1: names are bytes, whatever they are."""
    [frame] = Decoder().feed(wire.encode_entry(entry))
    assert wire.decode_entry(bytes(frame.payload)) == entry


@given(st.binary(max_size=3000), st.integers())
def test_any_bytes_give_frames_or_one_error_for_ever(data: bytes, seed: int) -> None:
    """TAR-14: nothing but `WireError`, and no memory beyond a frame that is not DATA."""
    decoder = Decoder()
    broken = False
    for piece in pieces_of(data, seed):
        try:
            for frame in decoder.feed(piece):
                assert not broken
                if frame.kind == wire.ENTRY:
                    decode_or_refuse(bytes(frame.payload))
        except WireError:
            broken = True
        assert len(decoder._held) <= wire.HEADER_SIZE + wire.MAX_ORDER


def decode_or_refuse(payload: bytes) -> None:
    with contextlib.suppress(WireError):
        wire.decode_entry(payload)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" + bytes(4),
        b"\xff" + bytes(4),
        bytes([wire.DATA]) + bytes(4),
        bytes([wire.DATA]) + (wire.MAX_DATA + 1).to_bytes(4, "big"),
        bytes([wire.ENTRY]) + (1 << 31).to_bytes(4, "big"),
        bytes([wire.HELLO]) + (1).to_bytes(4, "big"),
        bytes([wire.END]) + (200).to_bytes(4, "big"),
        bytes([wire.COMMIT]) + (1).to_bytes(4, "big"),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_its_payload_comes(data: bytes) -> None:
    """TAR-14: a claim of 2 GiB costs nothing."""
    with pytest.raises(WireError):
        Decoder().feed(data)


@pytest.mark.parametrize(
    "payload",
    [
        # kind, mode, size, mtime, length of the path, then path and target
        wire._ENTRY.pack(0, 0, 0, 0, 0),
        wire._ENTRY.pack(9, 0, 0, 0, 0),
        wire._ENTRY.pack(wire.FILE, 0o10000, 0, 0, 0),
        wire._ENTRY.pack(wire.FILE, 0, 0, 0, 5) + b"abc",
        wire._ENTRY.pack(wire.FILE, 0, 0, 0, 1) + b"a" + b"target of a file",
        wire._ENTRY.pack(wire.LINK, 0, 0, 0, 5000) + bytes(5000),
    ],
)
def test_an_entry_that_cannot_be_is_refused(payload: bytes) -> None:
    """TAR-13, TAR-14."""
    with pytest.raises(WireError):
        wire.decode_entry(payload)


def test_what_no_decoder_takes_cannot_be_encoded() -> None:
    with pytest.raises(WireError):
        wire.encode(wire.DATA, b"")
    with pytest.raises(WireError):
        wire.encode_entry(Entry(wire.FILE, 0, 0, 0, bytes(wire.MAX_PATH + 1)))


@pytest.mark.parametrize("name", SENT_ALONG)
def test_what_is_sent_into_a_sandbox_is_for_python_3_8_and_the_standard_library(name: str) -> None:
    """Decision 10: the image brings nothing but python3."""
    text = (SOURCES / f"{name}.py").read_text()
    tree = ast.parse(text, feature_version=(3, 8))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = "sandbox_kernel.process.files"
    outside = {n for n in names if not n.startswith(own)}
    assert outside <= {
        "__future__", "collections", "collections.abc", "contextlib", "errno", "fcntl", "fnmatch",
        "json", "os", "re", "select", "stat", "struct", "time", "typing", "unicodedata",
    }  # fmt: skip
    # Nothing of it may be evaluated that 3.8 does not have.
    assert "from __future__ import annotations" in text
