"""Images on a real engine: presence, import, build, pull, removal."""

from __future__ import annotations

import asyncio
import io
import tarfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import (
    DEFAULT_IMAGE,
    Progress,
    PullPolicy,
    _context_archive,
    _failure,
    build_image,
    ensure_image,
    image_present,
    import_image,
    remove_image,
)
from sandbox_kernel.errors import (
    SandboxBuildError,
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxImageMissingError,
    SandboxUnavailableError,
)
from tests.engine.conftest import MakeContainer
from tests.engines import Engines, FaultProxy, busybox_archive, wait_until


@pytest.fixture
async def tag(engines: Engines) -> AsyncIterator[str]:
    """A name for an image of this test's own."""
    name = f"sandbox-kernel-test/made:{uuid.uuid4().hex[:12]}"
    yield name
    engines.api.remove_image(name)


async def test_an_image_is_found_or_not(engine: Engine, busybox_image: str) -> None:
    """E5: with its own, untrusted, configuration."""
    found = await image_present(engine, busybox_image)
    assert found is not None
    assert found.tags == (busybox_image,)
    assert found.os == "linux"
    assert found.size > 1_000_000
    assert found.config["Env"] == ["PATH=/bin"]
    assert await image_present(engine, "sandbox-kernel-test/nothing:1") is None


@pytest.mark.parametrize("policy", ["missing", "never"])
async def test_an_image_that_is_there_is_not_pulled(
    engine: Engine, busybox_image: str, policy: str
) -> None:
    """E5: this name exists on no registry."""
    found = await ensure_image(engine, busybox_image, policy)  # type: ignore[arg-type]
    assert found.tags == (busybox_image,)


async def test_never_means_never(engine_unix: object, engines: Engines) -> None:
    """E5: and the error says whose decision it was."""
    async with Engine(engines.unix_endpoint) as engine:
        with pytest.raises(SandboxImageMissingError, match="policy is 'never'"):
            await ensure_image(engine, "sandbox-kernel-test/nothing:1", "never")


@pytest.mark.parametrize("policy", ["missing", "never", "always"])
async def test_the_default_image_is_never_pulled(engines: Engines, policy: str) -> None:
    """E5: nobody here owns that name on a registry, so it can only be built."""
    news: list[Progress] = []
    async with Engine(engines.unix_endpoint) as engine:
        name = DEFAULT_IMAGE
        if await image_present(engine, name) is None:
            with pytest.raises(SandboxImageMissingError, match="jupyter sandbox build"):
                await ensure_image(engine, name, policy, news.append)  # type: ignore[arg-type]
        else:
            await ensure_image(engine, name, policy, news.append)  # type: ignore[arg-type]
    assert news == []


@pytest.mark.parametrize("policy", ["missing", "always", "never"])
async def test_an_image_of_our_names_is_never_pulled(engine: Engine, policy: PullPolicy) -> None:
    """E5: nobody owns these names in a registry."""
    news: list[Progress] = []
    for name in ("sandbox-kernel/none:1", "docker.io/sandbox-kernel/none"):
        with pytest.raises(SandboxImageMissingError, match="jupyter sandbox build --tag"):
            await ensure_image(engine, name, policy, news.append)
    assert news == []


async def test_a_pull_that_fails_says_why_without_a_password(engine: Engine) -> None:
    """E5: a registry that cannot be reached; no credentials or paths in the text."""
    ref = "127.0.0.1:9/team/image:1"
    with pytest.raises(SandboxImageMissingError, match="pulling it failed") as caught:
        await ensure_image(engine, ref)
    assert "docker pull" in str(caught.value)


async def test_an_archive_becomes_an_image(engine: Engine, tag: str, tmp_path: Path) -> None:
    """E6: the base of a site without a registry."""
    news: list[Progress] = []
    path = tmp_path / "root.tar"
    path.write_bytes(busybox_archive())
    made = await import_image(
        engine, path, tag=tag, changes=['CMD ["/bin/true"]', "ENV A=1"], progress=news.append
    )
    assert made.config["Cmd"] == ["/bin/true"]
    assert "A=1" in made.config["Env"]
    assert news
    with pytest.raises(SandboxBuildError, match="Importing"):
        await import_image(engine, b"not an archive" * 1000, tag=tag)


async def test_a_build_shows_its_steps_and_gives_the_image(
    engine: Engine, busybox_image: str, tag: str, tmp_path: Path
) -> None:
    """E6: arguments, target, labels, files from a folder and from memory, progress."""
    (tmp_path / "Dockerfile").write_text(
        f"FROM {busybox_image} AS small\nARG WORD\nCOPY a.txt ca.pem /\n"
        'RUN echo "$WORD" > /word; cat /ca.pem\nFROM small AS full\nRUN exit 1\n'
    )
    (tmp_path / "a.txt").write_text("A")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/x.pyc").write_text("")
    news: list[Progress] = []
    made = await build_image(
        engine, tmp_path, tag=tag, target="small", build_args={"WORD": "hello"},
        labels={"io.sandbox-kernel.x": "1"}, extra_files={"ca.pem": b"BUNDLE\n"},
        network="none", no_cache=True, progress=news.append,
    )  # fmt: skip
    assert made.tags == (tag,)
    assert made.config["Labels"]["io.sandbox-kernel.x"] == "1"
    assert any("BUNDLE" in item.text for item in news)
    # The labels are a step of their own.
    assert {(n.current, n.total) for n in news if n.text.startswith("Step 4")} == {(4, 5)}


async def test_a_build_that_fails_ends_with_its_last_lines(
    engine: Engine, busybox_image: str, tag: str
) -> None:
    """E6: what a person needs is at the end of the error; passwords in it are hidden."""
    dockerfile = (
        f"FROM {busybox_image}\n"
        "RUN for i in $(seq 50); do echo line $i; done; "
        "echo from https://me:hunter2@index.example/simple; exit 7\n"
    )
    with pytest.raises(SandboxBuildError) as caught:
        await build_image(
            engine, None, tag=tag, extra_files={"Dockerfile": dockerfile.encode()}, network="none"
        )
    text = str(caught.value)
    assert "line 50" in text
    assert "line 1\n" not in text
    assert "returned a non-zero code: 7" in text
    assert "hunter2" not in text
    assert "***@index.example" in text


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"Dockerfile": b"NONSENSE\n"}, "unknown instruction"),
        ({}, "Dockerfile"),
        ({"Dockerfile": b"FROM scratch\nCOPY nothing /\n"}, "nothing"),
    ],
)
async def test_a_build_that_cannot_begin_is_a_build_error(
    engines: Engines, tag: str, files: dict[str, bytes], text: str
) -> None:
    """E6, SEC-05: told by the engine, without paths of its machine."""
    async with Engine(engines.unix_endpoint) as engine:
        with pytest.raises(SandboxBuildError, match=text) as caught:
            await build_image(engine, None, tag=tag, extra_files=files)
    assert "/var/lib" not in str(caught.value)
    assert "docker-builder" not in str(caught.value)


async def test_a_cancelled_build_stops_on_the_engine(
    engine: Engine, engines: Engines, busybox_image: str, tag: str
) -> None:
    """E6: closing the connection ends the step that runs."""
    marker = uuid.uuid4().hex
    dockerfile = f"FROM {busybox_image}\nRUN echo {marker}; sleep 300\n".encode()
    running = asyncio.Event()

    def hear(news: Progress) -> None:
        if news.text.strip() == marker:
            running.set()

    task = asyncio.create_task(
        build_image(
            engine, None, tag=tag, extra_files={"Dockerfile": dockerfile}, network="none",
            progress=hear,
        )
    )  # fmt: skip
    async with asyncio.timeout(20):
        await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    def steps() -> bool:
        return not any(marker in c["Command"] for c in engines.api.containers())

    await asyncio.to_thread(wait_until, steps, 15, "the build's container to be gone")
    assert engines.api.image(tag) is None


async def test_a_display_that_breaks_does_not_break_the_build(
    engine: Engine, busybox_image: str, tag: str
) -> None:
    """E6: progress is only shown."""

    def broken(news: Progress) -> None:
        raise ValueError(news)

    files = {"Dockerfile": f"FROM {busybox_image}\nENV X=1\n".encode()}
    await build_image(engine, None, tag=tag, extra_files=files, progress=broken)


async def test_a_line_cut_during_a_build_is_not_a_failed_build(
    proxy: FaultProxy, busybox_image: str, tag: str
) -> None:
    """E4, E6: "lost" and "failed" have different remedies."""
    files = {"Dockerfile": f"FROM {busybox_image}\nRUN echo {tag}; sleep 30\n".encode()}

    def cut(news: Progress) -> None:
        if news.text.strip() == tag:
            proxy.cut()

    async with Engine(proxy.endpoint) as engine:
        with pytest.raises(SandboxUnavailableError) as caught:
            await build_image(
                engine, None, tag=tag, extra_files=files, network="none", progress=cut
            )
    assert caught.value.kind == "lost"


async def test_removal_is_quiet_when_gone_and_refused_when_in_use(
    engine: Engine, engines: Engines, make_container: MakeContainer, tag: str
) -> None:
    """E5: an image that a container runs is not taken away."""
    await import_image(engine, busybox_archive({"etc/x": tag.encode()}), tag=tag)
    user = await make_container(Image=tag, Cmd=["/bin/cat"])
    with pytest.raises(SandboxConflictError):
        await remove_image(engine, tag)
    engines.api.remove(user)
    await remove_image(engine, tag)
    assert await image_present(engine, tag) is None
    await remove_image(engine, tag)


def test_a_full_disk_in_the_middle_of_a_stream_has_its_own_class() -> None:
    """E5, SEC-05: not a failed build or pull, and without the engine's paths."""
    text = "write /var/lib/docker/tmp/x: no space left on device"
    error = _failure({"error": text, "errorDetail": {"message": text}})
    assert type(error) is SandboxDiskFullError
    assert "/var/lib" not in str(error)


def test_a_context_is_packed_the_same_everywhere(tmp_path: Path) -> None:
    """E6: owners, times and the umask of who builds do not change the layers."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/run").write_text("x")
    (tmp_path / "d/run").chmod(0o700)
    (tmp_path / "f").write_text("y")
    (tmp_path / "f").chmod(0o640)
    (tmp_path / "replaced").write_text("old")
    packed = _context_archive(tmp_path, {"replaced": b"new"}).read()
    (tmp_path / "f").chmod(0o644)
    assert _context_archive(tmp_path, {"replaced": b"new"}).read() == packed
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        modes = {entry.name: entry.mode for entry in tar}
        opened = tar.extractfile("replaced")
        assert opened is not None
        assert opened.read() == b"new"
    assert modes == {"d": 0o755, "d/run": 0o755, "f": 0o644, "replaced": 0o644}
