"""The Docker engine's API, as far as sandboxes need it: bounded calls, translated errors.

`Engine` adds to aiodocker only what that lacks (features E1, E2, E4): a bound on every call,
one exception tree, streams that end properly, events that survive a lost connection, and a
version of the API that both sides know. All of it runs in one event loop, in production that
of `sandbox_kernel.engine.thread.EngineThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.execs import Exec

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.events import EVENT_LABEL, Event, EventHub, parse_event
from sandbox_kernel.engine.faults import (
    CONNECTION_TROUBLE,
    ENGINE,
    RAISED_BY_CALLS,
    Subject,
    describe,
    remedy,
    translate,
    unavailable,
)
from sandbox_kernel.engine.streams import ByteStream, Chunk, ExecStream, connect, keep_alive, lines
from sandbox_kernel.engine.tls import client_context
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxError,
    SandboxGoneError,
    SandboxUnavailableError,
)

__all__ = ["ByteStream", "Chunk", "CreatedContainer", "Engine", "ExecState", "ExecStream"]

log = logging.getLogger(__name__)

CALL_TIMEOUT: Final = 30.0
CONNECT_TIMEOUT: Final = 5.0
COMMIT_TIMEOUT: Final = 300.0
DISK_USAGE_TIMEOUT: Final = 120.0

OLDEST_API: Final = (1, 41)
"""Docker 20.10 and Podman 4: the oldest that has everything a sandbox asks for."""

NEWEST_API: Final = (1, 51)
"""The newest one that was tried; a newer engine is spoken to in this one."""

_REMOVAL_POLL = 0.1
_TRIES_FOR_AN_ALERT = 4


@dataclass(frozen=True, slots=True)
class CreatedContainer:
    """The engine's answer to a creation; any warning means that something was not honoured."""

    id: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecState:
    """What the engine knows of an exec.

    `exit_code` is `None` while it runs, and also before it does: a stream is handed out some
    70 ms before the process is started, and until then it neither runs nor has a code.
    `pid`, a pid of the engine's machine, is 0 in that time and, on Podman, after the end.
    """

    running: bool
    exit_code: int | None
    pid: int


class Engine:
    """One Docker engine.

    Parameters
    ----------
    endpoint
        Where it is and how to reach it.
    timeout
        Bound of one call, in seconds.
    """

    def __init__(self, endpoint: Endpoint, *, timeout: float = CALL_TIMEOUT) -> None:
        self.endpoint = endpoint
        self.api_version = ""
        self._timeout = timeout
        self._docker: Docker | None = None
        self._events: EventHub | None = None

    # -- life ---------------------------------------------------------------------------------

    async def open(self, timeout: float = CONNECT_TIMEOUT) -> Self:
        """Connect, make sure that a Docker engine answers, and agree on the API version.

        Raises
        ------
        SandboxUnavailableError
            With the cause told apart.
        """
        if self._docker is not None:
            return self
        docker = self._make_client()
        try:
            await self._negotiate(docker, timeout)
        except BaseException:
            await _close(docker)
            raise
        self._docker = docker
        self._events = EventHub(self._open_events)
        return self

    async def close(self) -> None:
        """End the events and every connection. Idempotent."""
        docker, self._docker = self._docker, None
        if self._events is not None:
            await self._events.close()
        if docker is not None:
            await _close(docker)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def events(self) -> EventHub:
        """The engine's events, as one shared stream."""
        if self._events is None:
            raise RuntimeError("the engine has not been opened")
        return self._events

    def _make_client(self) -> Docker:
        # The connector is made here because aiodocker's own has room for 100 connections only,
        # so that the 101st stream would wait for ever; a session of aiohttp's default kind
        # reads no proxy settings and no .netrc. With a connector of one's own, aiodocker
        # needs a URL of its own too.
        connector: aiohttp.BaseConnector
        path = self.endpoint.socket_path
        if path is not None:
            url = "unix://localhost"
            connector = aiohttp.UnixConnector(path, limit=0)
        elif self.endpoint.tls is not None:
            url = self.endpoint.url
            connector = aiohttp.TCPConnector(limit=0, ssl=client_context(self.endpoint.tls))
        else:
            url = self.endpoint.url
            connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        return Docker(url=url, connector=connector, session=session, timeout=timeout)

    async def _negotiate(self, docker: Docker, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                answer = await self._first_answer(docker)
            newest = _version(answer["ApiVersion"])
            oldest = _version(answer.get("MinAPIVersion") or "1.0")
        except SandboxError:
            raise
        except TimeoutError as error:
            raise SandboxUnavailableError(
                "silent",
                f"The Docker engine {describe(self.endpoint)} gave no answer within {timeout:g} s",
                remedy("silent", self.endpoint),
            ) from error
        except RAISED_BY_CALLS as error:
            raise _not_an_engine(error, self.endpoint) from error
        if newest < OLDEST_API:
            raise SandboxUnavailableError(
                "api-too-old",
                f"The Docker engine {describe(self.endpoint)} speaks API "
                f"{newest[0]}.{newest[1]}, and {OLDEST_API[0]}.{OLDEST_API[1]} is needed",
                remedy("api-too-old", self.endpoint),
            )
        major, minor = max(min(newest, NEWEST_API), oldest)
        self.api_version = f"{major}.{minor}"
        docker.api_version = f"v{self.api_version}"

    async def _first_answer(self, docker: Docker) -> dict[str, Any]:
        """Ask for the engine's version, and tell a refused client certificate from a hang-up.

        In TLS 1.3 the client's handshake is over before the engine looks at its certificate,
        and the reset that follows a refusal can overtake the alert that explains it.
        """
        tries = _TRIES_FOR_AN_ALERT
        while True:
            try:
                return _object(await docker._query_json("version", versioned_api=False))
            except (DockerError, aiohttp.ClientError, OSError) as error:
                answered = isinstance(error, DockerError) and error.status != CONNECTION_TROUBLE
                if answered or self.endpoint.tls is None:
                    raise
                if unavailable(error, self.endpoint).kind != "lost":
                    raise
                tries -= 1
                if tries == 0:
                    raise SandboxUnavailableError(
                        "tls",
                        f"The Docker engine {describe(self.endpoint)} hangs up right after the "
                        "TLS handshake, as one does that refuses the client's certificate",
                        remedy("tls", self.endpoint),
                    ) from error

    # -- the bound and the translation around every call --------------------------------------

    @contextlib.asynccontextmanager
    async def call(
        self,
        doing: str,
        subject: Subject = ENGINE,
        timeout: float | None = None,
        unbounded: bool = False,
    ) -> AsyncIterator[Docker]:
        """Give the aiodocker client for one call, bounded and with its failures translated.

        Parameters
        ----------
        doing
            The call in words, as in "start the container".
        subject
            What it is about.
        timeout
            Its bound in seconds; the one of this engine's calls by default.
        unbounded
            For a stream, whose reader sees to its bounds.
        """
        docker = self._docker
        if docker is None:
            raise SandboxUnavailableError("lost", "The connection to the engine is closed")
        bound = None if unbounded else timeout or self._timeout
        try:
            async with asyncio.timeout(bound):
                yield docker
        except SandboxError:
            raise
        except RAISED_BY_CALLS as error:
            raise translate(error, self.endpoint, doing, subject, bound) from error

    # -- the engine itself --------------------------------------------------------------------

    async def ping(self) -> None:
        """Make sure that the engine answers."""
        async with self.call("answer", timeout=CONNECT_TIMEOUT) as docker:
            response = await docker._do_query("_ping", "GET", versioned_api=False)
            await response.read()

    async def version(self) -> dict[str, Any]:
        """Return the engine's versions."""
        async with self.call("tell its version") as docker:
            return _object(await docker._query_json("version"))

    async def info(self) -> dict[str, Any]:
        """Return what the engine tells of itself and its machine."""
        async with self.call("describe itself") as docker:
            return _object(await docker._query_json("info"))

    async def disk_usage(self) -> dict[str, Any]:
        """Return the engine's account of its disk, volumes with their sizes among it.

        The engine counts every file for it, which can take minutes; newer ones count the volumes
        alone.

        Raises
        ------
        SandboxEngineError
            Somebody else is asking for it just now.
        """
        async with self.call("measure its disk", timeout=DISK_USAGE_TIMEOUT) as docker:
            return _object(await docker._query_json("system/df", params={"type": "volume"}))

    async def past_events(self, until: float) -> list[Event]:
        """Return what the engine still remembers of containers of ours, the oldest first.

        It is not much: engines keep the last few hundred events, those of all containers.

        Parameters
        ----------
        until
            The engine's time in seconds since 1970; it answers no sooner.
        """
        filters = json.dumps({"type": ["container"], "label": [EVENT_LABEL]})
        params = {"filters": filters, "since": "1", "until": f"{until:.0f}"}
        async with self.call("tell what happened") as docker:
            response = await docker._do_query("events", "GET", params=params)
            try:
                told = [parse_event(line) async for line in lines(response)]
            finally:
                response.close()
        return [event for event in told if event is not None]

    async def _open_events(self) -> aiohttp.ClientResponse:
        filters = json.dumps({"type": ["container"], "label": [EVENT_LABEL]})
        async with self.call("report events") as docker:
            response = await docker._do_query(
                "events",
                "GET",
                params={"filters": filters},
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT),
            )
        if response.connection is not None:
            keep_alive(response.connection.transport)
        return response

    # -- containers ---------------------------------------------------------------------------

    async def create_container(self, name: str | None, body: Mapping[str, Any]) -> CreatedContainer:
        """Create a container; a caller that is cancelled meanwhile leaves none behind.

        Parameters
        ----------
        name
            Its name, or `None` to let the engine choose.
        body
            The request as the engine's API defines it.
        """
        work = asyncio.ensure_future(self._create_container(name, body))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The engine goes on creating; without the answer nobody could remove it.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    created = await work
                    await self.remove_container(created.id)
            raise

    async def _create_container(
        self, name: str | None, body: Mapping[str, Any]
    ) -> CreatedContainer:
        subject = Subject("image", str(body.get("Image", "")))
        params = {"name": name} if name else None
        async with self.call("create a container", subject) as docker:
            answer = await docker._query_json(
                "containers/create", "POST", params=params, data=json.dumps(body)
            )
            return CreatedContainer(str(answer["Id"]), tuple(answer.get("Warnings") or ()))

    async def inspect_container(self, container_id: str) -> dict[str, Any]:
        """Return everything the engine knows of a container."""
        async with self._container_call("inspect the container", container_id) as docker:
            return _object(await docker._query_json(f"containers/{container_id}/json"))

    async def start_container(self, container_id: str) -> None:
        """Start a container that was created."""
        async with self._container_call("start the container", container_id) as docker:
            await docker.containers.container(container_id).start()

    async def kill_container(self, container_id: str, signal: str = "SIGKILL") -> None:
        """Signal a container's main process; nothing happens when it does not run."""
        with contextlib.suppress(SandboxGoneError):
            async with self._container_call("signal the container", container_id) as docker:
                await docker.containers.container(container_id).kill(signal=signal)

    async def remove_container(self, container_id: str) -> None:
        """Kill and remove a container with its anonymous volumes, if it is there.

        On return it is gone, also when the engine or another caller was removing it already.
        """
        doing = "remove the container"
        async with self._container_call(doing, container_id) as docker:
            while True:
                try:
                    await docker.containers.container(container_id).delete(force=True, v=True)
                    return
                except DockerError as error:
                    if error.status == 404:
                        return
                    if not _removal_goes_on(error):
                        raise
                await asyncio.sleep(_REMOVAL_POLL)

    async def list_containers(
        self, labels: Mapping[str, str | None], all: bool = True
    ) -> list[dict[str, Any]]:
        """List the containers that carry all of these labels.

        Parameters
        ----------
        labels
            Label names with the value they must have, or `None` for any value.
        all
            Whether to list stopped ones too.
        """
        params: dict[str, str | int] = {"all": int(all), "filters": _label_filter(labels)}
        async with self.call("list containers") as docker:
            return _list(await docker._query_json("containers/json", params=params))

    async def container_stats(self, container_id: str) -> dict[str, Any]:
        """Return what a container uses at this moment; an engine without ``one-shot`` takes 1 s."""
        params = {"stream": "false", "one-shot": "true"}
        async with self._container_call("measure the container", container_id) as docker:
            return _object(
                await docker._query_json(f"containers/{container_id}/stats", params=params)
            )

    async def commit_container(
        self, container_id: str, *, user: str, labels: Mapping[str, str]
    ) -> str:
        """Make an image without a name of what a container's file system holds now.

        Parameters
        ----------
        container_id
            The container, which is paused meanwhile.
        user
            ``uid:gid`` that the image runs as.
        labels
            Labels of the image, besides those of the container.

        Returns
        -------
        str
            The image's digest.
        """
        params = {"container": container_id, "pause": "1"}
        config = {"User": user, "Labels": dict(labels)}
        subject = Subject("container", container_id)
        async with self.call("commit the container", subject, timeout=COMMIT_TIMEOUT) as docker:
            answer = await docker._query_json(
                "commit", "POST", params=params, data=json.dumps(config)
            )
            return str(_object(answer)["Id"])

    async def pause_container(self, container_id: str) -> None:
        """Freeze a container with its memory."""
        async with self._container_call("pause the container", container_id) as docker:
            await docker.containers.container(container_id).pause()

    async def unpause_container(self, container_id: str) -> None:
        """Let a frozen container go on."""
        async with self._container_call("resume the container", container_id) as docker:
            await docker.containers.container(container_id).unpause()

    async def attach_container(self, container_id: str) -> ByteStream:
        """Connect to the streams of a container's main process; to miss nothing, before start."""
        async with self._container_call("attach to the container", container_id) as docker:
            stream = docker.containers.container(container_id).attach(
                stdin=True, stdout=True, stderr=True
            )
            await connect(stream)
            return ByteStream(stream, self.endpoint)

    def _container_call(
        self, doing: str, container_id: str
    ) -> contextlib.AbstractAsyncContextManager[Docker]:
        return self.call(doing, Subject("container", container_id))

    # -- commands in containers ---------------------------------------------------------------

    async def exec(
        self,
        container_id: str,
        argv: Sequence[str],
        *,
        user: str,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: bool = True,
        tty: bool = False,
    ) -> ExecStream:
        """Start a command in a running container and connect to its streams.

        `argv` is visible to everyone who can watch the engine's events or the container's
        processes: secrets go through the input or, less well, through `env`. That the command
        could not be found is told by the exit code (126 or 127), not by an error here.

        Parameters
        ----------
        container_id
            The container.
        argv
            The program and its arguments; no shell is involved.
        user
            ``uid:gid`` to run as.
        env
            Variables to add to those of the container.
        cwd
            The working directory.
        stdin
            Whether to connect its input.
        tty
            Whether to give it a terminal; its output then is all stdout.
        """
        subject = Subject("container", container_id, (cwd, argv[0]))
        async with self.call("run a command", subject) as docker:
            created = await docker.containers.container(container_id).exec(
                list(argv),
                stdin=stdin,
                tty=tty,
                user=user,
                environment=dict(env or {}),
                workdir=cwd,
            )
            stream = created.start()
            await connect(stream)
            return ExecStream(stream, self.endpoint, created.id)

    async def resize_exec(self, exec_id: str, rows: int, columns: int) -> None:
        """Give the terminal of a command that runs a size."""
        async with self.call("resize the terminal", Subject("exec", exec_id)) as docker:
            await Exec(docker, exec_id, tty=True).resize(h=rows, w=columns)

    async def inspect_exec(self, exec_id: str) -> ExecState:
        """Ask how a command is doing; the only truth after the end of its stream."""
        async with self.call("inspect the command", Subject("exec", exec_id)) as docker:
            answer = await Exec(docker, exec_id).inspect()
            running = bool(answer["Running"])
            # Podman says 0 while it runs.
            code = None if running else answer.get("ExitCode")
            return ExecState(running, None if code is None else int(code), int(answer["Pid"] or 0))

    # -- volumes ------------------------------------------------------------------------------

    async def create_volume(
        self, name: str, labels: Mapping[str, str], options: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Create a named volume; an existing one of that name is returned as it is.

        Parameters
        ----------
        name
            Its name.
        labels
            Its labels, if it is new.
        options
            Options of the driver, if it is new.
        """
        body = {"Name": name, "Labels": dict(labels), "DriverOpts": dict(options or {})}
        async with self.call("create a volume", Subject("volume", name)) as docker:
            return _object(
                await docker._query_json("volumes/create", "POST", data=json.dumps(body))
            )

    async def inspect_volume(self, name: str) -> dict[str, Any] | None:
        """Return what the engine knows of a volume, or `None` when there is none."""
        async with self.call("inspect the volume", Subject("volume", name)) as docker:
            try:
                return _object(await docker._query_json(f"volumes/{name}"))
            except DockerError as error:
                if error.status == 404:
                    return None
                raise

    async def remove_volume(self, name: str) -> None:
        """Remove a volume if it is there, never by force.

        Raises
        ------
        SandboxConflictError
            A container uses it.
        """
        async with self.call("remove the volume", Subject("volume", name)) as docker:
            try:
                response = await docker._do_query(f"volumes/{name}", "DELETE")
                await response.read()
            except DockerError as error:
                if error.status == 404:
                    return
                if error.status == 409:
                    raise SandboxConflictError(
                        f"The volume {name!r} is in use by a container"
                    ) from error
                raise

    async def list_volumes(self, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
        """List the volumes that carry all of these labels."""
        params = {"filters": _label_filter(labels)}
        async with self.call("list volumes") as docker:
            answer = _object(await docker._query_json("volumes", params=params))
            return _list(answer.get("Volumes") or [])

    # -- networks -----------------------------------------------------------------------------

    async def create_network(self, body: Mapping[str, Any]) -> str:
        """Create a network and return its id.

        Parameters
        ----------
        body
            The request as the engine's API defines it. A name is no key: an engine may hold
            several networks of one name.

        Raises
        ------
        SandboxConflictError
            The engine found another network of that name, or of that bridge.
        """
        name = str(body.get("Name", ""))
        async with self.call("create a network", Subject("network", name)) as docker:
            try:
                answer = await docker._query_json(
                    "networks/create", "POST", data=json.dumps(dict(body))
                )
            except DockerError as error:
                # Docker's word for a bridge that another network has.
                if error.status == 403 and "conflicts with network" in error.message:
                    raise SandboxConflictError(
                        f"Another network of the engine has the name or the bridge of {name!r}"
                    ) from error
                raise
            return str(_object(answer)["Id"])

    async def inspect_network(self, network: str) -> dict[str, Any] | None:
        """Return what the engine knows of a network, or `None` when there is none.

        Parameters
        ----------
        network
            Its id, or a name that only one network has.
        """
        async with self.call("inspect the network", Subject("network", network)) as docker:
            try:
                return _object(await docker._query_json(f"networks/{quote(network, safe='')}"))
            except DockerError as error:
                if error.status == 404:
                    return None
                raise

    async def list_networks(self, name: str) -> list[dict[str, Any]]:
        """List the networks of exactly this name."""
        params = {"filters": json.dumps({"name": [name]})}
        async with self.call("list networks") as docker:
            found = _list(await docker._query_json("networks", params=params))
        # The engine takes the filter as a part of the name.
        return [network for network in found if network.get("Name") == name]

    async def remove_network(self, network_id: str) -> None:
        """Remove a network if it is there.

        Raises
        ------
        SandboxConflictError
            A container is connected to it.
        """
        async with self.call("remove the network", Subject("network", network_id)) as docker:
            try:
                response = await docker._do_query(f"networks/{network_id}", "DELETE")
                await response.read()
            except DockerError as error:
                if error.status == 404:
                    return
                if error.status in {403, 409}:
                    raise SandboxConflictError(
                        f"The network {network_id[:12]!r} is in use by a container"
                    ) from error
                raise


def _removal_goes_on(error: DockerError) -> bool:
    """Say whether to ask again for a removal that an engine has refused.

    Another one is under way, or the container ended by itself just before the engine would have
    killed it, which engines before 23 take for a failure.
    """
    text = error.message.lower()
    return error.status in {409, 500} and ("in progress" in text or "is not running" in text)


def _not_an_engine(error: BaseException, endpoint: Endpoint) -> BaseException:
    """Tell why the very first answer of an engine could not be understood."""
    if isinstance(error, DockerError) and error.status != CONNECTION_TROUBLE:
        translated = translate(error, endpoint, "tell its version")
        if isinstance(translated, SandboxUnavailableError):
            return translated
    else:
        translated = translate(error, endpoint, "tell its version")
        if not isinstance(translated, SandboxUnavailableError) or translated.kind != "lost":
            return translated
    # A page of a web server, or a server that hangs up on a question that engines answer.
    return SandboxUnavailableError(
        "not-docker",
        f"What listens at {endpoint.url} (from {endpoint.source}) does not answer as a Docker "
        "engine does",
        remedy("not-docker", endpoint),
    )


def _version(text: object) -> tuple[int, int]:
    major, _, minor = str(text).partition(".")
    return int(major), int(minor)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("the engine's answer is not an object")
    return value


def _list(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise TypeError("the engine's answer is not a list")
    return value


def _label_filter(labels: Mapping[str, str | None]) -> str:
    wanted = [name if value is None else f"{name}={value}" for name, value in labels.items()]
    return json.dumps({"label": wanted})


async def _close(docker: Docker) -> None:
    await docker.session.close()
    await docker.connector.close()
