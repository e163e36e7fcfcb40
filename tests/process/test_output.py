"""The pure parts: reports, spool, capture."""

from __future__ import annotations

import resource
import signal
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.process.heartbeat import Heartbeat
from sandbox_kernel.process.output import Capture, Reports, Spool
from sandbox_kernel.process.result import Chunk

NONCE = "0123abcd"


@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.sampled_from([b"\x1e", b"\x1e0123", b"\x1eother x\n"]))
    ),
    st.integers(1, 9),
)
def test_reports_are_found_and_taken_out_wherever_the_chunks_are_cut(
    parts: list[bytes], size: int
) -> None:
    """W2, W9, EXW-10."""
    report = b"\x1e0123abcd exit 3\n"
    # A command's own text that happens to end like the marker's beginning stays its own.
    own = b"".join(parts)
    whole = b"".join(part + report for part in parts)
    reports = Reports(NONCE)
    got, heard = bytearray(), []
    for at in range(0, len(whole), size):
        data, words = reports.feed(whole[at : at + size])
        got += data
        heard += words
    got += reports.rest()
    assert bytes(got) == own
    assert heard == [["exit", "3"]] * len(parts)


async def test_a_spool_gives_everything_in_order_through_its_file() -> None:
    """W10."""
    spool = Spool(memory=100)
    chunks = [Chunk(1 + i % 2, bytes([i]) * 30) for i in range(50)]
    for chunk in chunks[:25]:
        spool.put(chunk)
    got = [await spool.get() for _ in range(10)]
    for chunk in chunks[25:]:
        spool.put(chunk)
    spool.end()
    while (chunk_ := await spool.get()) is not None:
        got.append(chunk_)
    assert got == chunks
    spool.close()


@given(st.lists(st.binary(max_size=50)), st.integers(2, 60))
def test_a_capture_keeps_both_ends_and_marks_the_cut(parts: list[bytes], limit: int) -> None:
    """Peers row 12."""
    capture = Capture(limit)
    for part in parts:
        capture.add(part)
    whole = b"".join(parts)
    half = limit // 2
    assert capture.total == len(whole)
    if len(whole) <= 2 * half:
        assert capture.value() == whole
    else:
        assert capture.value().startswith(whole[:half])
        assert capture.value().endswith(whole[-half:])
        assert f"{len(whole) - 2 * half} bytes cut".encode() in capture.value()


async def test_a_disk_that_is_full_spoils_nothing_that_was_taken_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W10, W16: the error is told by `put`, and all that it had taken can be read."""
    spool = Spool(memory=10)
    spool.put(Chunk(1, b"in memory."))
    spool.put(Chunk(1, b"on disk"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        spool.put(Chunk(2, bytes(4096)))
        with pytest.raises(OSError, match="too large"):
            spool.put(Chunk(2, bytes(8192)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    spool.end()
    got = [await spool.get() for _ in range(4)]
    assert got == [Chunk(1, b"in memory."), Chunk(1, b"on disk"), Chunk(2, bytes(4096)), None]
    spool.close()


async def test_engines_of_commands_that_were_never_watched_are_not_kept() -> None:
    """W24."""
    engine = cast(Engine, object())
    assert Heartbeat.of(engine) is not None
    assert engine not in Heartbeat._all
