"""One kernel's life in one sandbox: sandbox, relay, channels and process held together.

A session lives in the engine thread's loop, and knows at any time whether the kernel runs and,
when it does not, why. A restart replaces the process and keeps sandbox, relay and endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import signal
import time
from collections.abc import Mapping

import zmq

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.streams import ExecStream
from sandbox_kernel.errors import (
    SandboxAttestationError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxStartError,
    SandboxUnavailableError,
    SandboxUnknownOutcomeError,
)
from sandbox_kernel.kernel.channels import Address, Channels
from sandbox_kernel.kernel.launcher import CANNOT_START, NOT_FOUND
from sandbox_kernel.kernel.ledger import Request
from sandbox_kernel.kernel.link import RelayLink, RelayReport
from sandbox_kernel.kernel.obituary import (
    Obituary,
    cause_of_death,
    parent_header,
    stream_message,
)
from sandbox_kernel.kernel.process import KernelOrder, KernelProcess, ProcessOrigin
from sandbox_kernel.kernel.program import relay_program, start_program, unsuitable
from sandbox_kernel.kernel.settling import settle
from sandbox_kernel.kernel.wire import CHANNELS
from sandbox_kernel.kernel.zmtp import ZmtpLimits
from sandbox_kernel.policy import Quota
from sandbox_kernel.process.result import CommandNotFoundError
from sandbox_kernel.process.stop import STOP_TIMEOUT
from sandbox_kernel.sandbox.live import CONTROL_USER, LiveSandbox
from sandbox_kernel.sandbox.order import judge_found
from sandbox_kernel.sandbox.spec import SandboxSpec

log = logging.getLogger(__name__)

KERNEL_PORTS = range(20001, 32766)
"""Loopback ports in a sandbox that kernels listen on; below the ephemeral range."""

HELLO_TIMEOUT = 20.0
NEWS_PATIENCE = 0.5
"""Seconds for which a death is kept from the manager, so that its clients learn the reason first;
a client's socket connects again after 0.1 s."""

RELAY_TRIES = 12
"""Relays that are started one after the other, none of which lasted for `_LASTING` seconds."""

_LASTING = 30.0
_RELAY_TIMEOUT = 30.0
_FIRST_DELAY, _LAST_DELAY = 0.1, 2.0
_READING_PATIENCE = 0.1
_EXIT_PATIENCE = 3.0
_REASON_PATIENCE = 0.3
_KILLED = 137
_CONTROL_UID = int(CONTROL_USER.partition(":")[0])


def kernel_ports(kernel_id: str) -> tuple[int, ...]:
    """Return a kernel's ports, in the order of ``CHANNELS``.

    Two kernels may have the same ones, since each has an address of its own: `kernel_address`.
    """
    count = len(CHANNELS)
    place = int.from_bytes(_digest(kernel_id)[:8], "big")
    first = KERNEL_PORTS.start + place % (len(KERNEL_PORTS) // count) * count
    return tuple(range(first, first + count))


def kernel_address(kernel_id: str) -> str:
    """Return the address of the loopback that a kernel listens at.

    Kernels of one workspace share a sandbox, also those of servers that know nothing of each
    other, and Linux has the whole of 127.0.0.0/8 there. In its first part (127.0.x.x) resolvers
    and other programs have theirs. With the ports there are 4e10 places, so that nobody has to
    look whether one is taken, which two kernels that start at once could not find out.
    """
    high, middle, low = _digest(kernel_id)[8:11]
    return f"127.{1 + high % 254}.{middle}.{1 + low % 254}"


def _digest(kernel_id: str) -> bytes:
    return hashlib.sha256(kernel_id.encode("utf-8", "replace")).digest()


class KernelSession:
    """A sandbox with a kernel in it; made by `open`, ended by `close`.

    Attributes
    ----------
    sandbox
        The sandbox.
    process
        The kernel process, once launched.
    """

    def __init__(self, sandbox: LiveSandbox, channels: Channels) -> None:
        self.sandbox = sandbox
        self.channels = channels
        self.process: KernelProcess | None = None
        self._relay: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._connection: Mapping[str, object] = {}
        self._mourner: asyncio.Task[None] | None = None
        self._obituary: Obituary | None = None
        self._trouble = ""
        self._ports: tuple[int, ...] = ()
        self._address = ""

    @classmethod
    async def open(
        cls,
        engine: Engine,
        spec: SandboxSpec,
        *,
        owner: str,
        labels: Mapping[str, str],
        addresses: Mapping[str, Address],
        limits: ZmtpLimits,
        quota: Quota | None = None,
    ) -> KernelSession:
        """Make the sandbox of a kernel that `launch` then starts.

        Raises
        ------
        SandboxError
            As `LiveSandbox.create`; nothing is left behind.
        """
        sandbox = await LiveSandbox.create(
            engine, spec, owner=owner, extra_labels=labels, quota=quota
        )
        return cls(sandbox, Channels(addresses, limits, sandbox.short_id))

    @classmethod
    async def attach(
        cls,
        engine: Engine,
        which: str,
        *,
        owner: str,
        holder: str,
        origin: ProcessOrigin,
        connection: Mapping[str, object],
        addresses: Mapping[str, Address],
        limits: ZmtpLimits,
        timeout: float,
    ) -> KernelSession:
        """Take over a running kernel whose owner is gone (K6).

        Parameters
        ----------
        engine, which
            Where, and the sandbox's id.
        owner, holder
            Whose it is, and what its former owner was for the sandbox.
        origin, connection
            Of the kernel.
        addresses, limits
            As for `open`.
        timeout
            Seconds for all of it.

        Raises
        ------
        SandboxError
            As `LiveSandbox.connect`, or the kernel does not answer. It is left as it was.
        """
        sandbox = await LiveSandbox.connect(
            engine, which, owner=owner, holder=holder, judge=judge_found
        )
        session = cls(sandbox, Channels(addresses, limits, sandbox.short_id))
        try:
            async with asyncio.timeout(timeout):
                session._take(connection)
                session.process = KernelProcess.of_another(sandbox, origin)
                await session.channels.listen()
                await session._start_relay()
                await session._until_it_listens()
        except BaseException as error:
            await session.detach()
            if isinstance(error, TimeoutError) and not isinstance(error, SandboxError):
                raise SandboxStartError(
                    f"The kernel could not be reached within {timeout:g} s"
                ) from error
            raise
        session._watch_for_the_end()
        log.info("kernel in sandbox %s is attached to again", sandbox.short_id)
        return session

    @property
    def usable(self) -> bool:
        """Whether a kernel can be launched in this session's sandbox."""
        return not self._lost and not self.sandbox.ended.done()

    @property
    def exit_code(self) -> int | None:
        """The kernel's exit code, or `None` while it runs; read from any thread."""
        return self.process.exit_code if self.process is not None else None

    @property
    def telling(self) -> bool:
        """Whether clients still have to learn why the kernel ended; read from any thread."""
        return self._mourner is not None and not self._mourner.done()

    async def launch(self, order: KernelOrder, timeout: float) -> None:
        """Start the kernel and wait until it listens.

        Parameters
        ----------
        order
            What to run.
        timeout
            Seconds for all of it.

        Raises
        ------
        SandboxError
            The kernel did not come up; the text says why, with its last lines.
        """
        began = time.monotonic()
        self._take(order.connection)
        try:
            async with asyncio.timeout(timeout):
                await self._clear()
                await self.channels.listen()
                # The relay second: it is ready long before the kernel listens, and beside the
                # kernel's own start it would only take processor time from that.
                self.process = await KernelProcess.start(self.sandbox, order)
                if self._relay is None:
                    await self._start_relay()
                await self._until_it_listens()
                assert self.process is not None
                self.process.forget_output()
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxStartError(
                f"The kernel did not start within {timeout:g} s.{self._last_words()}"
            ) from error
        self._watch_for_the_end()
        log.info(
            "kernel in sandbox %s listens after %.0f ms",
            self.sandbox.short_id,
            (time.monotonic() - began) * 1000,
        )

    def _take(self, connection: Mapping[str, object]) -> None:
        self._connection = connection
        if self.channels.beside is not None:
            self.channels.beside.connection = connection
        self._ports = tuple(int(str(connection[f"{name}_port"])) for name in CHANNELS)
        self._address = str(connection["ip"])

    def _watch_for_the_end(self) -> None:
        self._mourner = asyncio.create_task(
            self._tell_of_its_end(self._connection), name="kernel-end"
        )

    async def _clear(self) -> None:
        """End what an earlier kernel has left, so that the new one starts clean (K3)."""
        if self.process is not None and (await self.process.kill()).found == "container":
            raise SandboxGoneError("The sandbox had to be ended with its processes.")
        await self._forget_process()

    async def _forget_process(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait({self._settling})
        if self._mourner is not None:
            self._mourner.cancel()
            await asyncio.wait({self._mourner})
        obituary, self._obituary = self._obituary, None
        if obituary is not None:
            await obituary.close()
        if self.process is not None:
            await self.process.forget()
            self.process = None

    async def _start_relay(self) -> None:
        link, stream = await self._new_relay()
        self._relay = asyncio.create_task(
            self._keep_relay(link, stream), name=f"relay-{self.sandbox.short_id}"
        )
        self.channels.use(link)

    async def _new_relay(self) -> tuple[RelayLink, ExecStream]:
        begin = functools.partial(self.sandbox.exec, user=CONTROL_USER)
        stream = await start_program(begin, relay_program())
        try:
            link = RelayLink(stream, self.sandbox.short_id, lambda: self.sandbox.paused)
            try:
                report = await link.greet(self._address, self._ports, HELLO_TIMEOUT)
            except SandboxProtocolError as error:
                state = await self.sandbox.engine.inspect_exec(stream.id)
                cause = unsuitable(state.exit_code, self.sandbox.spec.image)
                if cause is not None:
                    raise cause from error
                raise
            _check_report(report, self.sandbox.spec.network)
        except BaseException:
            await stream.close()
            raise
        return link, stream

    async def _keep_relay(self, link: RelayLink, stream: ExecStream) -> None:
        """Serve a relay, and another one when that is lost, until the kernel cannot be reached."""
        clock, tries = time.monotonic, 0
        while True:
            began = clock()
            can_go_on = await self._serve_relay(link, stream)
            broke = clock()
            if self.sandbox.ended.done():
                return
            log.warning("sandbox %s: %s", self.sandbox.short_id, self._trouble)
            if not can_go_on:
                return
            tries = 0 if broke - began > _LASTING else tries
            lost = self.channels.ledger.open()
            found, tries = await self._another_relay(tries)
            if found is None:
                return
            link, stream = found
            self.channels.use(link)
            log.warning(
                "sandbox %s: its kernel is reached again after %.1f s",
                self.sandbox.short_id,
                clock() - broke,
            )
            await self._settle(lost)

    async def _serve_relay(self, link: RelayLink, stream: ExecStream) -> bool:
        """Serve one relay to its end; say whether another one may take its place."""
        try:
            await link.run()
            self._trouble = f"The relay in the sandbox has ended{link.diagnostics()}."
            # Of encrypted messages it cannot be known which of them were lost.
            return "curve_secretkey" not in self._connection
        except SandboxUnavailableError as error:
            self._trouble = f"The connection to the kernel broke: {error}."
            return "curve_secretkey" not in self._connection
        except SandboxProtocolError as error:
            # Whoever runs as the relay is none.
            self._trouble = f"The connection to the kernel broke: {error}."
            return False
        finally:
            self.channels.use(None)
            await stream.close()

    async def _another_relay(self, tries: int) -> tuple[tuple[RelayLink, ExecStream] | None, int]:
        """Start a relay for a kernel that runs, for as long as its sandbox may be there.

        Returns
        -------
        tuple
            The relay, `None` when there is none; and how many have been tried by now.
        """
        delay = _FIRST_DELAY
        while not self.sandbox.ended.done() and tries < RELAY_TRIES:
            if self.sandbox.paused:
                await asyncio.wait({self.sandbox.ended}, timeout=_LAST_DELAY)
                continue
            try:
                async with asyncio.timeout(_RELAY_TIMEOUT):
                    return await self._new_relay(), tries + 1
            except SandboxAttestationError as error:
                self._trouble = str(error)
                break
            except SandboxUnavailableError as error:
                # How long that may last is for the hold on the sandbox to say.
                log.debug("sandbox %s: no relay yet: %s", self.sandbox.short_id, error)
            except (SandboxError, TimeoutError) as error:
                tries += 1
                log.info("sandbox %s: no relay: %s", self.sandbox.short_id, error or "no answer")
            await asyncio.wait({self.sandbox.ended}, timeout=delay)
            delay = min(delay * 2, _LAST_DELAY)
        return None, tries

    async def _settle(self, lost: list[Request]) -> None:
        """Begin to tell clients what the broken connection has cost them."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait({self._settling})
        self._settling = asyncio.create_task(
            settle(self.channels, lost, self._connection, self._trouble), name="settling"
        )

    async def _until_it_listens(self) -> None:
        assert self.process is not None
        assert self._relay is not None
        listens = asyncio.ensure_future(self.channels.kernel_listens())
        exited = asyncio.ensure_future(self.process.exited.wait())
        try:
            await asyncio.wait({listens, exited, self._relay}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listens, exited):
                task.cancel()
            await asyncio.wait({listens, exited})
        if listens.cancelled():
            text = self.why_it_ended() + self._last_words()
            missing = self.exit_code == NOT_FOUND and CANNOT_START in text
            why = CommandNotFoundError(text) if missing else SandboxStartError(text)
            raise self.process.unsuitable() or why

    async def _tell_of_its_end(self, connection: Mapping[str, object]) -> None:
        """Say why a kernel ended that nobody asked to end, in the log and to its clients."""
        assert self.process is not None
        assert self._relay is not None
        exited = asyncio.ensure_future(self.process.exited.wait())
        try:
            await asyncio.wait({exited, self._relay}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if self.exit_code == 0:
            return
        if self._lost or (self.exit_code == _KILLED and not self.sandbox.out_of_memory_events):
            # Where the whole sandbox went, that news is a moment behind.
            await asyncio.wait({self.sandbox.ended}, timeout=_REASON_PATIENCE)
        why = self.why_it_ended() + self._last_words(of_its_errors=True)
        log.warning("sandbox %s: %s", self.sandbox.short_id, why)
        message = stream_message(
            f"The sandboxed kernel has died. {why}\n", connection, self._running_cell()
        )
        secret = connection.get("curve_secretkey")
        url = await self.channels.hand_over("iopub")
        try:
            self._obituary = Obituary.publish(
                url, message, str(secret).encode() if secret is not None else None
            )
        except zmq.ZMQError as error:
            log.warning("sandbox %s: clients cannot be told: %s", self.sandbox.short_id, error)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._obituary.read.wait(), NEWS_PATIENCE)
            # Sent is not read, and nothing comes back that would say so.
            await asyncio.sleep(_READING_PATIENCE)

    def _running_cell(self) -> Mapping[str, str]:
        """Return the header of what the kernel died in, as far as that is known.

        A kernel that dies at once has not said what it had begun. What was sent encrypted cannot
        be read.
        """
        cells = (r for r in self.channels.ledger.open() if r.kind == "execute_request")
        running = next(cells, None)
        return parent_header(self.channels.cell) if running is None else running.header

    @property
    def _lost(self) -> bool:
        return self._relay is not None and self._relay.done()

    def _expect_its_end(self) -> None:
        if self._mourner is not None:
            self._mourner.cancel()

    def why_it_ended(self) -> str:
        """Return why the kernel does not run, in one sentence for people (K4)."""
        if self.sandbox.ended.done():
            return self.sandbox.ended.result().text
        if self._lost:
            return self._trouble
        if self.process is None or self.exit_code is None:
            return "The kernel has not been started."
        if self.process.ended_unseen:
            return "The kernel ended while the connection to it was broken; how is not known."
        return cause_of_death(self.process.end, self.exit_code, self.sandbox.limits)

    def _last_words(self, of_its_errors: bool = False) -> str:
        streams = (2,) if of_its_errors else (1, 2)
        words = self.process.last_words(streams) if self.process is not None else ""
        return f" Its last lines were:\n{words}" if words else ""

    async def send_signal(self, number: int) -> None:
        """Send a signal to the kernel's group; one that has ended is left alone."""
        if self.process is not None and self.usable:
            if number == signal.SIGTERM:
                self._expect_its_end()
            await self.process.send_signal(number)

    async def kill(self) -> None:
        """End the kernel and everything that it started, at once."""
        if self.process is None or self.sandbox.ended.done():
            return
        self._expect_its_end()
        with contextlib.suppress(SandboxGoneError, SandboxUnknownOutcomeError):
            await self.process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self.process.exited.wait()

    async def pause_clients(self) -> None:
        """Close the endpoints until the next launch; clients connect again by themselves."""
        await self.channels.stop_listening()

    async def close(self) -> None:
        """End everything of the kernel; idempotent, bounded by the bounds of its parts.

        A sandbox that others hold too goes on for them, without the kernel and what it started.
        """
        await self._disconnect()
        if self.process is not None and self.sandbox.spec.is_shared and self.usable:
            try:
                await self.process.kill()
            except SandboxError as error:
                log.warning(
                    "sandbox %s: its kernel was not ended: %s", self.sandbox.short_id, error
                )
        await self._forget_process()
        await self.sandbox.close()

    async def _disconnect(self) -> None:
        await self.channels.stop_listening()
        if self._relay is not None:
            self._relay.cancel()
            await asyncio.wait({self._relay})

    async def detach(self) -> None:
        """Let go of a kernel, which goes on for as long as its sandbox outlives an owner (K6)."""
        await self._disconnect()
        await self._forget_process()
        if self.sandbox.spec.resumable:
            await self.sandbox.detach()
        else:
            await self.sandbox.abandon()

    async def close_at_exit(self) -> bool:
        """End when the process does, letting through what clients have just written.

        A kernel that may outlive its owner is let go of, unless it has been asked to end.

        Returns
        -------
        bool
            Whether it lives on.
        """
        await self.channels.flush()
        if self.sandbox.spec.resumable and self.process is not None and self.usable:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.exited.wait(), _EXIT_PATIENCE)
            if self.exit_code is None:
                await self.detach()
                return True
        await self.close()
        return False


def _check_report(report: RelayReport, network: str) -> None:
    """Refuse a sandbox that is weaker from inside than its configuration says (R3)."""
    wrong = [
        f"{name} is {value}"
        for name, value in report.status.items()
        if name.startswith("Cap") and value.strip("0")
    ]
    if report.status.get("NoNewPrivs") != "1":
        wrong.append("new privileges are possible")
    if report.status.get("Seccomp") != "2":
        wrong.append("system calls are not filtered")
    if report.uid != _CONTROL_UID:
        wrong.append(f"the relay runs as uid {report.uid}")
    if report.routes and network == "none":
        wrong.append(f"{report.routes} routes lead out of it")
    if wrong:
        raise SandboxAttestationError(
            f"The sandbox is weaker than it was asked to be: {'; '.join(wrong)}"
        )
