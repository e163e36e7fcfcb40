"""What clients learn when their kernel has died, and what the dead can put into it (K4)."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import Session
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from sandbox_kernel.kernel.obituary import LARGEST_HEADER, Obituary, parent_header, stream_message
from tests.engines import Engines
from tests.kernel.conftest import MakeManager, connect, evaluate, sandbox_spec
from tests.kernel.test_provisioner import is_dead, sandbox_of
from tests.process.private import free_port

KEY = b"0123456789"
CELL = {"msg_id": "m1", "session": "s1", "username": "u", "msg_type": "execute_request"}


def announced(header: object) -> list[bytes]:
    """Make the parts of a kernel's message that answers this header."""
    return [b"topic", b"<IDS|MSG>", b"signature", b"{}", json.dumps(header).encode(), b"{}"]


# -- what the kernel says of its cell ------------------------------------------------------------


def test_the_header_of_the_cell_is_taken_over() -> None:
    assert parent_header(announced({**CELL, "more": [1]})) == CELL


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"<IDS|MSG>"],
        [b"<IDS|MSG>", b"", b"", b"{"],
        [b"<IDS|MSG>", b"", b"", b"\xff\xfe"],
        [b"<IDS|MSG>", b"", b"", b"[" * 5000],
        announced([CELL]),
        announced(None),
        announced({"session": "s"}),
        announced({"msg_id": 1}),
        announced({**CELL, "username": "x" * 257}),
        announced({**CELL, "more": "x" * LARGEST_HEADER}),
    ],
    ids=str,
)
def test_a_header_that_makes_no_sense_is_not_used(parts: list[bytes]) -> None:
    """MUX-16: it is what the kernel wrote."""
    assert parent_header(parts) == {}


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_whatever_the_kernel_wrote_gives_short_texts_or_nothing(parts: list[bytes]) -> None:
    """MUX-16."""
    found = parent_header([b"<IDS|MSG>", *parts])
    assert all(isinstance(value, str) and len(value) <= 256 for value in found.values())


# -- the message -------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [CELL, {}])
@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_each_subscriber_gets_the_message_once(
    tmp_path: Path, cell: dict[str, str], encrypted: bool, transport: str
) -> None:
    """K4: signed with the kernel's key, and encrypted where its channels are."""
    public, secret = zmq.curve_keypair()
    message = stream_message("It is dead.\n", {"key": KEY.decode()}, cell)
    url = f"ipc://{tmp_path}/iopub" if transport == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    obituary = Obituary.publish(url, message, secret if encrypted else None)
    context = zmq.asyncio.Context()
    earlier: list[Any] = []
    try:
        for _ in range(2):
            socket = context.socket(zmq.SUB)
            if encrypted:
                mine = zmq.curve_keypair()
                socket.curve_publickey, socket.curve_secretkey = mine
                socket.curve_serverkey = public
            socket.connect(url)
            socket.subscribe(b"")
            parts = await asyncio.wait_for(socket.recv_multipart(), 10)
            _, parts = (session := Session(key=KEY)).feed_identities(parts)
            got = session.deserialize(parts)
            assert got["content"] == {"name": "stderr", "text": "It is dead.\n"}
            assert got["parent_header"].get("msg_id") == cell.get("msg_id")
            assert obituary.read.is_set()
            earlier.append(socket)
            assert [await one.poll(50) for one in earlier] == [0] * len(earlier)
    finally:
        context.destroy(linger=0)
        await obituary.close()


async def test_the_endpoint_is_free_again_at_once(tmp_path: Path) -> None:
    """K3: the next kernel's listener takes the place, and nobody removes its socket."""
    place = tmp_path / "iopub"
    for _ in range(20):
        obituary = Obituary.publish(f"ipc://{place}", [b"x"])
        await obituary.close()
        server = await asyncio.start_unix_server(lambda _r, _w: None, str(place))
        await asyncio.sleep(0.01)
        assert place.exists()
        server.close()
        place.unlink(missing_ok=True)


# -- a kernel that dies --------------------------------------------------------------------------


async def told(client: Any, request: str) -> str:
    """Return what reaches a client on stderr as an answer to this request."""
    text = ""
    async with asyncio.timeout(30):
        while not text.endswith("\n"):
            message = await client.get_iopub_msg()
            if message["msg_type"] == "stream" and message["parent_header"]["msg_id"] == request:
                assert message["content"]["name"] == "stderr"
                text += message["content"]["text"]
    return text


# ipykernel reads what goes to the descriptor 2 by itself, and keeps the one that it was given.
CRASH = "import os, sys; os.write(sys.stderr._original_stdstream_copy, b'oh no\\n'); os.abort()"
DEATHS: list[tuple[str, str]] = [
    ("import os; os._exit(3)", r"The kernel ended with exit code 3\.\n"),
    (CRASH, r"ended with exit code 134\. Its last lines were:\noh no\n"),
    (
        "x = []\nwhile True: x.append(bytearray(10 << 20))",
        r"of memory; the limit of the sandbox is 256 MiB, and the most that it used is 25\d MiB",
    ),
]


@pytest.mark.parametrize(("code", "reason"), DEATHS, ids=["exit", "crash", "memory"])
async def test_the_cell_shows_why_its_kernel_died(
    make_manager: MakeManager, code: str, reason: str
) -> None:
    """K4, peers 22, RES-04: and the restarted kernel's messages arrive as ever."""
    manager = make_manager(mem_limit="256M")
    await manager.start_kernel()
    client = await connect(manager)
    # The reason is for the cell that the kernel died in, and not for one before it.
    assert await evaluate(client, "print(1)") == 1
    assert re.search(reason, await told(client, client.execute(code)))
    assert await is_dead(manager, within=10)
    await manager.restart_kernel(now=True)
    await client.wait_for_ready(timeout=60)
    assert await evaluate(client, "print(7)") == 7
    client.stop_channels()


FORKS = """
import os, signal
children = []
try:
    while True:
        if (child := os.fork()) == 0:
            signal.pause()
        children.append(child)
except OSError:
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
os.abort()
"""
FILLS = (
    "import os\nwith open('/tmp/big', 'wb', 0) as file:\n    while True: file.write(bytes(1 << 20))"
)
SHORTAGES = [
    (FORKS, r"exit code 134\. Since it started, \d+ process.* limit was reached \(64 processes\)"),
    (
        f"import os\ntry: exec({FILLS!r})\nexcept OSError: os._exit(5)",
        r"exit code 5, and no room is left in /tmp\.",
    ),
    (
        "import os, subprocess\n"
        "subprocess.run(['python3', '-c', 'x = []\\nwhile True: x.append(bytearray(10 << 20))'])\n"
        "os._exit(6)",
        r"exit code 6\. Since it started, 1 process was killed .*, which has 256 MiB\.",
    ),
]


@pytest.mark.parametrize(("code", "reason"), SHORTAGES, ids=["pids", "disk", "memory of a child"])
async def test_what_ran_short_in_the_sandbox_is_told_with_a_death(
    engines: Engines, code: str, reason: str
) -> None:
    """K4, RES-01, RES-02, peers 22: by what the kernel counted; no blame where the code is other.

    By one way to the engine only: the evidence is the same.
    """
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(
        engines.unix_endpoint, mem_limit="256M", pids_limit=64, tmpfs_size="8M"
    )
    await manager.start_kernel()
    try:
        client = await connect(manager)
        assert re.search(reason, await told(client, client.execute(code)))
        client.stop_channels()
    finally:
        await manager.shutdown_kernel(now=True)


async def test_a_sandbox_removed_by_hand_is_told_of_too(
    make_manager: MakeManager, engines: Engines
) -> None:
    """K4, ENG-07."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    request = client.execute("import time; time.sleep(60)")
    async with asyncio.timeout(30):
        while (await client.get_iopub_msg())["msg_type"] != "execute_input":
            pass
    engines.api.remove(sandbox_of(manager).id)
    assert "killed on the engine" in await told(client, request)
    client.stop_channels()


async def test_a_kernel_that_was_asked_to_end_is_not_mourned(make_manager: MakeManager) -> None:
    """K4: neither by `exit` nor by a shutdown."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    client.execute("exit")
    assert await is_dead(manager, within=10)
    session = manager.provisioner._session
    assert session._obituary is None
    client.stop_channels()


async def test_a_notebook_keeps_the_reason(
    make_manager: Callable[..., Any], tmp_path: Path
) -> None:
    """K4: nbclient gives up, and the notebook that it leaves says why."""
    manager = make_manager()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os\nos._exit(5)")])
    client = NotebookClient(notebook, km=manager, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.raises(DeadKernelError):
        await client.async_execute()
    outputs = notebook.cells[0].outputs
    assert "The kernel ended with exit code 5." in "".join(o.get("text", "") for o in outputs)
