"""After a broken connection was made again: which requests lost their end, and what is said (K4).

The kernel goes on with what it runs and answers it when it is done, also on the new connection.
Only what it answered in between is lost, and what had not got to it. Neither can be told from
what it still works on, but by waiting: a request of our own is answered after those before it,
and which ones are open then will stay so. Their clients are given an error instead of a reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import zmq.asyncio

from sandbox_kernel.kernel.channels import Channels
from sandbox_kernel.kernel.ledger import Request
from sandbox_kernel.kernel.obituary import session_of, signed_message, stream_message

__all__ = ["settle"]

log = logging.getLogger(__name__)

ERROR = "SandboxConnectionError"
_MOST_ROUNDS = 32
_CLIENTS_PATIENCE = 2.0
_POLL = 0.05
_LATE_REPLIES = 0.5
"""Seconds for replies that the kernel has given on another connection than ours."""

_AGAIN = "The kernel and its variables are still there."


async def settle(
    channels: Channels, lost: list[Request], connection: Mapping[str, Any], why: str
) -> None:
    """Tell clients what a broken connection has cost them; runs until the kernel has no more to do.

    Parameters
    ----------
    channels
        The channels, on their new connection.
    lost
        The requests that were open when the old one broke.
    connection
        The kernel's connection file.
    why
        What happened, in a sentence.
    """
    await _clients_are_back(channels)
    waiting = [request for request in lost if channels.ledger.is_open(request)]
    for request in waiting:
        if request.kind == "execute_request":
            text = f"{why} {_AGAIN} Output of this cell may be missing.\n"
            channels.insert("iopub", stream_message(text, connection, request.header))
    rounds = min(_MOST_ROUNDS, 1 + sum(not request.replied for request in waiting))
    await _reach_the_kernel(channels.url("shell"), connection, rounds)
    await asyncio.sleep(_LATE_REPLIES)
    for request in waiting:
        if channels.ledger.is_open(request) and not request.aside:
            channels.ledger.close(request)
            _end(channels, request, connection, why)


def _end(channels: Channels, request: Request, connection: Mapping[str, Any], why: str) -> None:
    """Give a client what its request waits for, as far as that is still to come."""
    log.warning("a %s has lost its reply; its client gets an error instead", request.kind)
    text = f"{why} {_AGAIN} Whether this was run to its end, and with what result, is not known."
    content = {"ename": ERROR, "evalue": text, "traceback": [f"{ERROR}: {text}"]}
    header = request.header
    if not request.replied:
        if request.kind == "execute_request":
            error = signed_message("error", content, connection, header, b"error")
            channels.insert("iopub", error)
        kind = request.kind.removesuffix("request") + "reply"
        reply = {"status": "error", "execution_count": 0, "user_expressions": {}, **content}
        channels.insert("shell", signed_message(kind, reply, connection, header), request.client)
    if not request.idle:
        idle = {"execution_state": "idle"}
        channels.insert("iopub", signed_message("status", idle, connection, header, b"status"))


async def _clients_are_back(channels: Channels) -> None:
    """Give the clients' sockets the time to connect again; there may be none that does."""
    for _ in range(round(_CLIENTS_PATIENCE / _POLL)):
        if channels.has_listener("iopub"):
            return
        await asyncio.sleep(_POLL)


async def _reach_the_kernel(url: str, connection: Mapping[str, Any], rounds: int) -> None:
    """Wait until the kernel has dealt with all that it was asked before.

    It takes one message of each client in turn, so that it is asked once for each of those.
    """
    session = session_of(connection)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, session.bsession)
        socket.connect(url)
        for _ in range(rounds):
            await socket.send_multipart(session.serialize(session.msg("kernel_info_request")))
            await socket.recv_multipart()
    finally:
        context.destroy(linger=0)
