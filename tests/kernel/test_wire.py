"""The wire codec: any split of a valid stream decodes alike, any garbage ends in one error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.kernel import wire
from sandbox_kernel.kernel.wire import Decoder, Frame, ReceiveWindow, SendWindow, WireError

streams = st.integers(1, 2**32 - 1)
frames = st.one_of(
    st.builds(Frame, st.just(wire.HELLO), st.just(0), st.binary(min_size=2, max_size=200)),
    st.builds(Frame, st.just(wire.OPEN), streams, st.binary(min_size=1, max_size=1)),
    st.builds(Frame, st.just(wire.OPENED), streams, st.just(b"")),
    st.builds(Frame, st.just(wire.DATA), streams, st.binary(min_size=1, max_size=3000)),
    st.builds(Frame, st.just(wire.CREDIT), streams, st.binary(min_size=4, max_size=4)),
    st.builds(Frame, st.just(wire.CLOSE), streams, st.binary(max_size=1024)),
    st.builds(Frame, st.just(wire.PING), st.just(0), st.binary(min_size=8, max_size=8)),
    st.builds(Frame, st.just(wire.PONG), st.just(0), st.binary(min_size=8, max_size=8)),
)


def joined(decoded: list[Frame]) -> list[Frame]:
    """Join neighbouring pieces of data on one stream, which a decoder may split anywhere."""
    result: list[Frame] = []
    for frame in decoded:
        last = result[-1] if result else None
        if last and frame.kind == last.kind == wire.DATA and frame.stream == last.stream:
            result[-1] = last._replace(payload=last.payload + frame.payload)
        else:
            result.append(frame)
    return result


@given(st.lists(frames, max_size=20), st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_any_split_of_a_valid_stream_gives_the_same_frames(
    sent: list[Frame], sizes: list[int]
) -> None:
    """Decision 1: the relay carries bytes, however the engine cuts them."""
    encoded = b"".join(wire.encode(*frame) for frame in sent)
    decoder, received, position, turn = Decoder(), [], 0, 0
    while position < len(encoded):
        size = sizes[turn % len(sizes)]
        received += decoder.feed(encoded[position : position + size])
        position, turn = position + size, turn + 1
    assert joined(received) == joined(sent)


@given(st.lists(st.binary(max_size=5000), max_size=20))
def test_garbage_is_held_within_one_small_frame_or_refused(pieces: list[bytes]) -> None:
    """MUX-05: whatever arrives, the decoder keeps at most one control frame."""
    decoder = Decoder()
    for piece in pieces:
        try:
            decoder.feed(piece)
        except WireError:
            with pytest.raises(WireError):
                decoder.feed(b"")
            break
        assert len(decoder._held) <= wire.HEADER_SIZE + (1 << 14)


@pytest.mark.parametrize(
    "header",
    [
        b"\x04\x00\x00\x00\x01\xff\xff\xff\xff",
        b"\x04\x00\x00\x00\x01\x00\x00\x00\x00",
        b"\x04\x00\x00\x00\x01\x00\x01\x00\x01",
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x00",
        b"\x63\x00\x00\x00\x00\x00\x00\x00\x01",
        b"\x04\x00\x00\x00\x00\x00\x00\x00\x05",
        b"\x07\x00\x00\x00\x09\x00\x00\x00\x08",
        b"HTTP/1.1 ",
        b"OCI runtime exec failed",
    ],
)
def test_an_impossible_header_is_refused_before_its_payload(header: bytes) -> None:
    """MUX-04, MUX-05: no length is believed that the protocol does not allow."""
    with pytest.raises(WireError):
        Decoder().feed(header)
    one_by_one = Decoder()
    with pytest.raises(WireError):
        _ = [one_by_one.feed(bytes([byte])) for byte in header]


@pytest.mark.parametrize(
    ("kind", "stream", "payload"),
    [(wire.DATA, 1, b""), (wire.DATA, 0, b"x"), (wire.PING, 0, b"short"), (99, 0, b"")],
)
def test_only_frames_that_a_decoder_accepts_can_be_encoded(
    kind: int, stream: int, payload: bytes
) -> None:
    with pytest.raises(WireError):
        wire.encode(kind, stream, payload)


@given(st.binary(max_size=300_000), streams)
def test_data_of_any_length_is_cut_into_frames_within_the_maximum(data: bytes, n: int) -> None:
    pieces = wire.encode_data(n, data)
    assert all(len(piece) <= wire.HEADER_SIZE + wire.MAX_DATA for piece in pieces)
    assert b"".join(f.payload for f in Decoder().feed(b"".join(pieces))) == data


@given(st.lists(st.integers(1, wire.WINDOW), max_size=60))
def test_a_sender_that_keeps_to_its_window_is_never_refused(sizes: list[int]) -> None:
    """MUX-08: both windows agree, and what is under way never exceeds the window."""
    sender, receiver, in_flight = SendWindow(), ReceiveWindow(), 0
    for size in sizes:
        count = min(size, sender.available)
        if count:
            sender.spend(count)
            in_flight += count
            receiver.receive(count)
        assert in_flight <= wire.WINDOW
        credit = receiver.consume(in_flight)
        in_flight = 0
        if credit:
            sender.grant(credit)
    assert sender.available + receiver._consumed == wire.WINDOW


def test_ignoring_the_window_is_a_protocol_error() -> None:
    """MUX-08: a peer that sends without credit is cut off."""
    window = ReceiveWindow()
    window.receive(wire.WINDOW)
    with pytest.raises(WireError):
        window.receive(1)


@pytest.mark.parametrize("count", [0, 1, 2**31, 2**32 - 1])
def test_credit_beyond_the_window_is_a_protocol_error(count: int) -> None:
    """MUX-08: credit cannot be inflated."""
    with pytest.raises(WireError):
        SendWindow().grant(count)
