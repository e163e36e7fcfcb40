"""The relay: carries the byte streams of a kernel's channels over its own stdin and stdout.

Contract. This file is a program. It runs inside the sandbox as the control user, started as
``python3 -I -S`` with cwd ``/`` and its text read from stdin, on Python 3.8 or later with the
standard library alone. It

* speaks the frames of ``wire.py`` on stdin and stdout and writes anything for people to stderr;
* joins each stream that the host opens to one TCP connection on the sandbox's loopback, and
  keeps trying while nothing listens there yet, since a kernel takes a moment to bind;
* passes bytes on unread, in order, never more than the peer gave credit for;
* holds at most one window per stream and direction, plus ``OUTPUT_LIMIT`` on its way out;
* ends when stdin ends, when the host breaks the protocol, or when no PING came for the time
  that the host's HELLO allows: a host that froze or was cut off leaves no relay behind.

It does not know Jupyter or ZMQ, keeps no files, and believes nothing that it carries.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import os
import selectors
import socket
import sys
import time

from sandbox_kernel.kernel.wire import (
    CHANNELS,
    CLOSE,
    CREDIT,
    DATA,
    HELLO,
    MAX_DATA,
    OPEN,
    OPENED,
    PING,
    PONG,
    VERSION,
    Decoder,
    Frame,
    ReceiveWindow,
    SendWindow,
    WireError,
    credit_of,
    encode,
    encode_credit,
)

OUTPUT_LIMIT = 4 * MAX_DATA
"""Bytes queued for stdout beyond which no channel is read, so the queue stays small."""

RETRY_INTERVAL = 0.01
"""Seconds between attempts to reach a kernel that does not listen yet."""

PIPE_SIZES = {0: 1 << 18, 1: 1 << 19}
"""Bytes of the pipes to and from the engine: larger ones save switches between processes."""

_F_SETPIPE_SZ = 1031  # named in fcntl since Python 3.10

_STATUS_FIELDS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


class Stream:
    """One stream and its connection to the kernel."""

    def __init__(self, number: int, address: tuple[str, int]) -> None:
        self.number = number
        self.address = address
        self.sock: socket.socket | None = None
        self.connected = False
        self.watched = 0
        self.pending = bytearray()
        self.send_window = SendWindow()
        self.receive_window = ReceiveWindow()


class Relay:
    """The event loop of the program.

    Parameters
    ----------
    source, sink
        File descriptors of the connection to the host.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder()
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._waiting: list[Stream] = []
        self._retry_at = 0.0
        self._output: collections.deque[memoryview] = collections.deque()
        self._output_size = 0
        self._sink_watched = False
        self._address = ""
        self._ports: list[int] = []
        self._silence = 0.0
        self._last_ping = time.monotonic()
        self._ended = False

    def run(self) -> None:
        """Serve until the host ends the connection or is not heard of any more."""
        os.set_blocking(self._source, False)
        os.set_blocking(self._sink, False)
        for pipe, size in PIPE_SIZES.items():
            # Not on what is no pipe, nor beyond the user's share of the system's limit.
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, _F_SETPIPE_SZ, size)
        self._selector.register(self._source, selectors.EVENT_READ)
        while not self._ended:
            events = self._selector.select(self._timeout())
            for key, mask in events:
                if key.fd == self._source:
                    self._read_host()
                elif key.fd != self._sink and key.data.sock is not None:
                    self._serve(key.data, mask)
            self._retry_waiting()
            self._flush()
            self._watch_all()
            self._check_silence()

    def _timeout(self) -> float:
        return max(0.0, self._retry_at - time.monotonic()) if self._waiting else 1.0

    def _check_silence(self) -> None:
        if self._silence and time.monotonic() - self._last_ping > self._silence:
            raise WireError(f"no ping for {self._silence:g} s")

    # -- from the host ----------------------------------------------------------------------

    def _read_host(self) -> None:
        try:
            data = os.read(self._source, 1 << 18)
        except BlockingIOError:
            return
        if not data:
            self._ended = True
            return
        for frame in self._decoder.feed(data):
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        if not self._ports:
            self._greet(frame)
        elif frame.kind == PING:
            self._last_ping = time.monotonic()
            self._send(encode(PONG, 0, frame.payload))
        elif frame.kind == OPEN:
            self._open(frame)
        elif frame.kind in (DATA, CREDIT, CLOSE):
            self._handle_stream(frame)
        else:
            raise WireError(f"frame kind {frame.kind} from the host")

    def _handle_stream(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            if frame.stream > self._last_stream:
                raise WireError(f"frame for stream {frame.stream}, which was never opened")
        elif frame.kind == DATA:
            stream.receive_window.receive(len(frame.payload))
            stream.pending += frame.payload
            if stream.connected:
                self._write_kernel(stream)
        elif frame.kind == CREDIT:
            stream.send_window.grant(credit_of(frame))
        else:
            self._drop(stream)

    def _greet(self, frame: Frame) -> None:
        if frame.kind != HELLO:
            raise WireError("the first frame is not a hello")
        hello = json.loads(frame.payload.decode())
        if hello["version"] != VERSION or len(hello["ports"]) != len(CHANNELS):
            raise WireError("the host speaks another version")
        self._address = hello["address"]
        self._ports = hello["ports"]
        self._silence = hello["silence"]
        self._last_ping = time.monotonic()
        answer = {
            "version": VERSION,
            "nonce": hello["nonce"],
            "pid": os.getpid(),
            "uid": os.getuid(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "status": own_status(),
            "routes": own_routes(),
        }
        self._send(encode(HELLO, 0, json.dumps(answer).encode()))

    def _open(self, frame: Frame) -> None:
        if frame.stream <= self._last_stream or frame.payload[0] >= len(CHANNELS):
            raise WireError(f"stream {frame.stream} cannot be opened")
        self._last_stream = frame.stream
        stream = Stream(frame.stream, (self._address, self._ports[frame.payload[0]]))
        self._streams[stream.number] = stream
        self._connect(stream)

    # -- to and from the kernel -------------------------------------------------------------

    def _connect(self, stream: Stream) -> None:
        stream.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        stream.sock.setblocking(False)
        stream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = stream.sock.connect_ex(stream.address)
        if error == 0:
            self._connected(stream)
        elif error != errno.EINPROGRESS:
            self._wait_for_kernel(stream)

    def _wait_for_kernel(self, stream: Stream) -> None:
        self._forget_socket(stream)
        if not self._waiting:
            self._retry_at = time.monotonic() + RETRY_INTERVAL
        self._waiting.append(stream)

    def _retry_waiting(self) -> None:
        if not self._waiting or time.monotonic() < self._retry_at:
            return
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            if self._streams.get(stream.number) is stream:
                self._connect(stream)

    def _connected(self, stream: Stream) -> None:
        stream.connected = True
        self._send(encode(OPENED, stream.number))
        self._write_kernel(stream)

    def _serve(self, stream: Stream, mask: int) -> None:
        if not stream.connected:
            assert stream.sock is not None
            if stream.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._wait_for_kernel(stream)
            else:
                self._connected(stream)
            return
        if mask & selectors.EVENT_WRITE:
            self._write_kernel(stream)
        if mask & selectors.EVENT_READ and stream.sock is not None:
            self._read_kernel(stream)

    def _read_kernel(self, stream: Stream) -> None:
        size = min(MAX_DATA, stream.send_window.available)
        if size == 0 or self._output_size >= OUTPUT_LIMIT:
            return
        assert stream.sock is not None
        try:
            data = stream.sock.recv(size)
        except BlockingIOError:
            return
        except OSError as error:
            self._close(stream, error.strerror or "error")
            return
        if not data:
            self._close(stream, "the kernel closed the connection")
            return
        stream.send_window.spend(len(data))
        self._send(encode(DATA, stream.number, data))
        self._flush()

    def _write_kernel(self, stream: Stream) -> None:
        if not stream.pending:
            return
        assert stream.sock is not None
        try:
            count = stream.sock.send(stream.pending)
        except BlockingIOError:
            return
        except OSError as error:
            self._close(stream, error.strerror or "error")
            return
        del stream.pending[:count]
        credit = stream.receive_window.consume(count)
        if credit:
            self._send(encode_credit(stream.number, credit))

    def _close(self, stream: Stream, reason: str) -> None:
        self._send(encode(CLOSE, stream.number, reason.encode()[:200]))
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        del self._streams[stream.number]
        self._forget_socket(stream)

    def _forget_socket(self, stream: Stream) -> None:
        if stream.sock is None:
            return
        if stream.watched:
            self._selector.unregister(stream.sock)
            stream.watched = 0
        stream.sock.close()
        stream.sock = None

    # -- to the host ------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        self._output.append(memoryview(frame))
        self._output_size += len(frame)

    def _flush(self) -> None:
        while self._output:
            try:
                count = os.writev(self._sink, [self._output[i] for i in range(self._batch())])
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._ended = True
                return
            self._output_size -= count
            while count:
                first = self._output.popleft()
                if count < len(first):
                    self._output.appendleft(first[count:])
                    break
                count -= len(first)

    def _batch(self) -> int:
        return min(len(self._output), 64)

    # -- what to wait for -------------------------------------------------------------------

    def _watch_all(self) -> None:
        if bool(self._output) != self._sink_watched:
            self._sink_watched = not self._sink_watched
            if self._sink_watched:
                self._selector.register(self._sink, selectors.EVENT_WRITE)
            else:
                self._selector.unregister(self._sink)
        full = self._output_size >= OUTPUT_LIMIT
        for stream in self._streams.values():
            if stream.sock is not None:
                self._watch(stream, self._wanted(stream, full))

    @staticmethod
    def _wanted(stream: Stream, full: bool) -> int:
        if not stream.connected:
            return selectors.EVENT_WRITE
        readable = stream.send_window.available and not full
        return (selectors.EVENT_READ if readable else 0) | (
            selectors.EVENT_WRITE if stream.pending else 0
        )

    def _watch(self, stream: Stream, wanted: int) -> None:
        if wanted == stream.watched:
            return
        assert stream.sock is not None
        if not stream.watched:
            self._selector.register(stream.sock, wanted, stream)
        elif not wanted:
            self._selector.unregister(stream.sock)
        else:
            self._selector.modify(stream.sock, wanted, stream)
        stream.watched = wanted


def own_status() -> dict[str, str]:
    """Return what the Linux kernel says of this process's privileges."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        pairs = (line.split(":", 1) for line in file if ":" in line)
        return {name: value.strip() for name, value in pairs if name in _STATUS_FIELDS}


def own_routes() -> int:
    """Return how many routes lead out of the sandbox; with network ``none`` there is none."""
    with open("/proc/net/route", encoding="ascii", errors="replace") as file:
        return len(file.readlines()) - 1


def main() -> None:
    """Run the relay on stdin and stdout; exit 0 at the end of input, 1 on a broken protocol."""
    try:
        Relay(0, 1).run()
    except (WireError, ValueError, KeyError) as error:
        sys.stderr.write(f"relay: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
