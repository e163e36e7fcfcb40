"""Images: are they there, pull them, build them, import them, with progress (E5, E6).

A pull or a build that is cancelled closes its connection, which makes the engine stop. The
default image of this project is never pulled: nobody here owns that name on a registry.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import tarfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

import aiohttp
from aiodocker import DockerError
from yarl import URL

from sandbox_kernel.engine.client import CONNECT_TIMEOUT, Engine
from sandbox_kernel.engine.credentials import registry_auth
from sandbox_kernel.engine.faults import (
    DEFAULT_IMAGE,
    R_IMAGE,
    Subject,
    how_to_get,
    image_missing,
    is_disk_full,
    is_ours,
    without_engine_paths,
)
from sandbox_kernel.engine.streams import lines
from sandbox_kernel.errors import (
    SandboxBuildError,
    SandboxDiskFullError,
    SandboxEngineError,
    SandboxSpecRejectedError,
)

__all__ = [
    "DEFAULT_IMAGE",
    "R_IMAGE",
    "ImageInfo",
    "Progress",
    "ProgressCallback",
    "PullPolicy",
    "build_image",
    "ensure_image",
    "how_to_get",
    "image_present",
    "import_image",
    "is_ours",
    "pull_image",
    "remove_image",
]

log = logging.getLogger(__name__)

PullPolicy = Literal["missing", "never", "always"]

PULL_SILENCE: Final = 300.0
"""Seconds without any progress after which a pull is given up."""

BUILD_SILENCE: Final = 1800.0
"""The same for a build, one step of which may compile in silence."""

_LAST_LINES = 20
_CHUNK = 256 * 1024
_NO_NAME = re.compile(r"(?:^|/)(?:[./]|$)")
_STEP = re.compile(r"^Step (\d+)/(\d+) : (.*)", re.DOTALL)
_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")


@dataclass(frozen=True, slots=True)
class Progress:
    """One piece of news from a pull, a build or an import.

    Parameters
    ----------
    phase
        ``pull``, ``build`` or ``import``.
    id
        What it is about, for example a layer; empty for the whole.
    current, total
        Bytes of a layer, or the number of a build step; `None` when not known.
    text
        One line or more for people.
    """

    phase: Literal["pull", "build", "import"]
    id: str = ""
    current: int | None = None
    total: int | None = None
    text: str = ""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """An image that is on the engine.

    `config` is the image's own configuration as the engine gives it (``Env``, ``Labels``,
    ``Volumes``, …). Whoever made the image wrote it: it is not to be trusted.
    """

    id: str
    tags: tuple[str, ...]
    digests: tuple[str, ...]
    size: int
    os: str
    architecture: str
    config: Mapping[str, Any]


async def image_present(engine: Engine, ref: str) -> ImageInfo | None:
    """Return the image if the engine has it."""
    async with engine.call("inspect the image", Subject("image", ref)) as docker:
        try:
            data = await docker._query_json(f"images/{_in_address(ref)}/json")
        except DockerError as error:
            if error.status == 404:
                return None
            raise
        return ImageInfo(
            id=str(data["Id"]),
            tags=tuple(data.get("RepoTags") or ()),
            digests=tuple(data.get("RepoDigests") or ()),
            size=int(data.get("Size") or 0),
            os=str(data.get("Os") or ""),
            architecture=str(data.get("Architecture") or ""),
            config=data.get("Config") or {},
        )


async def ensure_image(
    engine: Engine,
    ref: str,
    policy: PullPolicy = "missing",
    progress: ProgressCallback | None = None,
) -> ImageInfo:
    """Make sure that an image is on the engine.

    Parameters
    ----------
    engine
        The engine.
    ref
        Name with tag or digest.
    policy
        ``missing`` pulls what is not there, ``never`` does not pull, ``always`` pulls in any
        case so that the newest one is used.
    progress
        Called with each piece of news.

    Raises
    ------
    SandboxImageMissingError
        It is not there and may not or cannot be pulled.
    """
    present = None if policy == "always" else await image_present(engine, ref)
    if present is not None:
        return present
    ours = is_ours(ref)
    if policy == "never" or ours:
        # Even with `always` an image that was built here is the newest one.
        present = await image_present(engine, ref)
        if present is None:
            raise image_missing(ref, "the pull policy is 'never'" if not ours else "")
        return present
    await pull_image(engine, ref, progress)
    present = await image_present(engine, ref)
    if present is None:
        raise image_missing(ref, "the pull did not bring it")
    return present


async def pull_image(engine: Engine, ref: str, progress: ProgressCallback | None = None) -> None:
    """Pull an image, with the credentials of the docker configuration.

    Raises
    ------
    SandboxImageMissingError
        The registry does not have it, refuses it, or cannot be reached.
    """
    params = {"fromImage": ref}
    if "@" not in ref and ":" not in ref.rpartition("/")[2]:
        params["tag"] = "latest"  # without one the engine pulls every tag there is
    headers = {}
    auth = await registry_auth(ref)
    if auth is not None:
        headers["X-Registry-Auth"] = auth

    def hear(message: dict[str, Any]) -> None:
        current, total = _progress_of(message)
        text = _clean(str(message.get("status") or ""))
        _tell(progress, Progress("pull", str(message.get("id") or ""), current, total, text))

    try:
        await _converse(
            engine,
            "pull the image",
            "images/create",
            params,
            headers,
            silence=PULL_SILENCE,
            hear=hear,
        )
    except _Failed as failure:
        why = str(failure).rstrip(". \n")
        raise image_missing(ref, f"pulling it failed: {why}") from failure


async def build_image(
    engine: Engine,
    context: Path | None,
    *,
    tag: str,
    dockerfile: str = "Dockerfile",
    target: str | None = None,
    build_args: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    network: str | None = None,
    pull: bool = False,
    no_cache: bool = False,
    progress: ProgressCallback | None = None,
) -> ImageInfo:
    """Build an image through the engine's API.

    Parameters
    ----------
    engine
        The engine.
    context
        Folder to send, or `None` for `extra_files` alone.
    tag
        Name of the result.
    dockerfile
        Path of the Dockerfile within the context.
    target
        Stage to build, the last one by default.
    build_args
        Values for the Dockerfile's ``ARG``; never shown.
    labels
        Labels to put on the image.
    extra_files
        Files to add to the context, or to replace in it, for example a CA bundle.
    network
        Network of the build's commands, for example ``host``; the engine's default otherwise.
    pull
        Whether to look for a newer base image.
    no_cache
        Whether to run every step again.
    progress
        Called with each piece of the build's output.

    Raises
    ------
    SandboxBuildError
        A step failed; the text ends with the last lines of the output.
    """
    params: dict[str, str] = {"t": tag, "dockerfile": dockerfile, "rm": "1", "forcerm": "1"}
    if target:
        params["target"] = target
    if build_args:
        params["buildargs"] = json.dumps(dict(build_args))
    if labels:
        params["labels"] = json.dumps(dict(labels))
    if network:
        params["networkmode"] = network
    if pull:
        params["pull"] = "1"
    if no_cache:
        params["nocache"] = "1"

    output: deque[str] = deque(maxlen=_LAST_LINES)
    position: list[int | None] = [None, None]

    def hear(message: dict[str, Any]) -> None:
        text = message.get("stream")
        if isinstance(text, str):
            text = _clean(text)
            if step := _STEP.match(text):
                position[:] = [int(step[1]), int(step[2])]
            output.extend(line for line in text.splitlines() if line.strip())
            if text.strip():
                _tell(progress, Progress("build", "", position[0], position[1], text))
        elif message.get("status"):  # the base image being pulled
            current, total = _progress_of(message)
            text = _clean(str(message["status"]))
            _tell(progress, Progress("pull", str(message.get("id") or ""), current, total, text))

    archive = await asyncio.to_thread(_context_archive, context, extra_files or {})
    try:
        await _converse(
            engine,
            "build the image",
            "build",
            params,
            {"Content-Type": "application/x-tar"},
            silence=BUILD_SILENCE,
            hear=hear,
            body=archive,
        )
    except _Failed as failure:
        raise _build_failed(tag, str(failure), output) from failure
    finally:
        archive.close()
    built = await image_present(engine, tag)
    if built is None:
        raise _build_failed(tag, "the engine ended the build without an image", output)
    return built


def _build_failed(tag: str, why: str, output: deque[str]) -> SandboxBuildError:
    tail = "".join(f"\n  {line}" for line in output)
    end = f". The last lines of its output:{tail}" if tail else ""
    return SandboxBuildError(f"Building {tag} failed: {why.strip().rstrip('.')}{end}")


async def import_image(
    engine: Engine,
    archive: Path | bytes,
    *,
    tag: str,
    changes: Sequence[str] = (),
    progress: ProgressCallback | None = None,
) -> ImageInfo:
    """Make an image of a root filesystem.

    Parameters
    ----------
    engine
        The engine.
    archive
        A tar archive, compressed or not.
    tag
        Name of the image.
    changes
        Dockerfile instructions for its configuration, as in ``CMD ["/bin/sh"]``.
    progress
        Called with what the engine says.
    """
    repo, colon, version = tag.rpartition(":")
    if not colon or "/" in version:
        repo, version = tag, "latest"
    params = [("fromSrc", "-"), ("repo", repo), ("tag", version)]
    params += [("changes", change) for change in changes]

    def hear(message: dict[str, Any]) -> None:
        _tell(progress, Progress("import", text=str(message.get("status") or "")))

    opened: IO[bytes]
    if isinstance(archive, bytes):
        opened = io.BytesIO(archive)
    else:
        opened = await asyncio.to_thread(archive.open, "rb")
    try:
        await _converse(
            engine,
            "import the image",
            "images/create",
            params,
            {"Content-Type": "application/x-tar"},
            silence=PULL_SILENCE,
            hear=hear,
            body=opened,
        )
    except _Failed as failure:
        raise SandboxBuildError(f"Importing {tag} failed: {failure}") from failure
    finally:
        opened.close()
    imported = await image_present(engine, tag)
    if imported is None:
        raise SandboxBuildError(f"Importing {tag} brought no image")
    return imported


async def remove_image(engine: Engine, ref: str, *, force: bool = False) -> None:
    """Remove an image, or its name when it has others, if it is there.

    Raises
    ------
    SandboxConflictError
        A container uses it.
    """
    async with engine.call("remove the image", Subject("image", ref), timeout=120.0) as docker:
        try:
            await docker._query_json(
                f"images/{_in_address(ref)}", "DELETE", params={"force": int(force)}
            )
        except DockerError as error:
            if error.status != 404:
                raise


def _in_address(ref: str) -> str:
    """Return a name that can stand in an address as it is, where ``..`` would lead elsewhere."""
    if not ref or _NO_NAME.search(ref):
        raise SandboxSpecRejectedError(
            "image", ref[:80], "this is not the name of an image", "Name an image."
        )
    return ref


# -- one conversation: a request that is answered by a stream of JSON lines --------------------


class _Failed(Exception):
    """The engine says that it could not do it: at once, or in the middle of the stream."""

    def __init__(self, text: str) -> None:
        # Paths that a Dockerfile names are worth reading, those of the engine are not.
        super().__init__(_clean(without_engine_paths(text)))


async def _converse(
    engine: Engine,
    doing: str,
    path: str,
    params: Mapping[str, str] | Sequence[tuple[str, str]],
    headers: Mapping[str, str],
    *,
    silence: float,
    hear: Callable[[dict[str, Any]], None],
    body: IO[bytes] | None = None,
) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with (
            engine.call(doing, unbounded=True) as docker,
            asyncio.timeout(silence) as patience,
        ):

            def alive() -> None:
                patience.reschedule(loop.time() + silence)

            # In the URL, since `changes` may be there more than once.
            response = await docker._do_query(
                URL(path).with_query(params),
                "POST",
                headers=headers,
                data=None if body is None else _pieces(body, alive),
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT),
            )
            try:
                async for line in lines(response):
                    alive()
                    message = json.loads(line)
                    if "error" in message or "errorDetail" in message:
                        raise _failure(message)
                    hear(message)
            finally:
                response.close()
    except SandboxEngineError as error:
        # An answer without a class of its own; a full disk and a timeout have one.
        if type(error) is SandboxEngineError and isinstance(error.__cause__, DockerError):
            raise _Failed(error.__cause__.message) from error.__cause__
        raise


def _failure(message: dict[str, Any]) -> Exception:
    detail = message.get("errorDetail")
    text = detail.get("message") if isinstance(detail, dict) else None
    text = str(text or message.get("error") or "no reason given")
    if is_disk_full(text):
        return SandboxDiskFullError(
            f"The engine's disk is full: {_clean(without_engine_paths(text))}"
        )
    return _Failed(text)


async def _pieces(body: IO[bytes], alive: Callable[[], None]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(body.read, _CHUNK):
        yield piece
        alive()


def _tell(progress: ProgressCallback | None, news: Progress) -> None:
    if progress is None:
        return
    try:
        progress(news)
    except Exception:
        # A display that broke must not break what it displays.
        log.exception("showing progress failed")


def _progress_of(message: dict[str, Any]) -> tuple[int | None, int | None]:
    detail = message.get("progressDetail")
    if not isinstance(detail, dict):
        return None, None
    return detail.get("current"), detail.get("total")


def _clean(text: str) -> str:
    """Take passwords out of URLs, as of a package index behind a login."""
    return _PASSWORD.sub("***@", text)


def _context_archive(context: Path | None, extra_files: Mapping[str, bytes]) -> IO[bytes]:
    """Pack a build context; the same files give the same bytes on every machine."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if context is not None:
            for path in sorted(context.rglob("*")):
                name = path.relative_to(context).as_posix()
                if "__pycache__" in path.parts or name in extra_files:
                    continue
                tar.add(path, name, recursive=False, filter=_plain)
        for name in sorted(extra_files):
            entry = tarfile.TarInfo(name)
            entry.size = len(extra_files[name])
            entry.mode = 0o644
            tar.addfile(entry, io.BytesIO(extra_files[name]))
    archive.seek(0)
    return archive


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (entry.isreg() or entry.isdir() or entry.issym()):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry
