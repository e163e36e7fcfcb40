"""Random life cycles of sandboxes and workspaces against a model (issue "Must hold"; B6-B9, B13).

A model says what has to be true after each step: which sandbox a key has, whether it is paused,
what is in its workspace, and who holds it. Nothing may be left at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxFileNotFoundError,
    SandboxGoneError,
    SandboxPausedError,
)
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.found import list_sandboxes
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.pause import thaw
from sandbox_kernel.sandbox.reap import reap
from sandbox_kernel.sandbox.spec import SandboxSpec
from sandbox_kernel.sandbox.workspaces import Workspaces
from tests.engines import Engines
from tests.sandbox.conftest import marks, sh

TTL = 3
KEYS = ("a", "ä/b")
ACTIONS = (
    *("create", "create", "connect", "run", "run", "pause", "resume", "touch", "close", "destroy"),
    *("caller", "kill caller", "remove", "reap"),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.sampled_from(KEYS)), min_size=4, max_size=14
)


@dataclass
class Model:
    """What has to be true of one key.

    `holds` says that the caller, a process of its own, holds the sandbox; `ghosts` that one was
    killed and may still count as a holder.
    """

    exists: bool = False
    content: list[str] = field(default_factory=list)
    id: str | None = None
    paused: bool = False
    handles: list[LiveSandbox] = field(default_factory=list)
    caller: asyncio.subprocess.Process | None = None
    holds: bool = False
    ghosts: bool = False

    def over(self) -> None:
        """The sandbox has ended."""
        self.id, self.paused, self.holds, self.ghosts = None, False, False, False
        self.handles.clear()

    def came(self, container_id: str) -> None:
        """Somebody holds the sandbox, who resumed it if it was paused."""
        if self.id is not None:
            assert container_id == self.id
        self.id, self.exists, self.paused = container_id, True, False


class World:
    """One owner's sandboxes on the real engine, beside the model of them."""

    def __init__(self, engines: Engines, engine: Engine, image: str, run: dict[str, str]) -> None:
        self.owner = f"owner-{uuid.uuid4().hex}"
        self.engines, self.engine, self.image, self.run_labels = engines, engine, image, run
        self.models = {key: Model() for key in KEYS}
        self.workspaces = Workspaces(engine, self.owner, image=image, extra_labels=run)

    def spec(self, key: str) -> SandboxSpec:
        return SandboxSpec(
            image=self.image, durability="persistent", workspace=key, lease_ttl=TTL, pids_limit=64
        )

    async def step(self, action: str, key: str) -> None:
        model = self.models[key]
        await getattr(self, action.replace(" ", "_"))(key, model)
        await self.check(key, model)

    async def check(self, key: str, model: Model) -> None:
        infos = [i for i in await list_sandboxes(self.engine, self.owner) if i.workspace == key]
        state = "paused" if model.paused else "running"
        wanted = [] if model.id is None else [(model.id, state)]
        assert [(info.id, info.state) for info in infos] == wanted
        known = {info.workspace.key for info in await self.workspaces.list()}
        assert (key in known) == model.exists
        for handle in model.handles:
            assert not handle.ended.done()

    async def gone(self, model: Model) -> None:
        """Wait for a sandbox that nobody holds any more to end by itself."""
        for _ in range(200):
            if model.id is None or self.engines.api.inspect(model.id) is None:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("a sandbox outlived its holders")
        model.over()

    # -- what can happen ------------------------------------------------------------------------

    async def create(self, key: str, model: Model) -> None:
        sandbox = await LiveSandbox.create(
            self.engine, self.spec(key), owner=self.owner, extra_labels=self.run_labels
        )
        model.came(sandbox.id)
        model.handles.append(sandbox)

    async def connect(self, key: str, model: Model) -> None:
        try:
            sandbox = await LiveSandbox.connect(self.engine, key, owner=self.owner)
        except SandboxGoneError:
            assert model.id is None
            return
        assert model.id is not None
        model.came(sandbox.id)
        model.handles.append(sandbox)

    async def run(self, key: str, model: Model) -> None:
        if not model.handles:
            return
        token = uuid.uuid4().hex
        text = 'echo "$1" >> /workspace/log; cat /workspace/log'
        done = await sh(model.handles[-1], text, token)
        model.content.append(token)
        model.paused = False
        assert done.out.split() == model.content

    async def pause(self, key: str, model: Model) -> None:
        if model.handles:
            await model.handles[0].pause()
            model.paused = True

    async def resume(self, key: str, model: Model) -> None:
        if model.handles:
            await model.handles[-1].resume()
            model.paused = False

    async def touch(self, key: str, model: Model) -> None:
        if not model.handles:
            return
        # The news of a pause by another handle takes a moment.
        for _ in range(100):
            if all(handle.paused == model.paused for handle in model.handles):
                break
            await asyncio.sleep(0.05)
        if model.paused:
            with pytest.raises(SandboxPausedError):
                await model.handles[-1].touch()
        else:
            await model.handles[-1].touch()

    async def close(self, key: str, model: Model) -> None:
        if not model.handles:
            return
        handle = model.handles.pop()
        await handle.close()
        if model.handles or model.holds:
            return
        if model.paused and model.ghosts:
            # One that is dead counts as a holder until its ttl is over, and a paused sandbox does
            # not tick: until somebody resumes it, or its time is over and it is reaped.
            await thaw(self.engine, handle.id, handle.spec.prefix)
        await self.gone(model)

    async def destroy(self, key: str, model: Model) -> None:
        if not model.handles:
            return
        others = model.handles[:-1]
        await model.handles[-1].destroy()
        for other in others:
            reason = await asyncio.wait_for(asyncio.shield(other.ended), 10)
            assert reason.kind == "removed"
            await other.close()
        model.over()

    async def caller(self, key: str, model: Model) -> None:
        if model.caller is not None:
            return
        endpoint = self.engine.endpoint
        paths = endpoint.tls and {k: str(v) for k, v in dataclasses.asdict(endpoint.tls).items()}
        plain = {f: getattr(self.spec(key), f) for f in ("image", "durability", "workspace",
                                                         "lease_ttl", "pids_limit")}  # fmt: skip
        order: dict[str, Any] = {
            "url": endpoint.url,
            "tls": paths,
            "spec": plain,
            "connect": "",
            "take_over": False,
            "pause": 0,
            "owner": self.owner,
            "marks": self.run_labels,
        }
        model.caller = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.sandbox.owner",
            json.dumps(order),
            stdout=asyncio.subprocess.PIPE,
        )
        assert model.caller.stdout is not None
        line = await asyncio.wait_for(model.caller.stdout.readline(), 60)
        model.came(json.loads(line)[0])
        model.holds = True

    async def kill_caller(self, key: str, model: Model) -> None:
        if model.caller is None:
            return
        caller, model.caller = model.caller, None
        caller.kill()
        await caller.wait()
        if not model.holds:
            return
        model.holds, model.ghosts = False, True
        if not model.handles:
            if model.paused:
                assert model.id is not None
                await thaw(self.engine, model.id, self.spec(key).prefix)
            await self.gone(model)

    async def remove(self, key: str, model: Model) -> None:
        if model.id is not None:
            with pytest.raises(SandboxConflictError, match=self.owner):
                await self.workspaces.remove(key)
        elif not model.exists:
            with pytest.raises(SandboxFileNotFoundError):
                await self.workspaces.remove(key)
        else:
            await self.workspaces.remove(key)
            model.exists, model.content = False, []

    async def reap(self, key: str, model: Model) -> None:
        assert await reap(self.engine, self.owner) == []

    # -- the end --------------------------------------------------------------------------------

    async def wind_up(self) -> None:
        """End everything in the ordinary ways; nothing may be left then."""
        for key, model in self.models.items():
            await self.kill_caller(key, model)
            while model.handles:
                await self.close(key, model)
            await self.check(key, model)
            await self.remove(key, model)
        assert self.left() == []

    def left(self) -> list[str]:
        label = f"{labels.OWNER}={self.owner}"
        found = [str(c["Id"]) for c in self.engines.api.containers(label)]
        return found + [str(v["Name"]) for v in self.engines.api.volumes(label)]

    async def clear(self) -> None:
        for model in self.models.values():
            if model.caller is not None:
                with contextlib.suppress(ProcessLookupError):
                    model.caller.kill()
                await model.caller.wait()
            for handle in model.handles:
                await handle.destroy()
        label = f"{labels.OWNER}={self.owner}"
        for container in self.engines.api.containers(label):
            self.engines.api.remove(container["Id"])
        for volume in self.engines.api.volumes(label):
            self.engines.api.remove_volume(volume["Name"])


async def live(
    engines: Engines, endpoint: Endpoint, image: str, run: dict[str, str], steps: list[Any]
) -> None:
    async with Engine(endpoint) as engine:
        world = World(engines, engine, image, run)
        done: list[str] = []
        try:
            for action, key in steps:
                done.append(f"{action} {key}")
                await world.step(action, key)
            await world.wind_up()
        except Exception as error:
            error.add_note(f"after: {', '.join(done)}")
            raise
        finally:
            await world.clear()


def lives(
    engines: Engines, image: str, run_labels: dict[str, str], number: int, together: int
) -> None:
    """Go through so many lives, some at a time, each an owner's, by both ways to the engine."""
    run = marks(run_labels)
    endpoints = (engines.unix_endpoint, engines.tls_endpoint)
    lived = 0

    @settings(
        max_examples=number // together,
        deadline=None,
        database=None,
        # Each try takes seconds, and a shorter history is rarely a clearer one.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.tuples(STEPS, st.sampled_from(endpoints)), min_size=together,
                    max_size=together))  # fmt: skip
    def go(batch: list[tuple[list[Any], Endpoint]]) -> None:
        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for steps, endpoint in batch:
                    group.create_task(live(engines, endpoint, image, run, steps))

        nonlocal lived
        asyncio.run(all_of_them())
        lived += together

    go()
    # The strategy may come to its end early; these steps have far more than so many sequences.
    assert lived == number


@pytest.mark.timeout(900)
def test_a_few_random_lives_end_as_the_model_says(
    engines: Engines, busybox_image: str, run_labels: dict[str, str]
) -> None:
    """B6, B7, B8, B9, B13."""
    lives(engines, busybox_image, run_labels, 6, 3)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_500_random_lives_end_as_the_model_says(
    engines: Engines, busybox_image: str, run_labels: dict[str, str]
) -> None:
    """B6, B7, B8, B9, B13: 0 leftovers, 0 wrong states."""
    lives(engines, busybox_image, run_labels, 500, 4)
