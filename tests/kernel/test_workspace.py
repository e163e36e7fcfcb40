"""Which workspace a kernel gets, and what else of a sandbox a kernelspec can ask for (K5, K7)."""

from __future__ import annotations

import ipaddress
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.config import SETTINGS
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.kernel import provisioner
from sandbox_kernel.kernel.launch_error import KernelLaunchError
from sandbox_kernel.kernel.session import KERNEL_PORTS, kernel_address, kernel_ports
from sandbox_kernel.kernel.workspace import workspace_of
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.owner import current_owner
from sandbox_kernel.sandbox.spec import SandboxSpec
from sandbox_kernel.sandbox.workspace import workspace_name
from sandbox_kernel.sandbox.workspaces import Workspaces
from tests.engines import Engines, remove_leftovers
from tests.kernel.conftest import MakeManager, connect, evaluate, sandbox_spec

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@pytest.fixture
def endpoint(engines: Engines) -> Endpoint:
    """One way to the engine: here it makes no difference."""
    return engines.unix_endpoint


@pytest.fixture
def user(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A person of this test alone, of whom nothing is left at its end."""
    name = f"user-{uuid.uuid4().hex}"
    monkeypatch.setenv("JUPYTERHUB_USER", name)
    yield name
    remove_leftovers(engines, f"{labels.OWNER}={name}")


def key_of(setting: str, session: str = "") -> str | None:
    return SandboxSpec(**workspace_of(setting, session)).workspace


# -- keys -----------------------------------------------------------------------------------------


def test_each_way_gives_a_key_of_its_own() -> None:
    """K5"""
    a, b = "/home/x/a/n.ipynb", "/home/x/b/n.ipynb"
    keys = [key_of("notebook", a), key_of("notebook", b), key_of("user", a), key_of("course", a)]
    assert keys == [f"notebook:{a}", f"notebook:{b}", "user:", "course"]
    assert key_of("notebook", "/home/x/./a/n.ipynb") == keys[0]
    assert key_of("ephemeral", a) is None


@given(st.tuples(TEXT, TEXT), st.tuples(TEXT, TEXT))
def test_notebooks_and_people_never_share_by_accident(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    """K5: one notebook name in two folders, and one path of two people, are two workspaces."""
    (owner, path), (another, elsewhere) = one, other
    assume((owner, os.path.normpath("/" + path)) != (another, os.path.normpath("/" + elsewhere)))
    names = {
        workspace_name("sbx-", who, str(key_of(how, "/" + where)))
        for who, where in (one, other)
        for how in ("notebook", "user")
    }
    assert len(names) == 2 + len({owner, another})


def test_a_notebook_that_nobody_names_is_refused() -> None:
    """K5: what it kept would not be found again."""
    with pytest.raises(SandboxSpecRejectedError, match="JPY_SESSION_NAME"):
        workspace_of("notebook", "")


@given(st.text(max_size=50))
def test_a_kernels_ports_are_its_own_and_below_the_ephemeral_ones(kernel_id: str) -> None:
    ports = kernel_ports(kernel_id)
    assert ports == kernel_ports(kernel_id)
    assert len(set(ports)) == 5
    assert set(ports) <= set(KERNEL_PORTS)


@given(st.text(max_size=50), st.text(max_size=50))
def test_a_kernels_address_is_a_loopback_one_of_its_own(kernel_id: str, another: str) -> None:
    """K5: neither where resolvers listen nor the address of a network or of all in it."""
    address = ipaddress.IPv4Address(kernel_address(kernel_id))
    assert address.is_loopback
    assert address not in ipaddress.ip_network("127.0.0.0/16")
    assert address.packed[3] not in {0, 255}
    assert address.packed[1] != 255
    assert str(address) == kernel_address(kernel_id)
    assert (kernel_address(another) == str(address)) == (another == kernel_id)


# -- kernels --------------------------------------------------------------------------------------


async def start(manager: AsyncKernelManager, notebook: str, **more: Any) -> Any:
    await manager.start_kernel(env={**os.environ, "JPY_SESSION_NAME": notebook}, **more)
    return await connect(manager)


READ = (
    "import json, os\nprint(json.dumps(sorted(n for n in os.listdir('/workspace') if n[0] != '.')))"
)


async def test_a_notebooks_workspace_is_found_again_by_path_and_person(
    make_manager: MakeManager, user: str, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    """K5, B6: after the kernel; not under another path or name; a renamed one can be cloned."""

    async def files(notebook: str, code: str = "") -> Any:
        manager = make_manager(workspace="notebook")
        client = await start(manager, notebook)
        found = await evaluate(client, f"{code}\n{READ}")
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
        return found

    first, second, renamed = ("/srv/a/n.ipynb", "/srv/b/n.ipynb", "/srv/a/m.ipynb")
    assert await files(first, "open('/workspace/kept', 'w').close()") == ["kept"]
    assert await files(first) == ["kept"]
    assert await files(second) == []
    async with Engine(engines.unix_endpoint) as engine:
        mine = Workspaces(engine, user)
        await mine.clone(f"notebook:{first}", f"notebook:{renamed}")
        assert {info.workspace.key for info in await mine.list()} == {
            f"notebook:{path}" for path in (first, second, renamed)
        }
    assert await files(renamed) == ["kept"]
    other = f"{user}-too"
    monkeypatch.setenv("JUPYTERHUB_USER", other)
    try:
        assert await files(first) == []
    finally:
        remove_leftovers(engines, f"{labels.OWNER}={other}")


async def test_a_kernel_keeps_its_workspace_when_its_notebook_is_renamed(
    make_manager: MakeManager, user: str, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """K5, K3: at a restart, in the same sandbox or a new one; how to go on later is said."""
    manager = make_manager(workspace="notebook")
    client = await start(manager, "/srv/a/n.ipynb")
    await evaluate(client, "open('/workspace/kept', 'w').close()")
    # As a server does when a notebook is renamed.
    manager.update_env(env={"JPY_SESSION_NAME": "/srv/a/it's m.ipynb"})
    [container] = engines.api.containers(f"{labels.OWNER}={user}")
    await manager.restart_kernel(now=True)
    await client.wait_for_ready(timeout=60)
    assert await evaluate(client, READ) == ["kept"]
    told = "import json, os\nprint(json.dumps(os.environ['JPY_SESSION_NAME']))"
    assert await evaluate(client, told) == "it's m.ipynb"
    said = "clone notebook:/srv/a/n.ipynb 'notebook:/srv/a/it'\"'\"'s m.ipynb'"
    assert said in caplog.text
    engines.api.remove(container["Id"])
    await manager.restart_kernel(now=True)
    await client.wait_for_ready(timeout=60)
    [another] = engines.api.containers(f"{labels.OWNER}={user}")
    assert another["Id"] != container["Id"]
    assert await evaluate(client, READ) == ["kept"]
    client.stop_channels()


async def test_kernels_of_one_person_share_a_sandbox_and_end_one_by_one(
    make_manager: MakeManager, user: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K5, B7: `user` is one workspace for all notebooks, also for kernels with the same ports."""
    ports = kernel_ports(uuid.uuid4().hex)
    monkeypatch.setattr(provisioner, "kernel_ports", lambda _: ports)
    managers = [make_manager(workspace="user") for _ in range(2)]
    clients = [await start(one, f"/srv/{n}.ipynb") for n, one in enumerate(managers)]
    [container] = engines.api.containers(f"{labels.OWNER}={user}")
    await evaluate(clients[0], "open('/workspace/shared', 'w').write('x')\nx = 1")
    assert await evaluate(clients[1], READ) == ["shared"]
    assert await evaluate(clients[1], "print('x' in globals() and 1 or 0)") == 0
    clients[0].stop_channels()
    await managers[0].shutdown_kernel(now=True)
    assert await evaluate(clients[1], READ) == ["shared"]
    await managers[1].restart_kernel(now=True)
    await clients[1].wait_for_ready(timeout=60)
    assert await evaluate(clients[1], READ) == ["shared"]
    [still] = engines.api.containers(f"{labels.OWNER}={user}")
    assert still["Id"] == container["Id"]
    clients[1].stop_channels()


async def test_a_kernelspec_reaches_all_that_a_sandbox_can_have(
    make_manager: MakeManager, user: str, tmp_path: Path, config_folder: Path, engines: Engines,
    run_labels: dict[str, str],
) -> None:  # fmt: skip
    """K7, B3, B8, B10, B11, B16: from kernelspec and file, relative to the notebook's folder."""
    for name in ("start/first.csv", "code/lib.py", "shared/s"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    volume = f"data-{uuid.uuid4().hex}"
    async with Engine(engines.unix_endpoint) as engine:
        await engine.create_volume(volume, run_labels, {})
    file = config_folder / "jupyter_sandbox_config.json"
    file.write_text(json.dumps({"SandboxDefaults": {"data_sets": {"iris": volume}}}))
    policy = {"data_sets": [volume], "mounts": [{"path": str(tmp_path / "shared")}]}
    (config_folder / "jupyter_sandbox_policy.json").write_text(json.dumps(policy))
    manager = make_manager(
        workspace="all of it",
        network="internal",
        template="start",
        project="code",
        mounts={"shared": str(tmp_path / "shared")},
        lease_ttl=20,
        idle_ttl=500,
        max_lifetime=600,
        resumable=5,
        require_egress_firewall=True,
        isolation="container",
        runtime="runc",
        environment={"A": "1"},
    )
    try:
        client = await start(manager, str(tmp_path / "n.ipynb"), cwd=str(tmp_path))
        seen = await evaluate(
            client,
            "import json, os\n"
            "print(json.dumps([open('/workspace/first.csv').read(), open('/project/lib.py').read(),"
            " open('/mnt/shared/s').read(), os.listdir('/data/iris'), os.environ['A'],"
            " os.access('/mnt/shared', os.W_OK)]))",
        )
        assert seen == ["start/first.csv", "code/lib.py", "shared/s", [], "1", False]
        spec = manager.provisioner._session.sandbox.spec  # type: ignore[union-attr]
        assert (spec.network, spec.durability, spec.workspace) == (
            "internal",
            "persistent",
            "all of it",
        )
        assert (spec.lease_ttl, spec.idle_ttl, spec.max_lifetime, spec.resumable) == (
            *(20, 500, 600, 5),
        )
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
    finally:
        engines.api.remove_volume(volume)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("devices", ["gpus=all"], "built-in policy"),
        ("data_sets", {"x": "volume"}, "built-in policy"),
        ("mounts", {"x": "/srv"}, "built-in policy"),
        ("workspace", "", "needs a key"),
        ("workspace", "notebook", "JPY_SESSION_NAME"),
        ("durability", "persistent", "no such setting"),
        ("networks", "none", "network"),
        ("network", "pypi.org", "domains"),
    ],
)
async def test_what_a_kernelspec_cannot_have_is_refused_with_the_reason(
    setting: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K7, B3, B11, B15, B16: before anything is dialled."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(Endpoint("unix:///nonexistent"), **{setting: value})
    with pytest.raises(KernelLaunchError, match=said):
        await manager.start_kernel()


def test_every_field_of_a_sandbox_can_be_set_from_a_kernelspec() -> None:
    """K7: but for the caller's own labels, and the two that `workspace` stands for."""
    fields = set(SandboxSpec.__dataclass_fields__) - {"labels", "durability"}
    assert fields <= set(SETTINGS)
    assert current_owner()
