"""Many kernels, one after the other and all at once, and floods of output (issue 5)."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.engine.thread import EngineThread
from tests.engines import Engines
from tests.kernel.conftest import connect, containers_of, evaluate, sandbox_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

READER = """
import sys, time
from jupyter_client import BlockingKernelClient
client = BlockingKernelClient(connection_file=sys.argv[1])
client.load_connection_file()
client.start_channels()
while sys.argv[2] == "all":
    client.iopub_channel.socket.recv_multipart()
time.sleep(600)
"""
ROUNDS = 200
AT_ONCE = 40
MIB = 1 << 20


def manager_for(engines: Engines, **config: Any) -> AsyncKernelManager:
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(engines.unix_endpoint, **config)
    return manager


def tasks_of_engine() -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return EngineThread.current().run(count)


def engine_thread_seconds() -> float:
    [thread] = [t for t in threading.enumerate() if t.name == "sandbox-engine"]
    for times in psutil.Process().threads():
        if times.id == thread.native_id:
            return float(times.user_time + times.system_time)
    raise AssertionError("the engine thread is not there")


async def test_two_hundred_starts_and_stops_leave_nothing(engines: Engines) -> None:
    """B13, goal 6: descriptors, threads, tasks and memory stay flat; nothing is on the engine."""
    process = psutil.Process()
    seen: list[tuple[int, int, int, int]] = []
    managers = []
    for number in range(ROUNDS):
        manager = manager_for(engines)
        await manager.start_kernel()
        client = await connect(manager)
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
        managers.append(manager.kernel_id)
        del manager, client
        if number % 20 == 19:
            gc.collect()
            tasks = await asyncio.to_thread(tasks_of_engine)
            seen.append(
                (process.num_fds(), threading.active_count(), tasks, process.memory_info().rss)
            )
            print(number + 1, *seen[-1])
    first, last = seen[1], seen[-1]
    assert last[0] <= first[0] + 4
    assert last[1] <= first[1] + 2
    assert last[2] <= first[2] + 2
    assert last[3] <= first[3] + 16 * MIB
    left = {c["Labels"].get("io.sandbox-kernel.kernel") for c in engines.api.containers()}
    assert not left.intersection(managers)


async def test_forty_kernels_at_once_answer_and_cost_little_when_idle(engines: Engines) -> None:
    """Goal 6: on a machine of two processors; idle, they take less than a tenth of one."""
    managers = [
        manager_for(engines, mem_limit="256M", cpu_limit=0.5, startup_timeout=300.0)
        for _ in range(AT_ONCE)
    ]
    clients = []
    try:
        began = time.monotonic()
        await asyncio.gather(*(manager.start_kernel() for manager in managers))
        for manager in managers:
            client = manager.client()
            client.start_channels()
            clients.append(client)
        await asyncio.gather(*(client.wait_for_ready(timeout=300) for client in clients))
        print("started in", time.monotonic() - began)
        answers = await asyncio.gather(
            *(evaluate(client, f"print({n})") for n, client in enumerate(clients))
        )
        assert answers == list(range(AT_ONCE))
        await asyncio.sleep(5)
        before, began = engine_thread_seconds(), time.monotonic()
        await asyncio.sleep(20)
        share = (engine_thread_seconds() - before) / (time.monotonic() - began)
        print("engine thread", share)
        assert share < 0.1
    finally:
        for client in clients:
            client.stop_channels()
        await asyncio.gather(
            *(manager.shutdown_kernel(now=True) for manager in managers if manager.has_kernel)
        )
    assert [c for manager in managers for c in containers_of(engines, manager)] == []


def start_readers(connection_file: str) -> list[subprocess.Popen[bytes]]:
    """Start a client that reads everything, and one that reads nothing."""
    argv = [sys.executable, "-c", READER, connection_file]
    return [subprocess.Popen([*argv, how]) for how in ("all", "nothing")]


async def timed(wait: Callable[[], Any]) -> float:
    began = time.monotonic()
    await wait()
    return time.monotonic() - began


async def test_a_flood_holds_up_neither_control_nor_heartbeat_nor_the_interrupt(
    engines: Engines,
) -> None:
    """MUX-11, goal 5: with a client that reads all of it, and one that reads nothing.

    The lines are short: of long ones ipykernel makes messages of 60 MB, and a local kernel too
    then takes more than a second for what comes on its control channel.
    """
    manager = manager_for(engines)
    await manager.start_kernel()
    client = await connect(manager)
    process = psutil.Process()
    readers: list[subprocess.Popen[bytes]] = []
    try:
        before = process.memory_info().rss
        request = client.execute("while True: print('x' * 100)")
        # The memory of a client that holds messages as large as the kernel makes them is its own.
        client.iopub_channel.stop()
        readers = start_readers(manager.connection_file)
        await asyncio.sleep(3)
        control, beats, most = [], [], 0
        for _ in range(20):

            async def ask() -> None:
                message = client.session.msg("kernel_info_request")
                client.control_channel.send(message)
                while (await client.get_control_msg(timeout=10))["parent_header"][
                    "msg_id"
                ] != message["header"]["msg_id"]:
                    pass

            control.append(await timed(ask))

            socket = manager.connect_hb()

            async def beat(socket: Any = socket) -> None:
                await socket.send(b"ping")
                assert await socket.poll(10_000)
                assert await socket.recv() == b"ping"

            beats.append(await timed(beat))
            socket.close(linger=0)
            most = max(most, process.memory_info().rss - before)
            await asyncio.sleep(0.2)
        began = time.monotonic()
        await manager.interrupt_kernel()
        while (await client.get_shell_msg(timeout=10))["parent_header"]["msg_id"] != request:
            pass
        interrupt = time.monotonic() - began
        print("control", max(control), "heartbeat", max(beats), "interrupt", interrupt)
        print("memory", most / MIB)
        assert max(control) < 0.5
        assert max(beats) < 0.5
        assert interrupt < 2
        assert most < 64 * MIB
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
