"""The ZMTP limiter: acceptable bytes pass unchanged, everything else is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.kernel.zmtp import (
    COMMAND_LIMIT,
    HOLD_LIMIT,
    ZmtpError,
    ZmtpLimiter,
    ZmtpLimits,
)


def greeting(mechanism: bytes = b"NULL", major: int = 3) -> bytes:
    return (
        b"\xff" + b"\0" * 8 + b"\x7f" + bytes([major, 1]) + mechanism.ljust(20, b"\0") + bytes(32)
    )


def frame(payload: bytes, *, more: bool = False, command: bool = False) -> bytes:
    flags = more | (4 if command else 0)
    if len(payload) > 255:
        return bytes([flags | 2]) + len(payload).to_bytes(8, "big") + payload
    return bytes([flags, len(payload)]) + payload


def message(*parts: bytes) -> bytes:
    return b"".join(frame(part, more=i < len(parts) - 1) for i, part in enumerate(parts))


def feed_in_pieces(limiter: ZmtpLimiter, data: bytes, sizes: list[int]) -> bytes:
    passed, position, turn = b"", 0, 0
    while position < len(data):
        size = sizes[turn % len(sizes)]
        passed += b"".join(limiter.feed(data[position : position + size]))
        position, turn = position + size, turn + 1
    return passed


parts = st.lists(st.binary(max_size=400), min_size=1, max_size=6)
sizes = st.lists(st.integers(1, 300), min_size=1, max_size=10)
READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03PUB", command=True)


@given(st.lists(parts, max_size=8), sizes)
def test_acceptable_messages_pass_unchanged_however_they_are_cut(
    messages: list[list[bytes]], cuts: list[int]
) -> None:
    """Decision 3: the limiter is transparent for what a kernel normally sends."""
    limiter = ZmtpLimiter()
    data = greeting() + READY + b"".join(message(*m) for m in messages)
    assert feed_in_pieces(limiter, data, cuts) == data
    assert (limiter.messages, limiter.dropped) == (len(messages), 0)


@given(st.lists(parts, max_size=8), sizes, st.integers(1, 900), st.integers(1, 5))
def test_exactly_the_messages_beyond_a_limit_are_left_out(
    messages: list[list[bytes]], cuts: list[int], most_bytes: int, most_parts: int
) -> None:
    """MUX-14: a message that is too large is missing as a whole and its neighbours arrive."""
    limits = ZmtpLimits(message_bytes=most_bytes, parts=most_parts)
    limiter = ZmtpLimiter(limits)
    data = greeting() + b"".join(message(*m) for m in messages)
    kept = [m for m in messages if sum(map(len, m)) <= most_bytes and len(m) <= most_parts]
    assert feed_in_pieces(limiter, data, cuts) == greeting() + b"".join(message(*m) for m in kept)
    assert (limiter.messages, limiter.dropped) == (len(kept), len(messages) - len(kept))


@given(st.lists(st.binary(max_size=3000), max_size=20))
def test_garbage_is_refused_or_passed_but_never_piles_up(pieces: list[bytes]) -> None:
    """MUX-16: what is held back stays within one bound, whatever arrives."""
    limiter = ZmtpLimiter(ZmtpLimits(message_bytes=10_000, parts=3))
    limiter.feed(greeting())
    for piece in pieces:
        try:
            limiter.feed(piece)
        except ZmtpError:
            return
        assert len(limiter._held) <= HOLD_LIMIT + 9 * 3


@pytest.mark.parametrize("size", [2**62, 2**63 + 5, 2**64 - 1])
def test_a_claim_of_a_huge_frame_is_swallowed_without_memory(size: int) -> None:
    """MUX-13: a length is not believed until its bytes come, and these are not kept."""
    limiter = ZmtpLimiter()
    limiter.feed(greeting())
    assert limiter.feed(b"\x02" + size.to_bytes(8, "big") + b"x" * 100_000) == []
    assert not limiter._held
    assert limiter.dropped == 1


def test_a_message_that_grows_beyond_the_limit_after_its_start_was_passed_is_refused() -> None:
    limiter = ZmtpLimiter(ZmtpLimits(message_bytes=HOLD_LIMIT * 2))
    limiter.feed(greeting())
    limiter.feed(frame(b"x" * (HOLD_LIMIT + 1), more=True))
    with pytest.raises(ZmtpError, match="a message of more than"):
        limiter.feed(frame(b"x" * HOLD_LIMIT, more=True))


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"\xff" + bytes(9),
        greeting(major=2),
        greeting(major=4),
        greeting(mechanism=b"PLAIN"),
        greeting(mechanism=b"GSSAPI"),
        greeting() + b"\x08\x00",
        greeting() + b"\x05\x00",
        greeting() + b"\x06" + (COMMAND_LIMIT + 1).to_bytes(8, "big"),
        greeting() + frame(b"x", more=True) + READY,
    ],
)
def test_what_no_kernel_sends_closes_the_connection(data: bytes) -> None:
    """MUX-16: other versions, mechanisms, flags and oversized commands."""
    with pytest.raises(ZmtpError):
        ZmtpLimiter().feed(data)


def test_the_first_bytes_of_a_greeting_are_passed_at_once() -> None:
    """Each side of ZMTP waits for the other's signature; holding it would be a deadlock."""
    limiter = ZmtpLimiter()
    assert limiter.feed(greeting()[:10]) == [greeting()[:10]]
    assert limiter.feed(greeting(b"CURVE")[10:]) == [greeting(b"CURVE")[10:]]
