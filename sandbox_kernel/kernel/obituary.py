"""Why a kernel has died, and how its clients are told (K4).

Nobody sends on iopub any more, and a notebook would show nothing but a number that never comes.
So this side takes the kernel's place on that endpoint until the next start: a publisher that
gives every subscriber one signed ``stream`` message, as an answer to the cell that ran last.
What is known of that cell comes from the kernel, hence is bounded and picked from.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.session import Session

from sandbox_kernel.process.result import Exit
from sandbox_kernel.sandbox.spec import Limits

log = logging.getLogger(__name__)

LARGEST_HEADER = 1 << 14
_DELIMITER = b"<IDS|MSG>"
_SUBSCRIBE = b"\x01"
_NAMES = ("msg_id", "session", "username", "date", "msg_type", "version")
_LONGEST_VALUE = 256
_CLOSE_PATIENCE = 2.0
_KILLED = 137
_MIB = 1 << 20


class Obituary:
    """Publishes one message to everybody who subscribes; made by `publish`.

    Attributes
    ----------
    read
        Set once somebody has been sent the message.
    """

    def __init__(self, message: Sequence[bytes]) -> None:
        self.read = asyncio.Event()
        self._message = list(message)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def publish(
        cls, url: str, message: Sequence[bytes], curve_secretkey: bytes | None = None
    ) -> Obituary:
        """Listen at an endpoint that nobody else listens at.

        Parameters
        ----------
        url
            The endpoint, as ZMQ writes it.
        message
            The parts of the message.
        curve_secretkey
            The kernel's secret key, where its channels are encrypted.

        Raises
        ------
        zmq.ZMQError
            Nothing can listen there.
        """
        obituary = cls(message)
        try:
            # What a client subscribes to is for us to say, client by client.
            obituary._socket.setsockopt(zmq.XPUB_MANUAL, 1)
            # Milliseconds in which the end of the socket waits for what has been sent.
            obituary._socket.setsockopt(zmq.LINGER, 500)
            if curve_secretkey is not None:
                obituary._socket.setsockopt(zmq.CURVE_SERVER, 1)
                obituary._socket.setsockopt(zmq.CURVE_SECRETKEY, curve_secretkey)
            obituary._socket.bind(url)
        except BaseException:
            obituary._context.destroy(linger=0)
            raise
        obituary._task = asyncio.create_task(obituary._serve(), name="obituary")
        return obituary

    async def _serve(self) -> None:
        for number in itertools.count():
            # A subscriber can send anything; only a subscription is answered.
            said = await self._socket.recv()
            if said.startswith(_SUBSCRIBE):
                # A topic of its own, lest others get the message again, which to Jupyter's
                # clients would be an attack.
                topic = f"{number}.".encode()
                self._socket.setsockopt(zmq.SUBSCRIBE, topic)
                await self._socket.send_multipart([topic + self._message[0], *self._message[1:]])
                self.read.set()

    async def close(self) -> None:
        """Leave the endpoint; on return somebody else can listen there."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._socket.close()
        # The address is given back by a thread of ZMQ, and only the context's end waits for it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._context.term), _CLOSE_PATIENCE)


def cause_of_death(end: Exit, code: int, limits: Limits) -> str:
    """Say why a kernel ended, in one or two sentences for people.

    Parameters
    ----------
    end
        What is known of its end. A kernel lives long: what was counted meanwhile explains its end
        only where the exit code agrees, and is told beside it otherwise.
    code
        The exit code that goes for it.
    limits
        Of the sandbox.
    """
    if end.reason == "out-of-memory" and code == _KILLED:
        text = (
            f"The kernel ran out of memory; the limit of the sandbox is {limits.memory // _MIB} MiB"
        )
        if end.peak_memory is not None:
            text += f", and the most that it used is {end.peak_memory // _MIB} MiB"
        return f"{text}."
    text = f"The kernel ended with exit code {code}."
    if not end.evidence:
        return text
    if end.reason == "pids-limit":
        return f"{text} Since it started, {end.evidence} ({limits.pids} processes)."
    if end.reason == "out-of-memory":
        return f"{text} Since it started, {end.evidence}, which has {limits.memory // _MIB} MiB."
    return f"{text[:-1]}, and {end.evidence}."


def stream_message(
    text: str, connection: Mapping[str, Any], cell: Mapping[str, str]
) -> list[bytes]:
    """Return a ``stream`` message on stderr, signed as the kernel would have signed it.

    Parameters
    ----------
    text
        What to say.
    connection
        The kernel's connection file, for its key.
    cell
        The header that the message answers; `parent_header` gives it.
    """
    content = {"name": "stderr", "text": text}
    return signed_message("stream", content, connection, cell, b"stream.stderr")


def signed_message(
    kind: str,
    content: Mapping[str, Any],
    connection: Mapping[str, Any],
    cell: Mapping[str, str],
    topic: bytes | None = None,
) -> list[bytes]:
    """Return a message as the kernel would have signed it.

    Parameters
    ----------
    kind
        Its type.
    content
        What it says.
    connection, cell
        As for `stream_message`.
    topic
        What subscribers of iopub know it by; `None` on other channels.
    """
    session = session_of(connection)
    message = session.msg(kind, dict(content), parent={"header": dict(cell)} if cell else None)
    return session.serialize(message, ident=topic)


def session_of(connection: Mapping[str, Any]) -> Session:
    """Return what signs and reads messages with a kernel's key."""
    key = connection.get("key", b"")
    return Session(
        key=key.encode() if isinstance(key, str) else key,
        signature_scheme=connection.get("signature_scheme", "hmac-sha256"),
        username="sandbox",
    )


def parent_header(parts: Sequence[bytes]) -> dict[str, str]:
    """Return what a message of the kernel says it answers, as far as that can be used.

    Parameters
    ----------
    parts
        The message's parts, at least up to the metadata; anything may be in them.
    """
    try:
        position = list(parts).index(_DELIMITER)
        raw = parts[position + 3]
        if len(raw) > LARGEST_HEADER:
            return {}
        header = json.loads(raw)
    except (ValueError, IndexError, RecursionError):
        return {}
    return picked(header)


def picked(header: object) -> dict[str, str]:
    """Return the usual entries of a header, where they are short texts; else nothing."""
    if not isinstance(header, dict):
        return {}
    found = {name: header[name] for name in _NAMES if isinstance(header.get(name), str)}
    if any(len(value) > _LONGEST_VALUE for value in found.values()) or "msg_id" not in found:
        return {}
    return found
