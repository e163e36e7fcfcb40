"""The life of a sandbox: made, ended, and nothing left, whatever happens in between."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
import time
from collections.abc import Callable
from typing import Any

import pytest

from sandbox_kernel.engine.client import CreatedContainer, Engine
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxEngineTimeoutError,
    SandboxError,
    SandboxGoneError,
    SandboxImageMissingError,
    SandboxSpecRejectedError,
    SandboxUnavailableError,
)
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import Engines, FaultProxy
from tests.sandbox.conftest import MakeSandbox, StartOwner, marks, sh

CASE = "io.sandbox-kernel.test-case"
FORK_BOMB = (
    "import os, signal\n"
    "for s in (1, 2, 3, 15): signal.signal(s, signal.SIG_IGN)\n"
    "os.write(1, b'x')\n"
    "while True:\n"
    "    try: os.fork()\n"
    "    except OSError: pass\n"
)


def left(engines: Engines, case: str) -> list[str]:
    found = engines.api.containers(f"{CASE}={case}")
    volumes = engines.api.volumes(f"{CASE}={case}")
    return [c["Id"] for c in found] + [v["Name"] for v in volumes]


async def until_gone(engines: Engines, sandbox_id: str, volume: str, within: float) -> float:
    """Wait until container and volume are gone; return how long that took."""
    began = time.monotonic()
    names = {volume}
    while time.monotonic() - began < within:
        there = engines.api.inspect(sandbox_id) is not None
        if not there and not names & {v["Name"] for v in engines.api.volumes(labels.VERSION)}:
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    raise AssertionError(f"still there after {within:g} s")


# -- making -------------------------------------------------------------------------------------


async def test_a_sandbox_is_found_by_its_labels(
    make_sandbox: MakeSandbox, engines: Engines
) -> None:
    """B9, decision 8."""
    sandbox = await make_sandbox(labels={"course": "physics ☢", "n": ""})
    told = (await sandbox.engine.inspect_container(sandbox.id))["Config"]["Labels"]
    assert told[labels.OWNER] == "tester"
    assert told[labels.DURABILITY] == "ephemeral"
    assert labels.caller_labels(told) == {"course": "physics ☢", "n": ""}
    volumes = engines.api.volumes(labels.VERSION, f"{labels.OWNER}=tester")
    assert sandbox.volume in {volume["Name"] for volume in volumes}
    assert sandbox.name.startswith("sbx-")


async def test_a_missing_image_names_the_command_that_builds_it(engine: Engine) -> None:
    with pytest.raises(SandboxImageMissingError, match="jupyter sandbox build"):
        await LiveSandbox.create(
            engine, SandboxSpec(image="sandbox-kernel-test/none:none"), owner="tester"
        )


async def test_more_than_the_machine_has_is_refused_and_nothing_created(
    engine: Engine, busybox_image: str, engines: Engines
) -> None:
    """B5."""
    with pytest.raises(SandboxSpecRejectedError, match="cpu_limit"):
        await LiveSandbox.create(
            engine,
            SandboxSpec(image=busybox_image, cpu_limit=4096),
            owner="tester",
            extra_labels={CASE: "too-big"},
        )
    assert left(engines, "too-big") == []


async def test_an_image_without_a_shell_gives_one_clear_error(
    engine: Engine,
    engines: Engines,
    imported_image: Callable[[str, bytes, list[str]], str],
    run_labels: dict[str, str],
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("empty")
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    ref = imported_image("empty", archive.getvalue(), [])
    with pytest.raises(SandboxError, match="sh") as caught:
        await LiveSandbox.create(
            engine,
            SandboxSpec(image=ref),
            owner="tester",
            extra_labels={**marks(run_labels), CASE: "no-shell"},
        )
    assert "overlay2" not in str(caught.value)
    assert left(engines, "no-shell") == []


async def test_a_name_that_is_taken_is_not_fought_over(
    engine: Engine, make_sandbox: MakeSandbox, run_labels: dict[str, str], busybox_image: str
) -> None:
    first = await make_sandbox(image=busybox_image)
    taken = first.name.removeprefix("sbx-")
    spec = SandboxSpec(image=busybox_image)
    options: dict[str, Any] = {"owner": "tester", "extra_labels": marks(run_labels)}
    with pytest.raises(SandboxConflictError):
        await LiveSandbox.create(engine, spec, token=lambda: taken, **options)
    assert not first.ended.done()
    tokens = iter([taken, f"{taken}-2"])
    second = await LiveSandbox.create(engine, spec, token=lambda: next(tokens), **options)
    await second.destroy()
    assert second.name == f"{first.name}-2"
    assert (await sh(first, "echo alive")).out == "alive\n"


class Countdown:
    """Cancels a task at the nth time that an engine call is about to begin or has just ended."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.task: asyncio.Task[Any] | None = None

    def step(self) -> None:
        self.n -= 1
        if self.n == 0 and self.task is not None:
            self.task.cancel()


STEPS = (*("info", "create_container", "inspect_container", "attach_container", "start_container"),)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Countdown]:
    def prepare(n: int) -> Countdown:
        countdown = Countdown(n)
        for name in STEPS:
            original = getattr(Engine, name)

            async def wrapped(
                self: Engine, *args: Any, _original: Any = original, **options: Any
            ) -> Any:
                countdown.step()
                result = await _original(self, *args, **options)
                countdown.step()
                return result

            monkeypatch.setattr(Engine, name, wrapped)
        return countdown

    return prepare


@pytest.mark.parametrize("n", range(1, 2 * len(STEPS) + 1))
async def test_a_creation_that_is_cancelled_at_any_call_leaves_nothing(
    engine: Engine,
    engines: Engines,
    busybox_image: str,
    run_labels: dict[str, str],
    interrupt: Callable[[int], Countdown],
    n: int,
) -> None:
    """K8."""
    case = f"cancel-{n}-{engine.endpoint.tls is not None}"
    countdown = interrupt(n)
    task = asyncio.ensure_future(
        LiveSandbox.create(
            engine,
            SandboxSpec(image=busybox_image),
            owner="tester",
            extra_labels={**marks(run_labels), CASE: case},
        )
    )
    countdown.task = task
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(engines, case) == []


@pytest.mark.parametrize("share", range(8))
async def test_a_creation_that_is_cancelled_at_any_time_leaves_nothing(
    engine: Engine, engines: Engines, busybox_image: str, run_labels: dict[str, str], share: int
) -> None:
    """K8: also when it is cancelled again while it clears up."""
    case = f"time-{share}-{engine.endpoint.tls is not None}"
    task = asyncio.ensure_future(
        LiveSandbox.create(
            engine,
            SandboxSpec(image=busybox_image),
            owner="tester",
            extra_labels={**marks(run_labels), CASE: case},
        )
    )
    await asyncio.sleep(0.04 * share)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.01)
    if task.cancelled():
        assert left(engines, case) == []
    else:
        await task.result().destroy()
    assert left(engines, case) == []


async def test_a_container_whose_creation_was_not_answered_is_removed(
    engine: Engine,
    engines: Engines,
    busybox_image: str,
    run_labels: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K8: the engine made it, and the answer did not come in time."""
    create = Engine.create_container

    async def unanswered(self: Engine, name: str | None, body: Any) -> CreatedContainer:
        await create(self, name, body)
        raise SandboxEngineTimeoutError("the engine did not answer")

    monkeypatch.setattr(Engine, "create_container", unanswered)
    case = f"unanswered-{engine.endpoint.tls is not None}"
    with pytest.raises(SandboxEngineTimeoutError):
        await LiveSandbox.create(
            engine,
            SandboxSpec(image=busybox_image),
            owner="tester",
            extra_labels={**marks(run_labels), CASE: case},
        )
    assert left(engines, case) == []


@pytest.mark.parametrize("call", STEPS)
async def test_a_failure_at_any_call_leaves_nothing_and_tells_the_cause(
    engine: Engine,
    engines: Engines,
    busybox_image: str,
    run_labels: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """K8."""

    async def fail(*_: Any, **__: Any) -> None:
        raise SandboxUnavailableError("lost", f"{call} failed")

    monkeypatch.setattr(Engine, call, fail)
    case = f"fail-{call}-{engine.endpoint.tls is not None}"
    with pytest.raises(SandboxUnavailableError, match=f"{call} failed"):
        await LiveSandbox.create(
            engine,
            SandboxSpec(image=busybox_image),
            owner="tester",
            extra_labels={**marks(run_labels), CASE: case},
        )
    assert left(engines, case) == []


# -- the end ------------------------------------------------------------------------------------


async def test_destroy_is_quick_complete_and_may_be_called_by_many(
    make_sandbox: MakeSandbox, engines: Engines
) -> None:
    sandbox = await make_sandbox()
    began = time.monotonic()
    await asyncio.gather(*(sandbox.destroy() for _ in range(5)))
    assert time.monotonic() - began < 10
    assert engines.api.inspect(sandbox.id) is None
    assert sandbox.volume not in {v["Name"] for v in engines.api.volumes()}
    await sandbox.destroy()
    assert (await sandbox.ended).kind == "removed"
    with pytest.raises(SandboxGoneError, match="removed by its owner"):
        await sandbox.exec(["true"], user=CODE_USER)


async def test_destroy_goes_on_when_its_caller_is_cancelled(
    make_sandbox: MakeSandbox, engines: Engines
) -> None:
    sandbox = await make_sandbox()
    task = asyncio.ensure_future(sandbox.destroy())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sandbox.destroy()
    assert engines.api.inspect(sandbox.id) is None


async def test_no_task_of_a_destroyed_sandbox_is_left(make_sandbox: MakeSandbox) -> None:
    before = asyncio.all_tasks()
    sandbox = await make_sandbox()
    await sandbox.destroy()
    names = {task.get_name() for task in asyncio.all_tasks() - before}
    assert names <= {"engine-events"}


async def end_of(sandbox: LiveSandbox, within: float = 5.0) -> Any:
    return await asyncio.wait_for(asyncio.shield(sandbox.ended), within)


async def stays(sandbox: LiveSandbox, seconds: float) -> None:
    """Watch that a sandbox does not end; when it does, the reason is in the failure."""
    done, _ = await asyncio.wait({sandbox.ended}, timeout=seconds)
    assert [ended.result() for ended in done] == []


async def test_a_removal_by_others_is_noticed_within_a_second(
    make_sandbox: MakeSandbox, engines: Engines
) -> None:
    """K4."""
    sandbox = await make_sandbox()
    await asyncio.to_thread(engines.api.remove, sandbox.id)
    assert (await end_of(sandbox, 1)).kind == "removed"


async def test_a_kill_by_others_is_noticed_within_a_second(
    make_sandbox: MakeSandbox, engines: Engines
) -> None:
    """K4."""
    sandbox = await make_sandbox()
    began = time.monotonic()
    await asyncio.to_thread(engines.api.request, "POST", f"/containers/{sandbox.id}/kill")
    reason = await end_of(sandbox)
    assert time.monotonic() - began < 1.5
    assert (reason.kind, reason.exit_code) == ("removed", 137)


async def test_the_lifetime_ends_a_sandbox_and_says_so(
    make_sandbox: MakeSandbox, engines: Engines, shell_image: str
) -> None:
    """B8, decision 7."""
    sandbox = await make_sandbox(image=shell_image, max_lifetime=2)
    reason = await end_of(sandbox, 6)
    assert (reason.kind, reason.exit_code) == ("lifetime", 4)
    assert "lifetime of 2 s" in reason.text
    await until_gone(engines, sandbox.id, sandbox.volume, 5)


@pytest.fixture(params=["python", "busybox", "dash"])
def shell_image(request: pytest.FixtureRequest) -> str:
    """Images whose `sh` is dash beside bash, busybox ash, and dash alone."""
    return str(request.getfixturevalue(f"{request.param}_image"))


async def test_renewals_keep_a_sandbox_beyond_its_ttl(
    make_sandbox: MakeSandbox, shell_image: str
) -> None:
    """Decision 7."""
    sandbox = await make_sandbox(image=shell_image, lease_ttl=2)
    await stays(sandbox, 5)
    assert (await sh(sandbox, "echo alive")).out == "alive\n"


async def test_a_paused_sandbox_keeps_its_lease(
    make_sandbox: MakeSandbox, engine: Engine, shell_image: str
) -> None:
    sandbox = await make_sandbox(image=shell_image, lease_ttl=3)
    await engine.pause_container(sandbox.id)
    await asyncio.sleep(5)
    await engine.unpause_container(sandbox.id)
    await stays(sandbox, 4)


async def test_a_line_that_is_cut_ends_the_sandbox_and_says_so(
    engines: Engines, busybox_image: str, run_labels: dict[str, str], tmp_path: Any
) -> None:
    """K4, decision 7."""
    proxy = FaultProxy(engines, tmp_path / "p.sock")
    await proxy.start()
    try:
        async with Engine(proxy.endpoint) as engine:
            sandbox = await LiveSandbox.create(
                engine,
                SandboxSpec(image=busybox_image),
                owner="tester",
                extra_labels=marks(run_labels),
            )
            await proxy.stop()
            assert (await end_of(sandbox, 3)).kind == "engine-lost"
            await until_gone(engines, sandbox.id, sandbox.volume, 5)
            with pytest.raises(SandboxUnavailableError):
                await sandbox.destroy()
    finally:
        await proxy.stop()


# -- owners that go away ------------------------------------------------------------------------


async def test_nothing_outlives_an_owner_that_was_killed(
    start_owner: StartOwner, engines: Engines, shell_image: str, record_property: Any
) -> None:
    """B13, decision 7: no reaper is needed."""
    owner = await start_owner(image=shell_image)
    assert engines.api.inspect(owner.id) is not None
    owner.process.kill()
    took = await until_gone(engines, owner.id, owner.volume, 5)
    record_property("seconds", took)
    print(f"gone {took:.2f} s after kill -9")


async def test_nothing_outlives_an_owner_that_went_silent(
    start_owner: StartOwner, engines: Engines, shell_image: str
) -> None:
    """B13, decision 7: a stopped owner keeps its connection open and renews no more."""
    owner = await start_owner(image=shell_image, lease_ttl=3)
    os.kill(owner.process.pid, signal.SIGSTOP)
    try:
        assert engines.api.inspect(owner.id) is not None
        await until_gone(engines, owner.id, owner.volume, 8)
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)


async def test_a_fork_bomb_does_not_keep_a_sandbox_whose_owner_went_silent(
    start_owner: StartOwner, engines: Engines, engine: Engine, dash_image: str, python_image: str
) -> None:
    """RES-01, decision 7: the code's uid cannot block the lease, whatever the shell."""
    for image in (python_image, dash_image):
        owner = await start_owner(image=image, lease_ttl=3, pids_limit=64)
        argv = ["python3", "-c", FORK_BOMB]
        async with await engine.exec(owner.id, argv, user=CODE_USER, stdin=False) as stream:
            await stream.read()
            os.kill(owner.process.pid, signal.SIGSTOP)
            try:
                await until_gone(engines, owner.id, owner.volume, 15)
            finally:
                os.kill(owner.process.pid, signal.SIGCONT)


# -- stopping the code --------------------------------------------------------------------------


async def test_killing_reaches_every_process_of_the_code_and_spares_the_sandbox(
    sandbox: LiveSandbox,
) -> None:
    """EXW-04, decision 4."""
    await sh(
        sandbox,
        "setsid sleep 7001 >/dev/null 2>&1 & setsid sh -c 'sleep 7002 &' >/dev/null 2>&1;"
        "(nohup env -i sleep 7003 >/dev/null 2>&1 &)",
    )
    assert (await sh(sandbox, "pgrep -c -x sleep || ps | grep -c '[s]leep 700'")).out.strip() == "3"
    began = time.monotonic()
    assert await sandbox.kill_user_processes() == "processes"
    assert time.monotonic() - began < 5
    assert (await sh(sandbox, "pgrep -x sleep")).out == ""
    assert not sandbox.ended.done()


async def test_a_fork_bomb_is_stopped_within_five_seconds(
    make_sandbox: MakeSandbox, engines: Engines
) -> None:
    """RES-01, RES-02: from inside if an exec can start, else with the whole sandbox."""
    sandbox = await make_sandbox(pids_limit=96)
    argv = ["python3", "-c", FORK_BOMB]
    async with await sandbox.exec(argv, user=CODE_USER, stdin=False) as stream:
        await stream.read()
        began = time.monotonic()
        outcome = await sandbox.kill_user_processes()
        assert time.monotonic() - began <= 5
    print(f"fork bomb: {outcome} after {time.monotonic() - began:.2f} s")
    if outcome == "processes":
        assert (await sh(sandbox, "echo alive")).out == "alive\n"
    else:
        assert (await end_of(sandbox)).kind == "removed"
    began = time.monotonic()
    await sandbox.destroy()
    assert time.monotonic() - began <= 10
    assert engines.api.inspect(sandbox.id) is None


async def test_destroy_is_bounded_also_under_a_fork_bomb(make_sandbox: MakeSandbox) -> None:
    """Security goal 5."""
    sandbox = await make_sandbox(pids_limit=96)
    argv = ["python3", "-c", FORK_BOMB]
    async with await sandbox.exec(argv, user=CODE_USER, stdin=False) as stream:
        await stream.read()
        began = time.monotonic()
        await sandbox.destroy()
    assert time.monotonic() - began <= 10


async def test_memory_that_runs_out_is_reported_before_the_process_that_it_cost(
    make_sandbox: MakeSandbox,
) -> None:
    """RES-04, K4: the sandbox itself lives on."""
    sandbox = await make_sandbox(mem_limit=128 * 1024 * 1024)
    done = await sh(sandbox, "python3 -c 'x = bytearray(1 << 30)'; echo $?")
    assert done.out == "137\n"
    assert sandbox.out_of_memory_events > 0
    assert not sandbox.ended.done()
    assert (await sh(sandbox, "echo alive")).out == "alive\n"


async def test_nothing_runs_as_another_user(sandbox: LiveSandbox) -> None:
    for user in ("root", "0:0", "", "10001"):
        with pytest.raises(ValueError, match="nothing runs as"):
            await sandbox.exec(["true"], user=user)
