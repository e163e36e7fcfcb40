"""What can be reached from in here? The readiness probe's eyes inside a sandbox (B4).

Contract. This file is a program. It runs in a sandbox as the control user, started as
``python3 -I -S`` with cwd ``/`` and its text read from stdin, on Python 3.8 or later with the
standard library alone. After its text it reads one line, a JSON object, and

* with ``listen`` true: accepts connections on a port of its choice and writes one line,
  ``{"nonce", "port"}``, then goes on until its input ends;
* else: tries everything it was told to at the same time, for ``seconds``, writes one line and
  ends: ``{"nonce", "gateways", "tcp": [[host, port, outcome]], "dns": [[host, outcome]]}``.

``tcp`` lists what to connect to, and ``gateway_ports`` the ports to try on each default gateway
besides. ``dns`` lists resolvers to ask for ``question``, besides those of ``/etc/resolv.conf``;
with ``repeat`` true they are asked again and again until they answer.

An outcome is a fact, never a verdict: ``connected``, ``answered N`` with the answer's code, the
name of an error, or ``timeout``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

QUESTION_EVERY = 0.6
"""Seconds between repetitions of a question, since a datagram can be lost."""

_UNFINISHED = frozenset({errno.EINPROGRESS, errno.EAGAIN, errno.EINTR})


class Attempt:
    """One connection, until it is made or fails."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.outcome = "timeout"
        self.sock: socket.socket | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.sock = socket.socket(family, socket.SOCK_STREAM)
            self.sock.setblocking(False)
            self.conclude(self.sock.connect_ex((host, port)))
        except OSError as error:
            self.conclude(error.errno or errno.EIO)

    def conclude(self, code: int) -> None:
        """Take an error code of the connection, 0 for success."""
        if code in _UNFINISHED:
            return
        self.outcome = "connected" if code == 0 else errno.errorcode.get(code, str(code))
        self.close()

    def ready(self, sock: socket.socket) -> None:
        """Go on after the socket became ready."""
        self.conclude(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def close(self) -> None:
        """Give the socket back."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class Question:
    """One question to one resolver, until it is answered."""

    def __init__(self, host: str, name: str) -> None:
        self.host = host
        self.outcome = "timeout"
        self.number = os.urandom(2)
        labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
        # Recursion wanted, one question, for an address.
        self.text = self.number + struct.pack(">5H", 0x100, 1, 0, 0, 0) + labels
        self.text += b"\0" + struct.pack(">2H", 1, 1)
        self.sock: socket.socket | None = None
        try:
            self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.sock.setblocking(False)
            self.sock.connect((host, 53))
        except OSError as error:
            self.fail(error)
            self.close()

    def fail(self, error: OSError) -> None:
        """Note an error; a later answer still counts."""
        if error.errno not in _UNFINISHED:
            self.outcome = errno.errorcode.get(error.errno or 0, str(error.errno))

    def tick(self) -> None:
        """Ask, once more."""
        if self.sock is not None:
            try:
                self.sock.send(self.text)
            except OSError as error:
                self.fail(error)

    def ready(self, sock: socket.socket) -> None:
        """Go on after the socket became ready."""
        try:
            answer = sock.recv(4096)
        except OSError as error:
            self.fail(error)
            return
        if len(answer) >= 12 and answer[:2] == self.number and answer[2] & 0x80:
            self.outcome = f"answered {answer[3] & 15}"
            self.close()

    def close(self) -> None:
        """Give the socket back."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def try_all(
    attempts: list[Attempt], questions: list[Question], seconds: float, repeat: bool
) -> None:
    """Wait until everything has an outcome, or the time is over."""
    selector = selectors.DefaultSelector()
    for attempt in attempts:
        if attempt.sock is not None:
            selector.register(attempt.sock, selectors.EVENT_WRITE, attempt)
    for question in questions:
        if question.sock is not None:
            selector.register(question.sock, selectors.EVENT_READ, question)
    now = time.monotonic()
    deadline, next_tick = now + seconds, now
    while selector.get_map() and now < deadline:
        if now >= next_tick:
            next_tick = now + (QUESTION_EVERY if repeat else seconds)
            for question in questions:
                question.tick()
        for key, _ in selector.select(max(0.0, min(deadline, next_tick) - time.monotonic())):
            # A socket has to leave the selector before it is closed.
            selector.unregister(key.fileobj)
            key.data.ready(key.fileobj)
            if key.data.sock is not None:
                selector.register(key.fileobj, key.events, key.data)
        now = time.monotonic()
    selector.close()
    for attempt in attempts:
        attempt.close()
    for question in questions:
        question.close()


def default_gateways() -> list[str]:
    """Return the gateways of the routes that lead everywhere."""
    found = []
    for line in Path("/proc/net/route").read_text("ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1] == "00000000" and fields[2] != "00000000":
            found.append(socket.inet_ntoa(struct.pack("=I", int(fields[2], 16))))
    return found


def nameservers() -> list[str]:
    """Return the resolvers that programs in this sandbox ask."""
    found = []
    for line in Path("/etc/resolv.conf").read_text("utf-8").splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[0] == "nameserver":
            with contextlib.suppress(OSError):
                socket.inet_aton(fields[1])
                found.append(fields[1])
    return found


def unique(items: Iterable[Any]) -> list[Any]:
    """Leave out what was there before."""
    return list(dict.fromkeys(items))


def look(order: dict[str, Any]) -> dict[str, Any]:
    """Try everything and return the report."""
    gateways = default_gateways()
    ports = order["gateway_ports"]
    wanted = [(host, port) for host, port in order["tcp"]]
    wanted += [(host, port) for host in gateways for port in ports]
    attempts = [Attempt(host, port) for host, port in unique(wanted)]
    resolvers = unique([*nameservers(), *order["dns"]])
    questions = [Question(host, order["question"]) for host in resolvers]
    try_all(attempts, questions, order["seconds"], order["repeat"])
    return {
        "nonce": order["nonce"],
        "gateways": gateways,
        "tcp": [[a.host, a.port, a.outcome] for a in attempts],
        "dns": [[q.host, q.outcome] for q in questions],
    }


def listen(order: dict[str, Any], say: Callable[[object], None]) -> None:
    """Accept connections until the input ends."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("0.0.0.0", 0))  # noqa: S104 - what is tried is to reach it from outside
        server.listen(16)
        say({"nonce": order["nonce"], "port": server.getsockname()[1]})
        while os.read(0, 4096):
            pass


def read_line() -> bytes:
    """Read the order; byte by byte, so that nothing behind it is taken."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        line += byte
    return line


def say(report: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do what the order says."""
    order = json.loads(read_line())
    if order["listen"]:
        listen(order, say)
    else:
        say(look(order))


if __name__ == "__main__":
    main()
