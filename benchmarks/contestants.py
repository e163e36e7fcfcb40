"""Three ways to run a command in one and the same container.

Each is what its users get: the ``docker`` program as a subprocess, an exec of aiodocker as its
documentation shows it, and `Sandbox`. Where one has no way to do a thing, it does the best that
it has: a second exec of ``kill`` for a stop.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiodocker.execs import Exec
from aiodocker.stream import Stream

from sandbox_kernel import Chunk, Sandbox
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.sandbox.live import CODE_USER


@dataclass(frozen=True)
class Running:
    """A command that runs: its pid in the container, how to stop it, and whose CPU it costs here.

    `stop` returns when the command's end is known to the caller.
    """

    pid: int
    stop: Callable[[], Awaitable[None]]
    cpu: Callable[[], float]


class DockerExec:
    """The ``docker`` program, started anew for each command."""

    name = "docker exec"

    def __init__(self, endpoint: Endpoint, container: str) -> None:
        program = shutil.which("docker") or ""
        tls = endpoint.tls
        host = endpoint.url.replace("https://", "tcp://")
        self._command = [program, "--host", host]
        if tls is not None:
            self._command += ["--tlsverify", f"--tlscert={tls.cert}", f"--tlskey={tls.key}"]
            self._command += [f"--tlscacert={tls.ca}"]
        self._command += ["exec", "--user", CODE_USER, container]

    @staticmethod
    def usable() -> bool:
        """Whether there is such a program."""
        return shutil.which("docker") is not None

    async def _spawn(self, argv: list[str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command, *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )

    async def run(self, argv: list[str]) -> int:
        """Run a command to its end and return how many bytes it wrote."""
        process = await self._spawn(argv)
        assert process.stdout is not None
        size = 0
        while data := await process.stdout.read(1 << 16):
            size += len(data)
        if await process.wait():
            raise RuntimeError(f"docker exec ended with {process.returncode}")
        return size

    @asynccontextmanager
    async def running(self, script: str) -> AsyncIterator[Running]:
        """Start a shell script that first writes its pid."""
        process = await self._spawn(["sh", "-c", script])
        assert process.stdout is not None
        pid = int(await process.stdout.readline())

        async def stop() -> None:
            await self.run(["kill", "-9", str(pid)])
            await process.wait()

        try:
            yield Running(pid, stop, lambda: _ticks(process.pid))
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


class BareExec:
    """An exec of aiodocker, of which nothing is known but what the engine says."""

    name = "bare exec"

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine = engine
        self._container = container

    @asynccontextmanager
    async def _started(self, argv: list[str]) -> AsyncIterator[tuple[Exec, Stream]]:
        # The client of an `Engine`, since aiodocker's own has room for 100 connections only.
        async with self._engine.call("be measured", unbounded=True) as docker:
            container = docker.containers.container(self._container)
            created = await container.exec(argv, user=CODE_USER)
            async with created.start() as stream:
                yield created, stream

    async def run(self, argv: list[str]) -> int:
        """Run a command to its end and return how many bytes it wrote."""
        size = 0
        async with self._started(argv) as (created, stream):
            while (message := await stream.read_out()) is not None:
                size += len(message.data)
            if (await created.inspect())["ExitCode"]:
                raise RuntimeError("the exec did not end with 0")
        return size

    @asynccontextmanager
    async def running(self, script: str) -> AsyncIterator[Running]:
        """Start a shell script that first writes its pid."""
        async with self._started(["sh", "-c", script]) as (_, stream):
            message = await stream.read_out()
            assert message is not None
            pid = int(message.data)

            async def stop() -> None:
                await self.run(["kill", "-9", str(pid)])
                while await stream.read_out() is not None:
                    pass

            yield Running(pid, stop, time.process_time)


class Wrapper:
    """`Sandbox`, from a loop that is not the engine's."""

    name = "Sandbox"

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, argv: list[str]) -> int:
        """Run a command to its end and return how many bytes it wrote."""
        result = await self._sandbox.run(argv, check=True)
        return result.stdout_bytes

    @asynccontextmanager
    async def running(self, script: str) -> AsyncIterator[Running]:
        """Start a shell script that first writes its pid."""
        async with self._sandbox.start(["sh", "-c", script]) as process:
            chunk = await process.read()
            assert isinstance(chunk, Chunk)

            async def stop() -> None:
                await process.kill()
                await process.wait()

            yield Running(int(chunk.data), stop, time.process_time)


Contestant = DockerExec | BareExec | Wrapper


def _ticks(pid: int) -> float:
    """Return the seconds of CPU that a process of this machine has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
