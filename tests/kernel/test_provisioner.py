"""The provisioner as jupyter_client drives it: start, restart, death, failure, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.kernel.folder import remove_abandoned
from sandbox_kernel.kernel.launch_error import KernelLaunchError
from tests.engines import Engines, busybox_archive, wait_until
from tests.kernel.conftest import (
    MakeManager,
    connect,
    containers_of,
    engine_config,
    evaluate,
)


def sandbox_of(manager: AsyncKernelManager) -> Any:
    return manager.provisioner._session.sandbox


async def is_dead(manager: AsyncKernelManager, within: float = 1.0) -> bool:
    """Wait for a kernel's death to be noticed (K4: within 1 s)."""
    deadline = time.monotonic() + within
    while await manager.is_alive():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def test_a_restart_gives_a_clean_process_in_the_same_sandbox(
    make_manager: MakeManager,
) -> None:
    """K3, peers 3: the workspace stays, variables and children go; clients stay connected."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    before = sandbox_of(manager).id
    await evaluate(
        client,
        "import subprocess\nx = 1\nopen('/workspace/kept', 'w').write('kept')\n"
        "child = subprocess.Popen(['setsid', 'sleep', '4321'])",
    )
    for now in (False, True):
        await manager.restart_kernel(now=now)
        await client.wait_for_ready(timeout=60)
        seen = await evaluate(
            client,
            "import json, pathlib\n"
            "lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')]\n"
            "print(json.dumps(['x' in globals(), open('/workspace/kept').read(),"
            " any(b'4321' in line and b'sleep' in line for line in lines)]))",
        )
        assert seen == [False, "kept", False]
        assert sandbox_of(manager).id == before
    client.stop_channels()


@pytest.mark.parametrize("how", ["exit", "sigkill", "abort"])
async def test_a_kernel_that_dies_is_noticed_within_a_second(
    make_manager: MakeManager, how: str
) -> None:
    """K4: also while a child of it still holds its output."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    await evaluate(client, "import os, subprocess; c = subprocess.Popen(['sleep', '60'])")
    code = {"exit": "os._exit(3)", "sigkill": "os.kill(os.getpid(), 9)", "abort": "os.abort()"}
    client.execute(code[how])
    assert await is_dead(manager)
    assert await manager.provisioner.poll() == {"exit": 3, "sigkill": 137, "abort": 134}[how]
    client.stop_channels()


async def test_running_out_of_memory_is_told_from_other_deaths(
    make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    """K4, RES-04: with the limit, in the log; the sandbox lives and a restart works."""
    manager = make_manager(mem_limit="256M")
    await manager.start_kernel()
    client = await connect(manager)
    client.execute("x = []\nwhile True: x.append(bytearray(10 << 20))")
    assert await is_dead(manager, within=20)
    await asyncio.to_thread(
        wait_until,
        lambda: (
            "ran out of memory; the limit of the sandbox is 256 MiB, and the most" in caplog.text
        ),
    )
    await manager.restart_kernel(now=True)
    await client.wait_for_ready(timeout=60)
    client.stop_channels()


async def test_a_sandbox_removed_behind_our_back_is_noticed_and_a_restart_makes_a_new_one(
    make_manager: MakeManager, engines: Engines
) -> None:
    """K3, K4, ENG-07: and none of the calls on the dead kernel fails."""
    manager = make_manager()
    await manager.start_kernel()
    first = sandbox_of(manager).id
    engines.api.remove(first)
    assert await is_dead(manager)
    provisioner = manager.provisioner
    await provisioner.send_signal(signal.SIGINT)
    await provisioner.terminate()
    await provisioner.kill()
    await manager.restart_kernel(now=True)
    assert sandbox_of(manager).id != first
    client = await connect(manager)
    assert await evaluate(client, "print(42)") == 42
    client.stop_channels()


async def test_a_restart_that_failed_can_be_tried_again_by_the_same_clients(
    make_manager: MakeManager, engines: Engines
) -> None:
    """K3: the endpoints stay, since nobody tells the clients of new ones."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    image, manager.provisioner.image = manager.provisioner.image, "sandbox-test/none:latest"
    engines.api.remove(sandbox_of(manager).id)
    with pytest.raises(KernelLaunchError, match="sandbox-test/none"):
        await manager.restart_kernel(now=True)
    assert containers_of(engines, manager) == []
    manager.provisioner.image = image
    await manager.start_kernel()
    await client.wait_for_ready(timeout=60)
    assert await evaluate(client, "print(8)") == 8
    client.stop_channels()


async def test_shutdown_leaves_nothing_and_may_be_repeated(
    make_manager: MakeManager, engines: Engines
) -> None:
    """B13: container, volume, sockets and folder are gone; cleanup is idempotent."""
    manager = make_manager()
    await manager.start_kernel()
    volume, folder = sandbox_of(manager).volume, manager.provisioner._folder.path
    assert folder.stat().st_mode & 0o777 == 0o700
    await manager.shutdown_kernel()
    assert not manager.provisioner.has_process
    await manager.provisioner.cleanup()
    await manager.provisioner.kill()
    assert await manager.provisioner.poll() is not None
    assert containers_of(engines, manager) == []
    assert volume not in [found["Name"] for found in engines.api.volumes()]
    assert not folder.exists()


async def test_a_cleanup_right_after_the_start_does_not_end_the_kernel(
    make_manager: MakeManager,
) -> None:
    """Some clients call cleanup early (voila#1291)."""
    manager = make_manager()
    await manager.start_kernel()
    await manager.provisioner.cleanup(restart=False)
    client = await connect(manager)
    assert await evaluate(client, "print(1)") == 1
    client.stop_channels()


async def test_an_interrupt_during_the_start_does_not_end_the_kernel(
    make_manager: MakeManager,
) -> None:
    """The signal is held back until the kernel has answered something."""
    manager = make_manager()
    await manager.start_kernel()
    await manager.provisioner.send_signal(signal.SIGINT)
    client = await connect(manager)
    assert await evaluate(client, "print(1)") == 1
    client.stop_channels()


async def test_interrupts_work_as_messages_and_as_signals(make_manager: MakeManager) -> None:
    """K1, peers 17: children of the cell are interrupted too."""
    manager = make_manager()
    await manager.start_kernel()
    client = await connect(manager)
    for mode in ("message", "signal"):
        manager.kernel_spec.interrupt_mode = mode
        for code in (
            "import time\nfor i in range(600): print('go', flush=True) or time.sleep(0.1)",
            "!echo go; sleep 61",
        ):
            message_id = client.execute(code)
            while True:
                shown = await client.get_iopub_msg(timeout=20)
                of = shown["parent_header"].get("msg_id")
                # What the one before has still printed does not say that this one runs.
                if shown["msg_type"] == "stream" and of == message_id:
                    break
            await manager.interrupt_kernel()
            began = time.monotonic()
            while True:
                reply = await client.get_shell_msg(timeout=10)
                if reply["parent_header"].get("msg_id") == message_id:
                    break
            assert time.monotonic() - began < 5
    client.stop_channels()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_clients_reach_the_kernel_over_private_sockets_or_loopback(
    make_manager: MakeManager, transport: str
) -> None:
    """Decision 6."""
    manager = make_manager(local_transport=transport)
    await manager.start_kernel()
    info = manager.get_connection_info()
    assert info["transport"] == transport
    client = await connect(manager)
    assert await evaluate(client, "print(7)") == 7
    client.stop_channels()


async def test_required_encryption_is_kept_end_to_end(make_manager: MakeManager) -> None:
    """Decision 6: CURVE passes through the relay, or the start is refused by the manager."""
    manager = make_manager()
    if not hasattr(manager, "transport_encryption"):
        pytest.fail("the tests need a jupyter_client with transport_encryption (8.10)")
    manager.transport_encryption = "required"
    await manager.start_kernel()
    assert manager.get_connection_info()["curve_publickey"]
    client = await connect(manager)
    assert await evaluate(client, "print(7)") == 7
    client.stop_channels()


async def test_an_oversized_message_is_left_out_and_the_kernel_stays_usable(
    make_manager: MakeManager,
) -> None:
    """MUX-14, RES-11: the message is missing, those around it are there."""
    manager = make_manager(max_message_bytes=1 << 20)
    await manager.start_kernel()
    client = await connect(manager)
    printed: list[int] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(len(message["content"]["text"]))

    code = "import sys\nprint('a')\nsys.stdout.flush()\nprint('x' * 5_000_000)\nsys.stdout.flush()"
    await client.execute_interactive(code, output_hook=hook, timeout=30)
    assert sum(printed) < 1 << 20
    assert await evaluate(client, "print(3)") == 3
    client.stop_channels()


# -- failures ---------------------------------------------------------------------------------

PYTHON = "/opt/python/bin/python3"
BROKEN = {
    "an unknown setting": ({"mem_limt": "1G"}, None, "mem_limt.*no such setting"),
    "a missing image": ({"image": "sandbox-test/none:latest"}, None, "sandbox-test/none"),
    "another network": ({"network": "host"}, None, "network = 'host'"),
    "more memory than there is": ({"mem_limit": "900T"}, None, "mem_limit"),
    "more processors than there are": ({"cpu_limit": 4000.0}, None, "cpu_limit.*at most"),
    "a memory text that is none": ({"mem_limit": "lots"}, None, "mem_limit = 'lots'"),
    "a runtime that is none": ({"runtime": "vm"}, None, "runtime = 'vm'.*no such runtime"),
    "a kernel that is not in the image": ({}, ["/no/kernel"], "not found in the image: /no/kern"),
    "a kernel that ends at once": ({}, [PYTHON, "-m", "no_kernel"], "No module named no_kernel"),
    "a kernel that never listens": (
        {"startup_timeout": 2.0},
        [PYTHON, "-c", "import time; time.sleep(99)"],
        "did not start within 2 s",
    ),
    "no engine": ({"host": "unix:///no/docker.sock"}, None, "/no/docker.sock"),
    "plain TCP to elsewhere": ({"host": "http://192.0.2.1:2375"}, None, "plain"),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_what_cannot_start_says_why_once_and_leaves_nothing(
    make_manager: MakeManager, engines: Engines, what: str
) -> None:
    """K8: one clear error for the person, and nothing left on the engine or here."""
    config, argv, text = BROKEN[what]
    manager = make_manager(argv, **config)
    with pytest.raises(KernelLaunchError, match=f"(?s){text}") as caught:
        await manager.start_kernel()
    assert caught.value.status_code in (400, 503)
    assert caught.value.log_message
    assert isinstance(caught.value, FileNotFoundError) == (argv == ["/no/kernel"])
    assert containers_of(engines, manager) == []
    if manager.provisioner is not None:
        assert not manager.provisioner.has_process
        assert manager.provisioner._folder is None


async def test_an_image_without_python_is_named(
    make_manager: MakeManager, engines: Engines, busybox_image: str
) -> None:
    """K2, K8: the relay and the launcher need it."""
    manager = make_manager(image=busybox_image)
    with pytest.raises(KernelLaunchError, match="no python3 in"):
        await manager.start_kernel()
    assert containers_of(engines, manager) == []


async def test_an_image_with_a_python_that_is_too_old_is_named(
    make_manager: MakeManager, engines: Engines
) -> None:
    """K2, K8: the version that is needed is said.

    No Debian has a Python older than 3.8 any more: a script stands in for it that ends as the
    loader does there.
    """
    ref = f"sandbox-kernel-test/old-python:{os.getpid()}"
    old = b"#!/bin/sh\nexit 125\n"
    engines.api.import_image(busybox_archive({"bin/python3": old}), ref, ["ENV PATH=/bin"])
    try:
        manager = make_manager(image=ref)
        with pytest.raises(KernelLaunchError, match=r"too old.*3\.8 or later"):
            await manager.start_kernel()
        assert containers_of(engines, manager) == []
    finally:
        engines.api.remove_image(ref)


async def test_a_wrong_certificate_is_named(engines: Engines, make_manager: MakeManager) -> None:
    """E2, E4: the cause is the certificate, not silence."""
    rogue = engines.certs / "rogue"
    config = {
        **engine_config(engines.tls_endpoint),
        "tls_cert_path": str(rogue / "cert.pem"),
        "tls_key_path": str(rogue / "key.pem"),
    }
    manager = make_manager(**config)
    with pytest.raises(KernelLaunchError, match="certificate"):
        await manager.start_kernel()


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
async def test_a_start_that_is_cancelled_leaves_nothing(
    make_manager: MakeManager, engines: Engines, delay: float
) -> None:
    """CLI-04: wherever in the start it happens."""
    manager = make_manager()
    start = asyncio.ensure_future(manager.start_kernel())
    await asyncio.wait([start], timeout=delay)
    if not start.done():
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        # Once the launch has succeeded the kernel is the manager's, whatever comes after it.
        if not manager.has_kernel:
            assert containers_of(engines, manager) == []
            assert manager.provisioner is None or manager.provisioner._folder is None


# -- the owner's end --------------------------------------------------------------------------

OWNER = """
    import sys, time
    from jupyter_client.manager import KernelManager
    from tests.kernel.conftest import sandbox_spec
    from sandbox_kernel.engine.endpoint import Endpoint
    from tests.engines import find_engines
    manager = KernelManager(kernel_id=sys.argv[1])
    manager._kernel_spec = sandbox_spec(find_engines().unix_endpoint)
    manager.start_kernel()
    print(manager.provisioner._session.sandbox.id, manager.provisioner._session.sandbox.volume,
          manager.provisioner._folder.path, flush=True)
    if sys.argv[2] == "stay":
        time.sleep(60)
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_nothing_outlives_the_process_that_owns_the_kernel(engines: Engines, how: str) -> None:
    """B13, CLI-01, CLI-02, peers 4: killed, or gone without a call, under the blocking manager."""
    root = Path(__file__).parents[2]
    kernel_id = f"owner-{how}-{os.getpid()}"
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(OWNER),
            kernel_id,
            "stay" if how == "kill" else "go",
        ],
        stdout=subprocess.PIPE,
        cwd=root,
        text=True,
    )
    try:
        assert owner.stdout is not None
        container, volume, folder = owner.stdout.readline().split()
        if how == "kill":
            assert engines.api.inspect(container) is not None
            owner.kill()
        owner.wait(20)
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: engines.api.inspect(container) is None, 20, "the container's end")
    wait_until(
        lambda: volume not in [found["Name"] for found in engines.api.volumes()],
        20,
        "the volume's end",
    )
    remove_abandoned(Path(folder).parent)
    assert not Path(folder).exists()


async def test_the_blocking_and_the_async_manager_can_be_used_from_several_threads(
    make_manager: MakeManager,
) -> None:
    """Decision 5: no loop of a caller is relied on."""
    manager = make_manager()
    await manager.start_kernel()
    assert (
        await asyncio.gather(
            *(asyncio.to_thread(asyncio.run, manager.provisioner.poll()) for _ in range(5))
        )
        == [None] * 5
    )
    await asyncio.to_thread(asyncio.run, manager.provisioner.send_signal(signal.SIGINT))
    assert await manager.is_alive()
