"""Settings of a kernel: kernelspec, Jupyter's configuration, our files, variables (K7, B12)."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager
from traitlets.config import Config

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.kernel.launch_error import KernelLaunchError
from tests.kernel.conftest import MakeManager, connect, evaluate, sandbox_spec

NOWHERE = Endpoint("unix:///nonexistent/engine.sock")


def manager_of(config: Config | None = None, **settings: Any) -> AsyncKernelManager:
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex, config=config or Config())
    manager._kernel_spec = sandbox_spec(NOWHERE, **settings)
    return manager


async def refusal(manager: AsyncKernelManager) -> str:
    with pytest.raises(KernelLaunchError) as caught:
        await manager.start_kernel()
    assert not manager.has_kernel
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("mem_limt", "mem_limit"), ("imagee", "image"), ("zzz", "Known are: image")],
)
async def test_an_unknown_setting_in_a_kernelspec_is_refused(name: str, hint: str) -> None:
    """K7: Jupyter only warns, and a mistyped limit would silently be none."""
    said = await refusal(manager_of(**{name: "hunter2"}))
    assert f"kernel_provisioner.config.{name}" in said
    assert hint in said
    assert "hunter2" not in said


async def test_an_unknown_entry_beside_the_settings_is_refused() -> None:
    """K7: with `confg` for `config` every limit would be lost."""
    manager = manager_of()
    assert manager._kernel_spec is not None
    stanza = manager._kernel_spec.metadata["kernel_provisioner"]
    stanza["confg"] = stanza.pop("config")
    assert "kernel_provisioner.confg" in await refusal(manager)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mem_limit", [1]), ("cpu_limit", "2"), ("pids_limit", 1.5), ("environment", "hunter2"),
        ("environment", {"A": ["hunter2"]}), ("env_keep", 5), ("image", None), ("image", {}),
    ],
)  # fmt: skip
async def test_a_value_of_the_wrong_kind_in_a_kernelspec_is_refused(name: str, value: Any) -> None:
    """K7, B12: as a launch error that the person sees; `null` leaves the setting out."""
    said = await refusal(manager_of(**{name: value}))
    assert "hunter2" not in said
    if value is not None:
        assert said.startswith(name)
        assert "in the kernelspec" in said


@pytest.mark.parametrize("section", ["SandboxProvisioner", "SandboxDefaults"])
async def test_what_jupyters_own_configuration_has_wrong_is_refused(section: str) -> None:
    """K7: traitlets would warn in a log that nobody reads."""
    config = Config({section: {"mem_limt": "2G"}})
    assert f"{section}.mem_limt" in await refusal(manager_of(config))
    config = Config({section: {"cpu_limit": "many"}})
    assert "cpu_limit" in await refusal(manager_of(config))
    config = Config({section: {"environment": "hunter2"}})
    assert "hunter2" not in await refusal(manager_of(config))


async def test_jupyters_configuration_counts_above_our_files_and_below_the_kernelspec(
    config_folder: Path,
) -> None:
    """K7: seen in which value the policy refuses."""
    file = config_folder / "jupyter_sandbox_config.json"
    _write(file, {"SandboxDefaults": {"pids_limit": 101}})
    _write(config_folder / "jupyter_sandbox_policy.json", {"caps": {"pids_limit": {"max": 100}}})
    assert "pids_limit = 101" in await refusal(manager_of())
    config = Config({"SandboxDefaults": {"pids_limit": 102}})
    assert "pids_limit = 102" in await refusal(manager_of(config))
    config = Config(
        {"SandboxDefaults": {"pids_limit": 102}, "SandboxProvisioner": {"pids_limit": 103}}
    )
    assert "pids_limit = 103" in await refusal(manager_of(config))
    assert "pids_limit = 104" in await refusal(manager_of(config, pids_limit=104))
    # Within the policy it comes as far as the engine, which is not there.
    assert "/nonexistent/engine.sock" in await refusal(manager_of(config, pids_limit=99))


async def test_a_broken_file_is_told_at_the_start_and_repaired_for_the_next(
    config_folder: Path,
) -> None:
    """K7, K8: the same manager starts when the file has been corrected."""
    file = config_folder / "jupyter_sandbox_config.py"
    _write(file, "c.SandboxDefaults.pids_limit = nope")
    manager = manager_of()
    assert str(file) in await refusal(manager)
    _write(file, "c.SandboxDefaults.pids_limit = 99")
    assert "/nonexistent/engine.sock" in await refusal(manager)


async def test_a_kernel_gets_what_every_layer_says(
    make_manager: MakeManager, config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K7, B12: limits from file and policy, variables from all, nothing else of the server's."""
    _write(
        config_folder / "jupyter_sandbox_config.json",
        {
            "SandboxDefaults": {"environment": {"A": "file", "B": "file"}, "env_keep": ["KEPT"]},
            "SandboxProvisioner": {"mem_limit": "700M"},
        },
    )
    _write(config_folder / "jupyter_sandbox_policy.json", {"caps": {"cpu_limit": {"max": 1}}})
    monkeypatch.setenv("SANDBOX_DOCKER_PIDS_LIMIT", "99")
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("NOT_KEPT", "no")
    manager = make_manager(environment={"B": "spec"})
    await manager.start_kernel()
    client = await connect(manager)
    seen = await evaluate(
        client,
        "import json, os\n"
        "print(json.dumps({n: os.environ.get(n) for n in ('A', 'B', 'KEPT', 'NOT_KEPT')}))",
    )
    assert seen == {"A": "file", "B": "spec", "KEPT": "kept", "NOT_KEPT": None}
    limits = manager.provisioner._session.sandbox.limits  # type: ignore[union-attr]
    assert (limits.memory, limits.nano_cpus, limits.pids) == (700 << 20, 10**9, 99)
    client.stop_channels()


async def test_a_kernel_that_runs_is_not_lost_when_the_policy_closes(
    make_manager: MakeManager, config_folder: Path
) -> None:
    """A1, K3: a restart is refused, and works again when the policy allows it."""
    policy = config_folder / "jupyter_sandbox_policy.json"
    manager = make_manager(pids_limit=200)
    await manager.start_kernel()
    client = await connect(manager)
    _write(policy, {"caps": {"pids_limit": {"max": 100}}})
    with pytest.raises(KernelLaunchError, match="pids_limit = 200"):
        await manager.restart_kernel(now=True)
    policy.unlink()
    await manager.start_kernel()
    await client.wait_for_ready(timeout=60)
    assert await evaluate(client, "print(42)") == 42
    client.stop_channels()


def _write(path: Path, content: Any) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
