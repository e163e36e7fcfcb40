"""Each limit at each door: the same words, before anything is dialled or created (A1, K7)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel import EngineSettings, Sandbox, SandboxSpec, open_sandbox
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.kernel.launch_error import KernelLaunchError
from tests.kernel.conftest import sandbox_spec

PROGRAM = Path(sys.executable).with_name("jupyter-sandbox")
NOWHERE = "unix:///nonexistent/engine.sock"
"""An engine that gives another error when somebody dials it."""

LIMITS: list[tuple[dict[str, Any], str, Any]] = [
    ({"images": ["a:1"]}, "image", "b:1"),
    ({"allow_pull": False}, "pull_policy", "missing"),
    ({"caps": {"mem_limit": {"max": "1G"}}}, "mem_limit", 2 << 30),
    ({"caps": {"cpu_limit": {"max": 1}}}, "cpu_limit", 1.5),
    ({"caps": {"pids_limit": {"max": 100}}}, "pids_limit", 101),
    ({"caps": {"tmpfs_size": {"max": "1M"}}}, "tmpfs_size", 2 << 20),
    ({"caps": {"shm_size": {"max": "1M"}}}, "shm_size", 2 << 20),
    ({"caps": {"max_lifetime": {"max": 60}}}, "max_lifetime", 61.0),
    ({"caps": {"lease_ttl": {"max": 10}}}, "lease_ttl", 11.0),
    ({"caps": {"timeout": {"max": 10}}}, "max_timeout", 11.0),
    ({"network": "none"}, "network", "internal"),
    ({"runtimes": ["runc"]}, "runtime", "runsc"),
    ({"forbidden_environment": ["*TOKEN*"]}, "environment", {"MY_TOKEN": "hunter2"}),
    ({"engine_hosts": ["tcp://engine"]}, "host", NOWHERE),
    ({"allow_insecure_engine": False}, "allow_insecure_engine", True),
]
INSTALL = {
    "image": "--image=b:1",
    "mem_limit": f"--mem-limit={2 << 30}",
    "cpu_limit": "--cpu-limit=1.5",
    "pids_limit": "--pids-limit=101",
    "environment": "--env=MY_TOKEN=hunter2",
}

every_limit = pytest.mark.parametrize(
    ("content", "setting", "value"), LIMITS, ids=[setting for _, setting, _ in LIMITS]
)


@pytest.fixture
def policy_file(config_folder: Path) -> Path:
    return config_folder / "jupyter_sandbox_policy.json"


def write(path: Path, content: Any) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def kernel_manager(**config: Any) -> AsyncKernelManager:
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(Endpoint(NOWHERE), **config)
    return manager


def words(setting: str, value: Any) -> str:
    """Return the refusal as a caller in Python gets it."""
    spec, options = None, {"engine": NOWHERE, setting: value}
    if setting == "host":
        options = {"engine": value}
    elif setting == "allow_insecure_engine":
        options = {"engine": EngineSettings(host=NOWHERE, allow_insecure_engine=True)}
    elif setting not in {"pull_policy", "max_timeout"}:
        spec, options = SandboxSpec(**{setting: value}), {"engine": NOWHERE}
    with pytest.raises(SandboxSpecRejectedError) as caught:
        Sandbox.create(spec, **options)
    return str(caught.value)


@every_limit
async def test_kernel_and_python_refuse_with_the_same_words(
    policy_file: Path, content: dict[str, Any], setting: str, value: Any
) -> None:
    write(policy_file, content)
    said = words(setting, value)
    assert said.startswith(setting)
    assert str(policy_file) in said
    assert "hunter2" not in said
    manager = kernel_manager(**{setting: value})
    with pytest.raises(KernelLaunchError) as caught:
        await manager.start_kernel()
    if setting == "host":
        # What chose the engine is part of the words, and differs.
        said = said.partition(" (chosen by")[0]
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert not manager.has_kernel


@every_limit
async def test_a_configuration_beyond_the_policy_is_refused_at_every_door(
    policy_file: Path,
    config_folder: Path,
    content: dict[str, Any],
    setting: str,
    value: Any,
) -> None:
    write(policy_file, content)
    config = config_folder / "jupyter_sandbox_config.json"
    write(config, {"SandboxDefaults": {setting: value}})
    for make in (Sandbox.create, open_sandbox):
        with pytest.raises(SandboxSpecRejectedError) as caught:
            make()
        assert caught.value.setting == setting
        assert str(policy_file) in str(caught.value)
        assert "hunter2" not in str(caught.value)
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(Endpoint(NOWHERE))
    if setting != "host":
        with pytest.raises(KernelLaunchError, match=str(policy_file)):
            await manager.start_kernel()


@pytest.mark.parametrize("setting", sorted(INSTALL))
def test_a_kernel_that_would_be_refused_is_not_installed(policy_file: Path, setting: str) -> None:
    [(content, value)] = [(content, value) for content, name, value in LIMITS if name == setting]
    write(policy_file, content)
    prefix = policy_file.parent / "prefix"
    done = call("install", f"--prefix={prefix}", f"--engine={NOWHERE}", INSTALL[setting])
    assert done.returncode == 1
    said = words(setting, value)
    if setting == "mem_limit":
        # The option's text is shown as it was typed.
        said = said.partition(": ")[2]
    assert said in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    assert not prefix.exists()


def test_a_variable_that_a_kernelspec_takes_from_the_server_is_judged_too(
    policy_file: Path,
) -> None:
    """A1, B12: by the names of `env` and of `env_keep`."""
    write(policy_file, {"forbidden_environment": ["*TOKEN*"]})
    manager = kernel_manager(env_keep=["MY_TOKEN"])
    with pytest.raises(KernelLaunchError, match=r"env_keep.*MY_TOKEN"):
        asyncio.run(manager.start_kernel())
    manager = kernel_manager()
    manager._kernel_spec.env = {"MY_TOKEN": "${HOME}"}
    with pytest.raises(KernelLaunchError, match=r"environment.*MY_TOKEN"):
        asyncio.run(manager.start_kernel())


async def test_a_command_without_end_is_refused_where_timeouts_are_limited(
    policy_file: Path, busybox_image: str, engine_unix: Endpoint
) -> None:
    """C4: and one that does not say gets what is allowed."""
    write(policy_file, {"caps": {"timeout": {"max": 30}}})
    spec = SandboxSpec(image=busybox_image)
    async with Sandbox.create(spec, engine=engine_unix.url) as sandbox:
        assert (await sandbox.run(["true"])).returncode == 0
        for timeout in (None, 31):
            with pytest.raises(SandboxSpecRejectedError, match="timeout"):
                await sandbox.run(["true"], timeout=timeout)
        with pytest.raises(SandboxSpecRejectedError, match=str(policy_file)):
            await sandbox.run(["true"], timeout=None)


async def test_what_is_left_out_is_kept_within_the_policy(
    policy_file: Path, busybox_image: str, engine_unix: Endpoint
) -> None:
    """A1, B5: on the engine itself."""
    write(policy_file, {"caps": {"mem_limit": {"max": "512M"}, "pids_limit": {"max": 99}}})
    async with Sandbox.create(SandboxSpec(image=busybox_image), engine=engine_unix.url) as sandbox:
        assert (sandbox.limits.memory, sandbox.limits.pids) == (512 << 20, 99)


@pytest.mark.parametrize("broken", ['{"imagess": []}', "{"])
async def test_a_broken_policy_starts_nothing_at_any_door(policy_file: Path, broken: str) -> None:
    """A1: fails closed."""
    write(policy_file, broken)
    with pytest.raises(SandboxSpecRejectedError, match=str(policy_file)):
        Sandbox.create(engine=NOWHERE)
    with pytest.raises(KernelLaunchError, match=str(policy_file)):
        await kernel_manager().start_kernel()
    for command in ("install", "status", "build", "config show"):
        done = call(*command.split())
        assert done.returncode == 1
        assert str(policy_file) in done.stdout + done.stderr, command
        assert "Traceback" not in done.stderr
