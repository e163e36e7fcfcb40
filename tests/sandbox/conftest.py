"""Fixtures of the sandbox's tests: images that differ in what they have, and live sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel import EngineSettings, Sandbox
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.live import CODE_USER, LiveSandbox
from sandbox_kernel.sandbox.opening import Opening
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import Engines, leftovers, remove_leftovers, wait_until

INSIDE = Path(__file__).parent / "inside"
LOCK = Path(tempfile.gettempdir()) / f"sandbox-kernel-test-{os.getuid()}.lock"
MakeSandbox = Callable[..., Awaitable[LiveSandbox]]
Create = Callable[..., Opening[Sandbox]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program in a sandbox did."""

    code: int | None
    out: str
    err: str


async def run(
    sandbox: LiveSandbox,
    argv: Iterable[str],
    *,
    user: str = CODE_USER,
    stdin: bytes | None = None,
    **options: Any,
) -> Outcome:
    """Run a program in a sandbox to its end."""
    output = {1: b"", 2: b""}
    stream = await sandbox.exec(list(argv), user=user, stdin=stdin is not None, **options)
    async with stream:
        if stdin is not None:
            await stream.write(stdin)
            await stream.end_input()
        while (chunk := await stream.read()) is not None:
            output[chunk.stream] += chunk.data
    state = await sandbox.engine.inspect_exec(stream.id)
    return Outcome(state.exit_code, output[1].decode(), output[2].decode())


async def sh(sandbox: LiveSandbox, text: str, *args: str, **options: Any) -> Outcome:
    """Run shell text in a sandbox, as the code's uid unless said otherwise."""
    return await run(sandbox, ["sh", "-c", text, "sh", *args], **options)


async def python(sandbox: LiveSandbox, program: str, *args: str) -> Outcome:
    """Run a program of `inside/` in a sandbox."""
    stdin = (INSIDE / program).read_bytes()
    place = f"/home/sbx/{program}"
    copied = await sh(sandbox, 'cat > "$1"', place, stdin=stdin)
    assert copied.code == 0, copied
    return await run(sandbox, ["python3", place, *args])


@pytest.fixture(scope="session")
def python_image(engines: Engines) -> str:
    """The image that kernels run in: Debian with Python, dash and bash."""
    ref = os.environ.get("SANDBOX_TEST_IMAGE", DEFAULT_IMAGE)
    if engines.api.image(ref) is None:
        pytest.fail(
            f"The test engine lacks the image {ref}. Build it there, or name another one with "
            "SANDBOX_TEST_IMAGE",
            pytrace=False,
        )
    return ref


@pytest.fixture(scope="session")
def derived_image(engines: Engines, python_image: str) -> Callable[[str, str], str]:
    """Build an image from the Python image and a few lines of a Dockerfile, once."""

    def derive(name: str, lines: str) -> str:
        ref = f"sandbox-kernel-test/{name}:latest"
        dockerfile = f"FROM {python_image}\nUSER root\n{lines}\n".encode()
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as tar:
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(dockerfile)
            tar.addfile(entry, io.BytesIO(dockerfile))
        with LOCK.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            answer = engines.api.request(
                "POST",
                "/build",
                {"t": ref, "q": "1", "rm": "1", "forcerm": "1"},
                context.getvalue(),
                "application/x-tar",
            )
        assert b'"error' not in answer, answer
        return ref

    return derive


@pytest.fixture(scope="session")
def imported_image(engines: Engines) -> Callable[[str, bytes, list[str]], str]:
    """Import an image from an archive with Dockerfile lines, once for all workers and runs."""

    def provide(name: str, archive: bytes, changes: list[str]) -> str:
        digest = hashlib.sha256(archive + "\n".join(changes).encode()).hexdigest()[:12]
        ref = f"sandbox-kernel-test/{name}:{digest}"
        with LOCK.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if engines.api.image(ref) is None:
                engines.api.import_image(archive, ref, changes)
        return ref

    return provide


@pytest.fixture(scope="session")
def dash_image(derived_image: Callable[[str, str], str]) -> str:
    """An image whose only shell is dash."""
    return derived_image("dash", "RUN rm -f /bin/bash /usr/bin/bash")


@pytest.fixture
async def make_sandbox(
    engine: Engine, python_image: str, run_labels: dict[str, str]
) -> AsyncIterator[MakeSandbox]:
    """Make sandboxes that are destroyed at the end of the test."""
    made: list[LiveSandbox] = []

    async def make(**settings: Any) -> LiveSandbox:
        spec = SandboxSpec(**{"image": python_image, **settings})
        sandbox = await LiveSandbox.create(
            engine, spec, owner="tester", extra_labels=marks(run_labels)
        )
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        await sandbox.destroy()


def marks(run_labels: dict[str, str]) -> dict[str, str]:
    """Return the labels that mark the test run, without those that every sandbox has."""
    return {name: text for name, text in run_labels.items() if name.endswith("test-run")}


@pytest.fixture
def workspace(engines: Engines) -> Iterator[str]:
    """The key of a workspace that nobody else uses; its volume is removed at the end."""
    key = f"test {uuid.uuid4().hex} ☢/notebook.ipynb"
    yield key
    label = f"{labels.WORKSPACE}={labels.key_text(key)}"
    for container in engines.api.containers(label):
        engines.api.remove(container["Id"])
    for volume in engines.api.volumes(label):
        engines.api.remove_volume(volume["Name"])


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process that holds a sandbox until somebody kills it."""

    process: asyncio.subprocess.Process
    id: str
    volume: str

    async def gone(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


StartOwner = Callable[..., Awaitable[Owner]]


@pytest.fixture
async def start_owner(engine: Engine, run_labels: dict[str, str]) -> AsyncIterator[StartOwner]:
    """Start processes that hold sandboxes; ``connect`` names one that runs already."""
    started: list[asyncio.subprocess.Process] = []

    async def start(
        connect: str = "", take_over: bool = False, pause: float = 0, **spec: Any
    ) -> Owner:
        tls = engine.endpoint.tls
        paths = tls and {k: str(v) for k, v in dataclasses.asdict(tls).items()}
        order = {
            "url": engine.endpoint.url,
            "tls": paths,
            "spec": spec,
            "connect": connect,
            "take_over": take_over,
            "pause": pause,
            "marks": marks(run_labels),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.sandbox.owner",
            json.dumps(order),
            stdout=asyncio.subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        return Owner(process, *json.loads(line))

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
async def sandbox(make_sandbox: MakeSandbox) -> LiveSandbox:
    """A sandbox as it is by default."""
    return await make_sandbox()


@pytest.fixture
def settings(endpoint: Endpoint) -> EngineSettings:
    """The engine as a caller of the public API names it, by each way in turn."""
    if endpoint.tls is None:
        return EngineSettings(host=endpoint.url)
    tls = endpoint.tls
    return EngineSettings(endpoint.url, tls.cert, tls.key, tls.ca)


@pytest.fixture
def owner(engines: Engines) -> Iterator[str]:
    """The owner of a test's sandboxes, of which nothing may be left at its end."""
    name = f"tester-{uuid.uuid4().hex}"
    yield name
    mark = f"{labels.OWNER}={name}"
    try:
        wait_until(lambda: not leftovers(engines, mark), 20, "the end of all sandboxes")
    finally:
        remove_leftovers(engines, mark)


@pytest.fixture
def create(settings: EngineSettings, owner: str, python_image: str) -> Create:
    """`Sandbox.create` for a test: with its engine, its image and its owner."""

    def make(**options: Any) -> Opening[Sandbox]:
        spec = SandboxSpec(**{"image": python_image, **options.pop("spec", {})})
        return Sandbox.create(spec, **{"engine": settings, "owner": owner, **options})

    return make
