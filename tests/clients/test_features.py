"""What a client can do with a kernel, through the channels and nothing else (K1)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.multikernelmanager import AsyncMultiKernelManager

from tests.kernel.conftest import MakeManager, connect, evaluate, make_manager

__all__ = ["make_manager"]  # the fixture


async def started(manager: AsyncKernelManager) -> AsyncKernelManager:
    await manager.start_kernel()
    return manager


async def outputs_of(client: Any, code: str) -> list[dict[str, Any]]:
    """Run code and return the messages that it brought about."""
    messages: list[dict[str, Any]] = []
    reply = await client.execute_interactive(code, output_hook=messages.append, timeout=60)
    assert reply["content"]["status"] == "ok", reply["content"]
    return messages


async def test_input_is_asked_for_and_answered(make_manager: MakeManager) -> None:
    """K1: the stdin channel."""
    client = await connect(await started(make_manager()))
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    async def answer(message: dict[str, Any]) -> None:
        assert message["content"]["prompt"] == "who? "
        client.input("Ada")

    reply = await client.execute_interactive(
        "print('hello', input('who? '))",
        allow_stdin=True,
        stdin_hook=answer,
        output_hook=output,
        timeout=60,
    )
    client.stop_channels()
    assert reply["content"]["status"] == "ok"
    assert "".join(printed) == "hello Ada\n"


async def test_a_widget_and_its_client_talk_over_comms(make_manager: MakeManager) -> None:
    """K1: ipywidgets; a slider moved by the client has moved in the kernel."""
    client = await connect(await started(make_manager()))
    messages = await outputs_of(
        client, "import ipywidgets\nslider = ipywidgets.IntSlider(3)\ndisplay(slider)"
    )
    opened = [m["content"] for m in messages if m["msg_type"] == "comm_open"]
    slider = next(c for c in opened if c["data"]["state"].get("_model_name") == "IntSliderModel")
    assert slider["data"]["state"]["value"] == 3
    data = {"method": "update", "state": {"value": 7}, "buffer_paths": []}
    message = client.session.msg("comm_msg", {"comm_id": slider["comm_id"], "data": data})
    client.shell_channel.send(message)
    assert await evaluate(client, "print(slider.value)") == 7
    client.stop_channels()


async def test_completion_and_inspection_answer(make_manager: MakeManager) -> None:
    """K1."""
    client = await connect(await started(make_manager()))
    completion = await client.complete("import nump", reply=True, timeout=30)
    assert "numpy" in completion["content"]["matches"]
    inspection = await client.inspect("len", reply=True, timeout=30)
    assert inspection["content"]["found"]
    client.stop_channels()


async def test_two_clients_share_one_kernel(make_manager: MakeManager) -> None:
    """K1: both see what one of them runs."""
    manager = await started(make_manager())
    first = await connect(manager)
    # Not from the same manager: that would give both one identity.
    second = AsyncKernelClient()
    second.load_connection_info(manager.get_connection_info())
    second.start_channels()
    await second.wait_for_ready(timeout=60)
    (printed,) = [
        m for m in await outputs_of(first, "print('both')\nshared = 5") if m["msg_type"] == "stream"
    ]
    while True:
        message = await second.get_iopub_msg(timeout=30)
        if message["msg_type"] == "stream":
            break
    assert message["header"]["msg_id"] == printed["header"]["msg_id"]
    assert message["content"]["text"] == "both\n"
    assert await evaluate(second, "print(shared)") == 5
    for client in (first, second):
        client.stop_channels()


async def test_large_outputs_arrive_whole(make_manager: MakeManager) -> None:
    """Decision 1: 50 MB of print and one display of 20 MB, through the windows."""
    client = await connect(await started(make_manager()))
    printed = await outputs_of(client, "for i in range(50_000): print('x' * 999)")
    assert sum(len(m["content"].get("text", "")) for m in printed) == 50_000_000
    shown = await outputs_of(client, "display({'text/plain': 'y' * 20_000_000}, raw=True)")
    (display,) = [m for m in shown if m["msg_type"] == "display_data"]
    assert len(display["content"]["data"]["text/plain"]) == 20_000_000
    client.stop_channels()


async def test_a_flood_of_output_holds_up_no_interrupt(make_manager: MakeManager) -> None:
    """MUX-11, goal 5: the other streams have credit of their own."""
    manager = await started(make_manager())
    client = await connect(manager)
    message_id = client.execute("while True: print('x' * 10_000)")
    # The client reads nothing more: what it does not take stays in the sandbox.
    await client.get_iopub_msg(timeout=30)
    await asyncio.sleep(1)
    began = time.monotonic()
    await manager.interrupt_kernel()
    while True:
        reply = await client.get_shell_msg(timeout=10)
        if reply["parent_header"].get("msg_id") == message_id:
            break
    assert time.monotonic() - began < 5
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    client.stop_channels()


async def test_a_kernel_that_died_is_started_again_by_itself(
    kernel_name: str, tmp_path: Path
) -> None:
    """K3, K4: with the manager that servers use."""
    kernels = AsyncMultiKernelManager(connection_dir=str(tmp_path))
    kernel_id = await kernels.start_kernel(kernel_name=kernel_name)
    try:
        manager = kernels.get_kernel(kernel_id)
        restarted = asyncio.Event()
        kernels.add_restart_callback(kernel_id, restarted.set)
        client = await connect(manager)
        client.execute("import os; os._exit(1)")
        await asyncio.wait_for(restarted.wait(), 30)
        # The callback runs before the restart that it tells of.
        for _ in range(600):
            if await manager.is_alive():
                break
            await asyncio.sleep(0.1)
        await client.wait_for_ready(timeout=60)
        assert await evaluate(client, "import json; print(json.dumps('again'))") == "again"
        client.stop_channels()
    finally:
        await kernels.shutdown_kernel(kernel_id, now=True)
    assert json.dumps(kernels.list_kernel_ids()) == "[]"
