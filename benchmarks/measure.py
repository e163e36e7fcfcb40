"""One turn of one kernel: started, measured, shut down.

Bytes are counted where output is timed: a kernel that loses some is an error, not a fast one.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from report import Measurement

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.kernel.provisioner import SandboxProvisioner
from sandbox_kernel.sandbox.live import CONTROL_USER

PATIENCE = 120.0
"""Seconds that any one thing may take."""

VERSIONS = """\
import sys, platform, ipykernel, zmq, tornado
print("Python", platform.python_version())
print("ipykernel", ipykernel.__version__)
print("pyzmq", zmq.__version__)
print("tornado", tornado.version)
"""
SLEEP = "import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(0.05)"
CHILD = "import subprocess\nprint('ready', flush=True)\nsubprocess.run(['sleep', '60'])"
PRINT = "line = 'x' * 999\nfor _ in range({count}):\n    print(line)"
DISPLAY = "from IPython.display import display\ndisplay({{'text/plain': 'x' * {count}}}, raw=True)"
_STATUS = "grep -H -E '^(Name|Uid|VmRSS):' /proc/[0-9]*/status 2>/dev/null"


MEASUREMENTS = (
    Measurement("start", "start to first result", target=1.3),
    Measurement("round_trip", "round trip of pass", target=1.15),
    Measurement("print", "print until idle", target=1.3),
    Measurement("display", "one large display"),
    Measurement("interrupt", "interrupt to idle", target=2),
    Measurement("interrupt_child", "… of a child process", target=2),
    Measurement("restart", "restart to ready"),
    Measurement("shutdown", "shutdown"),
    Measurement("relay_memory", "memory of the relay", unit="bytes"),
)


@dataclass(frozen=True)
class Sizes:
    """How much to do: round trips, and bytes to print and to display."""

    round_trips: int
    printed: int
    displayed: int


@dataclass(frozen=True)
class Round:
    """What one turn of one kernel gave, by the measurements' keys."""

    kernel: str
    values: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def timed(self, key: str) -> Iterator[None]:
        """Time what is done inside."""
        began = time.perf_counter()
        yield
        self.values[key] = time.perf_counter() - began


async def measure(name: str, sizes: Sizes) -> Round:
    """Start a kernel, measure it, and shut it down.

    Parameters
    ----------
    name
        The kernelspec.
    sizes
        How much to do.

    Returns
    -------
    Round
        Seconds, and bytes of memory.
    """
    turn = Round(name)
    manager = AsyncKernelManager(kernel_name=name)
    try:
        async with _started(manager, turn) as client:
            text = await _output(client, VERSIONS)
            for line in text.splitlines():
                what, number = line.split()
                turn.versions[what] = number
            turn.values["round_trip"] = await _round_trip(client, sizes.round_trips)
            with turn.timed("print"):
                printed = len(await _output(client, PRINT.format(count=sizes.printed // 1000)))
            _expect(printed, sizes.printed // 1000 * 1000)
            with turn.timed("display"):
                shown = len(await _output(client, DISPLAY.format(count=sizes.displayed)))
            _expect(shown, sizes.displayed)
            turn.values["interrupt"] = await _interrupt(manager, client, SLEEP)
            turn.values["interrupt_child"] = await _interrupt(manager, client, CHILD)
            memory = await _relay_memory(manager)
            if memory is not None:
                turn.values["relay_memory"] = memory
            with turn.timed("restart"):
                await manager.restart_kernel()
                await client.wait_for_ready(timeout=PATIENCE)
    finally:
        if manager.has_kernel:
            with turn.timed("shutdown"):
                await manager.shutdown_kernel()
    return turn


@asynccontextmanager
async def _started(manager: AsyncKernelManager, turn: Round) -> AsyncIterator[AsyncKernelClient]:
    with turn.timed("start"):
        await manager.start_kernel()
        client: AsyncKernelClient = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=PATIENCE)
        await _output(client, "1")
    try:
        yield client
    finally:
        client.stop_channels()


async def _round_trip(client: AsyncKernelClient, count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await _output(client, "pass")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def _interrupt(manager: AsyncKernelManager, client: AsyncKernelClient, code: str) -> float:
    """Return the seconds from the interrupt of running code to idle."""
    request = client.execute(code)
    while not (await _next_output(client, request)).get("text"):
        pass
    # Past the print, and into what shall be interrupted.
    await asyncio.sleep(0.2)
    began = time.perf_counter()
    await manager.interrupt_kernel()
    await _until_idle(client, request)
    elapsed = time.perf_counter() - began
    await client.get_shell_msg(timeout=PATIENCE)
    return elapsed


async def _output(client: AsyncKernelClient, code: str) -> str:
    """Run code, and return what it printed or displayed once the kernel is idle again."""
    request = client.execute(code)
    pieces = await _until_idle(client, request)
    reply = await client.get_shell_msg(timeout=PATIENCE)
    if reply["content"]["status"] != "ok":
        raise RuntimeError(f"the kernel could not run the code: {reply['content']}")
    return "".join(pieces)


async def _until_idle(client: AsyncKernelClient, request: str) -> list[str]:
    pieces = []
    while (content := await _next_output(client, request)).get("execution_state") != "idle":
        pieces.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
    return pieces


async def _next_output(client: AsyncKernelClient, request: str) -> dict[str, Any]:
    while True:
        message = await client.get_iopub_msg(timeout=PATIENCE)
        if message["parent_header"].get("msg_id") == request:
            content: dict[str, Any] = message["content"]
            return content


async def _relay_memory(manager: AsyncKernelManager) -> float | None:
    """Return the resident bytes of a sandboxed kernel's relay, seen from inside."""
    provisioner = manager.provisioner
    if not isinstance(provisioner, SandboxProvisioner):
        return None
    sandbox = (await provisioner.get_provisioner_info())["sandbox"]
    assert provisioner._settled is not None
    async with Engine(provisioner._settled.endpoint()) as engine:
        stream = await engine.exec(sandbox, ["sh", "-c", _STATUS], user=CONTROL_USER, stdin=False)
        output = b""
        async with stream:
            while (chunk := await stream.read()) is not None:
                output += chunk.data
    processes: dict[str, dict[str, str]] = {}
    for line in output.decode().splitlines():
        file, name, value = line.split(":", 2)
        processes.setdefault(file, {})[name] = value.split()[0]
    uid = CONTROL_USER.partition(":")[0]
    relays = [p for p in processes.values() if p.get("Uid") == uid and "python" in p["Name"]]
    return float(sum(int(relay["VmRSS"]) << 10 for relay in relays))


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"{found} bytes of output instead of {expected}")
