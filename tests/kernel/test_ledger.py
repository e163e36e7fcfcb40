"""What clients wait for, as it is read from the bytes that pass; no engine, no sockets."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.session import Session

from sandbox_kernel.kernel.ledger import NOTED, Ledger, MessageReader, frames
from sandbox_kernel.kernel.obituary import signed_message
from sandbox_kernel.kernel.zmtp import ZmtpLimiter

CONNECTION = {"key": "0123456789"}
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x03abc"


def greeting(mechanism: bytes = b"NULL") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def hello() -> bytes:
    return greeting() + bytes([4, len(READY)]) + READY


def asked(kind: str = "execute_request", **header: Any) -> tuple[list[bytes], dict[str, Any]]:
    session = Session(key=b"0123456789")
    message = session.msg(kind, {"code": "x" * 70_000})
    message["header"].update(header)
    return session.serialize(message), message["header"]


@given(st.integers(1, 9000))
def test_a_request_is_read_in_whatever_pieces_it_comes(size: int) -> None:
    """Goal 7: with the identity of the socket that sent it."""
    parts, header = asked()
    data = hello() + frames(parts) + frames(parts)
    reader = MessageReader()
    found = [m for at in range(0, len(data), size) for m in reader.feed(data[at : at + size])]
    assert found == [parts[:3]] * 2
    assert reader.identity == b"abc"
    ledger = Ledger()
    ledger.send(reader.identity, found[0])
    [request] = ledger.open()
    assert (request.header["msg_id"], request.client) == (header["msg_id"], b"abc")


@given(st.binary(max_size=300))
def test_whatever_a_client_sends_breaks_nothing(data: bytes) -> None:
    """Goal 7."""
    for before in (b"", greeting(), hello()):
        reader, ledger = MessageReader(), Ledger()
        for message in reader.feed(before + data):
            ledger.send(reader.identity, message)


def test_encrypted_messages_are_not_read() -> None:
    """Decision 6."""
    parts, _ = asked()
    assert MessageReader().feed(greeting(b"CURVE") + frames(parts)) == []


def test_a_request_is_over_with_its_reply_and_an_idle_kernel() -> None:
    """Goal 7: not with one of them, nor with what answers another one."""
    ledger = Ledger()
    parts, header = asked()
    _, other = asked()
    ledger.send(b"abc", parts)
    [request] = ledger.open()
    for channel, kind, content, parent in (
        ("iopub", "status", {"execution_state": "busy"}, header),
        ("iopub", "status", {"execution_state": "idle"}, other),
        ("shell", "execute_reply", {"status": "ok", "more": "x" * 1000}, header),
        ("iopub", "status", {"execution_state": "idle"}, header),
    ):
        assert ledger.is_open(request)
        limiter = ZmtpLimiter(note=NOTED[channel])
        usable = {k: v for k, v in parent.items() if isinstance(v, str)}
        message = frames(signed_message(kind, content, CONNECTION, usable, b"topic"))
        passed = b"".join(limiter.feed(hello() + message))
        assert passed == hello() + message
        assert limiter.between_messages
        [noted] = limiter.noted
        ledger.hear(channel, noted)
    assert ledger.open() == []


def test_only_requests_are_written_down_and_not_without_end() -> None:
    """Goal 7: what is forgotten is the oldest."""
    ledger = Ledger()
    for kind in ("comm_msg", "input_reply"):
        ledger.send(b"", asked(kind)[0])
    for bad in ([], [b"<IDS|MSG>", b""], [b"<IDS|MSG>", b"", b"[1]"], [b"x", b"", b"{}"]):
        ledger.send(b"", bad)
    assert ledger.open() == []
    headers = [asked()[1] for _ in range(2000)]
    for header in headers:
        text = json.dumps(header, default=str).encode()
        ledger.send(b"", [b"<IDS|MSG>", b"", text])
    assert len(ledger.open()) == 512
    assert ledger.open()[-1].header["msg_id"] == headers[-1]["msg_id"]


@given(st.integers(1, 60), st.binary(max_size=40))
def test_a_message_is_inserted_only_between_others(size: int, content: bytes) -> None:
    """Goal 7: whole messages only, wherever the kernel's bytes are cut."""
    message = frames([b"topic", content, b"last"])
    data = hello() + message * 3
    ends = {len(hello()) + n * len(message) for n in range(4)}
    limiter, at = ZmtpLimiter(), 0
    while at < len(data):
        limiter.feed(data[at : at + size])
        at = min(at + size, len(data))
        assert limiter.between_messages == (at in ends)
