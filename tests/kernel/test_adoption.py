"""A kernel that outlived its server is served by another process (K6)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import KernelProvisionerFactory

from sandbox_kernel.kernel.folder import PrivateFolder
from sandbox_kernel.kernel.launch_error import KernelLaunchError
from sandbox_kernel.kernel.record import records
from sandbox_kernel.sandbox.labels import KERNEL
from tests.engines import Engines, remove_leftovers, wait_until
from tests.kernel.conftest import connect, evaluate, sandbox_spec
from tests.kernel.test_provisioner import is_dead, sandbox_of

OWNER = """
    import asyncio, json, sys, time
    from jupyter_client.manager import AsyncKernelManager
    from tests.kernel.conftest import connect, evaluate, sandbox_spec
    from tests.engines import find_engines

    async def main():
        manager = AsyncKernelManager(kernel_id=sys.argv[1])
        config = json.loads(sys.argv[2])
        manager._kernel_spec = sandbox_spec(find_engines().unix_endpoint, **config)
        await manager.start_kernel()
        client = await connect(manager)
        await evaluate(client, "kept = 5")
        print(json.dumps(await manager.provisioner.get_provisioner_info()), flush=True)
        client.stop_channels()
        sys.stdin.read()

    asyncio.run(main())
"""


@dataclass
class Owner:
    process: subprocess.Popen[str]
    info: dict[str, Any]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


@pytest.fixture
def start_owner(engines: Engines, runtime: Path) -> Iterator[Any]:
    """Start a process with a kernel; at the end both are gone."""
    made: list[tuple[subprocess.Popen[str], str]] = []

    def start(**config: Any) -> Owner:
        kernel_id = f"adopted-{uuid.uuid4().hex}"
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OWNER), kernel_id, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        made.append((process, kernel_id))
        assert process.stdout is not None
        return Owner(process, json.loads(process.stdout.readline()))

    yield start
    for process, kernel_id in made:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        remove_leftovers(engines, f"{KERNEL}={kernel_id}")


def mode_of(path: Path | str) -> int:
    return Path(path).stat().st_mode & 0o777


def manager_of(engines: Engines, info: dict[str, Any], **config: Any) -> AsyncKernelManager:
    """Return a manager with a provisioner, as a gateway makes one that starts again."""
    manager = AsyncKernelManager(kernel_id=info["kernel_id"])
    manager._kernel_spec = sandbox_spec(engines.unix_endpoint, **config)
    factory = KernelProvisionerFactory.instance(parent=manager)
    manager.provisioner = factory.create_provisioner_instance(
        info["kernel_id"], manager.kernel_spec, parent=manager
    )
    return manager


@pytest.mark.parametrize("transport", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_a_kernel_is_served_again_after_its_server_was_killed(
    engines: Engines, start_owner: Any, runtime: Path, transport: str
) -> None:
    """K6: the same variables, connection file, endpoints and key; signals, restart, shutdown."""
    config = {"resumable": 120.0, "local_transport": transport}
    owner = await asyncio.to_thread(start_owner, **config)
    first = owner.info
    owner.process.kill()
    owner.process.wait()
    [(record, lives)] = records()
    assert (record.told(), lives) == (first, False)
    manager = manager_of(engines, first, **config)
    await manager.provisioner.load_provisioner_info(json.loads(json.dumps(first)))
    try:
        assert manager.has_kernel
        info = manager.get_connection_info()
        assert info["key"].decode() == first["connection_info"]["key"]
        assert {**info, "key": 0} == {**first["connection_info"], "key": 0}
        assert manager.connection_file == first["connection_file"]
        assert mode_of(manager.connection_file) == 0o600
        client = await connect(manager)
        assert await evaluate(client, "print(kept)") == 5
        manager.kernel_spec.interrupt_mode = "signal"
        request = client.execute("import time\nprint('up', flush=True)\ntime.sleep(600)")
        while (await client.get_iopub_msg(timeout=30))["msg_type"] != "stream":
            pass
        await manager.interrupt_kernel()
        while (reply := await client.get_shell_msg(timeout=30))["parent_header"][
            "msg_id"
        ] != request:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert sandbox_of(manager).id == first["sandbox"]
        client.execute("import os; os._exit(3)")
        assert await is_dead(manager, within=20)
        assert await manager.provisioner.poll() == 3
        await manager.restart_kernel(now=True)
        await client.wait_for_ready(timeout=60)
        assert await evaluate(client, "print(int('kept' in globals()))") == 0
        assert sandbox_of(manager).id == first["sandbox"]
        client.stop_channels()
    finally:
        await manager.shutdown_kernel(now=True)
    assert engines.api.inspect(first["sandbox"]) is None
    assert records() == []


@pytest.mark.slow
async def test_a_kernel_that_may_outlive_its_process_does_when_that_ends(
    engines: Engines, start_owner: Any
) -> None:
    """K6: also without being killed, and for no longer than was asked for."""
    owner = await asyncio.to_thread(start_owner, resumable=120.0)
    owner.process.stdin.close()
    assert owner.process.wait(30) == 0
    manager = manager_of(engines, owner.info)
    await manager.provisioner.load_provisioner_info(owner.info)
    client = await connect(manager)
    assert await evaluate(client, "print(kept)") == 5
    client.stop_channels()
    await manager.shutdown_kernel()
    assert engines.api.inspect(owner.info["sandbox"]) is None


async def test_a_kernel_that_cannot_be_served_says_why(
    engines: Engines, start_owner: Any, runtime: Path
) -> None:
    """K6, K8: its server lives; it ended with its server; it is none; and nothing is left here."""
    owner = await asyncio.to_thread(start_owner)
    manager = manager_of(engines, owner.info)
    with pytest.raises(KernelLaunchError, match="Another process serves this kernel"):
        await manager.provisioner.load_provisioner_info(owner.info)
    owner.process.kill()
    owner.process.wait()
    gone = owner.info["sandbox"]
    await asyncio.to_thread(wait_until, lambda: engines.api.inspect(gone) is None, 20)
    with pytest.raises(KernelLaunchError, match="No sandbox"):
        await manager.provisioner.load_provisioner_info(owner.info)
    assert not manager.has_kernel
    assert not Path(owner.info["connection_info"]["ip"]).parent.exists()
    with pytest.raises(KernelLaunchError, match="cannot be read"):
        await manager.provisioner.load_provisioner_info(
            {"kernel_id": manager.kernel_id, "connection_info": {"key": "k"}}
        )


async def test_what_is_kept_of_a_kernel_is_private_and_goes_with_it(
    engines: Engines, runtime: Path
) -> None:
    """K6: the key is in no label and in no file that others can read."""
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(engines.unix_endpoint)
    await manager.start_kernel()
    try:
        [path] = (runtime / "sandbox-kernels").iterdir()
        assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
        key = manager.session.key.decode()
        assert key in path.read_text()
        assert key not in repr(records())
        assert key not in json.dumps(engines.api.inspect(sandbox_of(manager).id))
        [(_, lives)] = records()
        assert lives
        await manager.restart_kernel(now=True)
        assert len(records()) == 1
    finally:
        await manager.shutdown_kernel(now=True)
    assert records() == []


def test_a_folder_is_taken_again_only_when_its_owner_has_gone(tmp_path: Path) -> None:
    """K6: and made again where somebody has cleared it away."""
    first = PrivateFolder(tmp_path)
    with pytest.raises(Exception, match="Another process"):
        PrivateFolder(again=first.path)
    first._lock.close()
    second = PrivateFolder(again=first.path)
    second.remove()
    third = PrivateFolder(again=first.path)
    assert third.path.stat().st_mode & 0o777 == 0o700
    third.remove()
    link = tmp_path / "link"
    link.symlink_to(os.curdir)
    with pytest.raises(Exception, match="somebody else"):
        PrivateFolder(again=link)
