"""`SandboxProvisioner`: what jupyter_client calls to run a kernel in a sandbox.

A thin adaptor. It turns traits and launch arguments into a `SandboxSpec` and a `KernelOrder`,
and hops onto the engine thread for everything else, since its methods are called from several
loops and threads during one kernel's life, some of which do not run between two calls. It
trusts neither the ids nor the environment that a client sends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import zmq
from jupyter_client.connect import KernelConnectionInfo, LocalPortCache
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Bool, CaselessStrEnum, Dict, Float, Integer, List, Unicode, Union

from sandbox_kernel.amounts import parse_memory
from sandbox_kernel.config import EngineSettings, engine_settings
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.engine.images import DEFAULT_IMAGE, ensure_image
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.kernel.channels import Address
from sandbox_kernel.kernel.folder import PrivateFolder
from sandbox_kernel.kernel.launch_error import KernelLaunchError, launch_error
from sandbox_kernel.kernel.process import KernelOrder
from sandbox_kernel.kernel.session import KERNEL_PORTS, KernelSession
from sandbox_kernel.kernel.wire import CHANNELS
from sandbox_kernel.kernel.zmtp import ZmtpLimits
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.owner import current_owner
from sandbox_kernel.sandbox.spec import SandboxSpec

T = TypeVar("T")

PORT_NAMES = tuple(f"{channel}_port" for channel in CHANNELS)
EXIT_PATIENCE = 10.0
"""Seconds that `SandboxProvisioner.wait` waits; an engine that is gone must not hang it."""

_CONSTRUCTOR_ONLY = frozenset({"kernel_id", "kernel_spec", "parent", "config", "log"})
_PYTHONS = re.compile(r"python(\d(\.\d+)?)?")
_KEPT_ID = 64


class SandboxProvisioner(KernelProvisionerBase):
    """Runs a kernel in a hardened container of its own on a Docker engine.

    Its traits are set in the kernelspec (``metadata.kernel_provisioner.config``) or in the
    application's configuration. Names follow DockerSpawner's where that has one.
    """

    image = Unicode(
        DEFAULT_IMAGE,
        help="Image of the sandbox. It must hold the kernel and python3, version 3.8 or later, "
        "for the relay. The default is what `jupyter sandbox build` makes.",
    ).tag(config=True)
    pull_policy = CaselessStrEnum(
        ["never", "missing", "always"],
        default_value="never",
        help="When to pull the image. `never` by default, since a start that waits for a large "
        "pull looks like a hang; pull it beforehand.",
    ).tag(config=True)
    mem_limit = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="Memory, swap included, in bytes or with a unit, for example '4G'. By default "
        "2 GiB, or what the engine's machine has.",
    ).tag(config=True)
    cpu_limit = Float(
        None,
        allow_none=True,
        help="Processors, fractions allowed. By default 2, or what the engine's machine has.",
    ).tag(config=True)
    pids_limit = Integer(
        256, help="Processes and threads together; 256 leaves room for numerical libraries."
    ).tag(config=True)
    network = Unicode("none", help="Network tier: 'none' is loopback only.").tag(config=True)
    runtime = Unicode(
        None, allow_none=True, help="A container runtime of the engine, for example 'runsc'."
    ).tag(config=True)
    environment = Dict(
        key_trait=Unicode(),
        value_trait=Unicode(),
        help="Variables for the kernel. Values do not show in the container's configuration.",
    ).tag(config=True)
    env_keep = List(
        Unicode(),
        help="Names of the server's variables that the kernel gets too. None by default: the "
        "server's environment holds its tokens.",
    ).tag(config=True)
    lease_ttl = Float(
        60.0,
        help="Seconds after which the engine ends a sandbox whose owner is not heard of, for "
        "example since it was suspended or cut off. A killed owner is noticed at once.",
    ).tag(config=True)
    max_lifetime = Float(
        None, allow_none=True, help="Seconds after which a sandbox ends in any case."
    ).tag(config=True)
    startup_timeout = Float(60.0, help="Seconds that a kernel has to start listening.").tag(
        config=True
    )
    max_message_bytes = Integer(
        64 << 20,
        help="Largest message from the kernel, in bytes; a larger one is left out and logged, "
        "since nothing behind this bounds what the server would have to hold.",
    ).tag(config=True)
    max_message_parts = Integer(4096, help="Most parts of one message.").tag(config=True)
    local_transport = CaselessStrEnum(
        ["ipc", "tcp"],
        default_value="tcp" if os.name == "nt" else "ipc",
        help="Where clients on this machine connect: 'ipc' is Unix sockets in a private "
        "folder, 'tcp' is ports on loopback that every local user can reach.",
    ).tag(config=True)
    host = Unicode(
        None,
        allow_none=True,
        help="The engine, for example 'unix:///var/run/docker.sock' or 'tcp://engine:2376'. By "
        "default SANDBOX_DOCKER_HOST, DOCKER_HOST, the docker context or a usual socket.",
    ).tag(config=True)
    tls_cert_path = Unicode(None, allow_none=True, help="File of the client's certificate.").tag(
        config=True
    )
    tls_key_path = Unicode(None, allow_none=True, help="File of the client's key.").tag(config=True)
    tls_ca_path = Unicode(
        None, allow_none=True, help="File of the authority that signed the engine's certificate."
    ).tag(config=True)
    allow_insecure_engine = Bool(
        False, help="Allow plain TCP to another machine: whoever can reach it owns the engine."
    ).tag(config=True)

    def __init__(self, **kwargs: Any) -> None:
        # jupyter_client passes a kernelspec's config as arguments, and traitlets only warns of
        # an unknown one: a mistyped limit would silently be no limit.
        unknown = set(kwargs) - set(self.trait_names(config=True)) - _CONSTRUCTOR_ONLY
        for name in sorted(unknown):
            known = ", ".join(sorted(self.trait_names(config=True)))
            raise launch_error(
                SandboxSpecRejectedError(
                    f"kernel_provisioner.config.{name}",
                    kwargs[name],
                    "there is no such setting",
                    f"Correct the kernelspec; the settings are {known}.",
                )
            )
        super().__init__(**kwargs)
        self.connection_info: KernelConnectionInfo = {}
        self._session: KernelSession | None = None
        self._pid = os.getpid()
        self._has_process = False
        self._ran_before = False
        self._order: KernelOrder | None = None
        self._folder: PrivateFolder | None = None
        self._ports_cached = False
        self._withdraw: Callable[[], None] | None = None

    @property
    def _manager(self) -> Any:
        if self.parent is None:
            raise KernelLaunchError("A sandboxed kernel needs a kernel manager.")
        return self.parent

    # -- state, asked for often -----------------------------------------------------------------

    @property
    def has_process(self) -> bool:
        """Whether a launched kernel has not been waited for; asserted after each launch."""
        return self._has_process

    async def poll(self) -> int | None:
        """Return the kernel's exit code, or `None` while it runs.

        Called several times a second from `KernelManager.is_alive`, hence from memory.
        """
        session = self._mine()
        if session is None:
            return 0
        code = session.exit_code
        if code is None and not session.usable:
            return 137
        return code

    async def wait(self) -> int | None:
        """Wait for the kernel's end.

        Called from `KernelManager.finish_shutdown` and `kill_kernel`, without a bound of
        theirs; this one ends after `EXIT_PATIENCE` at the latest.
        """
        session = self._mine()
        code: int | None = 0
        if session is not None and session.process is not None:
            process = session.process

            async def exited() -> None:
                async with asyncio.timeout(EXIT_PATIENCE):
                    await process.exited.wait()

            try:
                await self._hop(exited)
                code = process.exit_code
            except TimeoutError:
                self.log.warning("the kernel's end did not show within %g s", EXIT_PATIENCE)
                code = 137
        self._has_process = False
        return code

    # -- signals --------------------------------------------------------------------------------

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel's process group.

        Called from `KernelManager.signal_kernel`, from an interrupt in signal mode, and first
        thing in every shutdown, also of a kernel that is dead or still starting.
        """
        session = self._mine()
        if session is None or signum == 0:
            return
        if signum == signal.SIGINT and not session.channels.answered:
            # Before its handlers are there, an interrupt would end the kernel; and as long as
            # it has answered nothing, there is nothing to interrupt.
            return
        if signum == getattr(signal, "SIGKILL", 9):
            await self._hop(session.kill)
        else:
            await self._hop(functools.partial(session.send_signal, signum))

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and all of its processes at once.

        Called from `KernelManager.kill_kernel`; ``restart`` cannot be relied on, so that the
        sandbox stays until `cleanup` says that there is no restart.
        """
        session = self._mine()
        if session is not None:
            await self._hop(session.kill)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel's process group to end.

        Called from `KernelManager.finish_shutdown` for a kernel that did not follow the
        shutdown request.
        """
        await self.send_signal(signal.SIGTERM)

    # -- start ----------------------------------------------------------------------------------

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Settle the connection and the kernel's command; nothing is created on the engine.

        Called from `KernelManager.pre_start_kernel`, with the same arguments at each restart.
        """
        manager = self._manager
        for unused in ("stdout", "stderr", "stdin", "independent", "transport_encryption"):
            kwargs.pop(unused, None)
        arguments = list(kwargs.pop("extra_arguments", None) or ())
        outer = dict(kwargs.get("env") or os.environ)
        self._prepare_connection(manager)
        self._prepare_encryption(manager)
        notebook = os.path.basename(outer.get("JPY_SESSION_NAME", ""))  # noqa: PTH119
        manager.write_connection_file(jupyter_session=notebook)
        self.connection_info = manager.get_connection_info()
        if not self.connection_info.get("key"):
            raise KernelLaunchError(
                "Session.key is empty, so that messages would not be signed. Remove that setting."
            )
        command = self._command(arguments)
        launch = await super().pre_launch(cmd=command, **kwargs)
        self._order = KernelOrder(
            argv=tuple(command),
            connection=self._inner_connection(notebook),
            environment=self._environment(launch["env"], outer, notebook),
        )
        return dict(launch)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel in its sandbox, a new one or the one that a restart kept.

        Called from `KernelManager.start_kernel`, which does not clean up after a failure, so
        this does.

        Raises
        ------
        KernelLaunchError
            With a text that Jupyter's clients show to the person.
        """
        if self._order is None:
            raise RuntimeError("pre_launch has not been called")
        try:
            spec = self._spec()
            endpoint = self._endpoint()
            thread = EngineThread.current()
            await thread.call(functools.partial(self._launch, thread, endpoint, spec, self._order))
        except BaseException as error:
            # Clients of a kernel that ran before wait at its endpoints for the next attempt.
            await self._discard_all(endpoints=not self._ran_before)
            self._forget_pending()
            if isinstance(error, SandboxError):
                raise launch_error(error) from error
            raise
        self._has_process = self._ran_before = True
        return self.connection_info

    async def _launch(
        self, thread: EngineThread, endpoint: Endpoint, spec: SandboxSpec, order: KernelOrder
    ) -> None:
        """Launch in the session that is there, else in a new one; runs in the engine's loop."""
        session = self._session
        if session is not None and session.usable:
            try:
                await session.launch(order, self.startup_timeout)
                return
            except SandboxError as error:
                self.log.info("the sandbox cannot be used again: %s", error)
        await self._close_session()
        engine = await thread.engine(endpoint)
        await ensure_image(engine, spec.image, self.pull_policy)
        session = await KernelSession.open(
            engine,
            spec,
            owner=current_owner(),
            labels={names.KERNEL: ascii(self.kernel_id)[1:-1][:_KEPT_ID]},
            addresses=self._addresses(),
            limits=ZmtpLimits(self.max_message_bytes, self.max_message_parts),
        )
        self._session = session
        self._withdraw = thread.at_exit(self._close_at_exit)
        await session.launch(order, self.startup_timeout)

    def _prepare_connection(self, manager: Any) -> None:
        """Choose the endpoints on this machine; a restart keeps them."""
        if self.local_transport == "ipc":
            if self._folder is None:
                self._folder = PrivateFolder()
                manager.transport = "ipc"
                manager.ip = str(self._folder.path / "k")
            return
        manager.transport = "tcp"
        if manager.cache_ports and not self._ports_cached:
            ports = LocalPortCache.instance()
            for name in PORT_NAMES:
                setattr(manager, name, ports.find_available_port(manager.ip))
            self._ports_cached = True

    @staticmethod
    def _prepare_encryption(manager: Any) -> None:
        """Make the key pair where the manager wants encryption; a restart keeps it."""
        if not hasattr(manager, "_transport_encryption_policy"):
            return
        policy = manager._transport_encryption_policy()
        supported = manager._kernel_supports_curve_encryption()
        if policy == "disabled" or (policy == "auto" and not supported):
            return
        if manager.curve_publickey is None:
            manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()

    def _command(self, arguments: list[str]) -> list[str]:
        """Return the kernel's command, with words that mean something inside the sandbox."""
        command = [*self.kernel_spec.argv, *arguments]
        first = command[0] if command else ""
        if first == sys.executable or _PYTHONS.fullmatch(first):
            command[0] = "python3"
        return command

    def _inner_connection(self, notebook: str) -> dict[str, object]:
        """Return the connection file as the kernel in the sandbox needs it."""
        info: dict[str, Any] = dict(self.connection_info)
        inner = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in info.items()
            if name in ("key", "signature_scheme", "curve_publickey", "curve_secretkey")
            and value is not None
        }
        return {
            **inner,
            **dict(zip(PORT_NAMES, KERNEL_PORTS, strict=True)),
            "transport": "tcp",
            "ip": "127.0.0.1",
            "kernel_name": self._manager.kernel_name,
            "jupyter_session": notebook,
        }

    def _environment(
        self, substituted: dict[str, str], outer: dict[str, str], notebook: str
    ) -> dict[str, str]:
        """Return the kernel's variables: nothing of the server's but what was named."""
        kept = {name: outer[name] for name in self.env_keep if name in outer}
        spec = {name: substituted[name] for name in self.kernel_spec.env}
        session = {"JPY_SESSION_NAME": notebook} if notebook else {}
        home = {
            "HOME": "/home/sbx",
            "MPLCONFIGDIR": "/home/sbx/.mpl",
            "PYTHONUSERBASE": "/workspace/.pyuser",
            "PIP_NO_CACHE_DIR": "1",
        }
        return {**home, **session, **kept, **spec, **self.environment}

    def _spec(self) -> SandboxSpec:
        memory = None if self.mem_limit is None else parse_memory(self.mem_limit)
        return SandboxSpec(
            image=self.image,
            network=self.network,
            cpu_limit=self.cpu_limit,
            mem_limit=memory,
            pids_limit=self.pids_limit,
            runtime=self.runtime,
            lease_ttl=self.lease_ttl,
            max_lifetime=self.max_lifetime,
        )

    def _endpoint(self) -> Endpoint:
        group = engine_settings()

        def path(own: str | None, fallback: Path | None) -> Path | None:
            return fallback if own is None else Path(own)

        settings = EngineSettings(
            host=self.host or group.host,
            tls_cert_path=path(self.tls_cert_path, group.tls_cert_path),
            tls_key_path=path(self.tls_key_path, group.tls_key_path),
            tls_ca_path=path(self.tls_ca_path, group.tls_ca_path),
            allow_insecure_engine=self.allow_insecure_engine or group.allow_insecure_engine,
            require_explicit_host=group.require_explicit_host,
        )
        return resolve_endpoint(settings)

    def _addresses(self) -> dict[str, Address]:
        manager = self._manager
        ports = {channel: getattr(manager, f"{channel}_port") for channel in CHANNELS}
        if manager.transport == "ipc":
            return {channel: f"{manager.ip}-{port}" for channel, port in ports.items()}
        return {channel: (manager.ip, port) for channel, port in ports.items()}

    # -- end ------------------------------------------------------------------------------------

    async def cleanup(self, restart: bool = False) -> None:
        """Give back what the kernel used; between two launches only the clients' endpoints.

        Called from `KernelManager.cleanup_resources`, by some clients twice and by some right
        after a start: a kernel that has not been waited for is left alone.
        """
        if self._has_process:
            return
        if restart:
            session = self._mine()
            if session is not None:
                await self._hop(session.pause_clients)
        else:
            await self._discard_all()

    async def _discard_all(self, *, endpoints: bool = True) -> None:
        """Remove everything of this kernel on the engine, and its endpoints on this machine."""
        try:
            if self._mine() is not None:
                await self._hop(self._close_session)
        except SandboxError as error:
            self.log.warning("the sandbox will end by its lease: %s", error)
        finally:
            self._has_process = False
            if endpoints:
                self._release_endpoints()

    def _release_endpoints(self) -> None:
        self._ran_before = False
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()
        self._return_ports()

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        withdraw, self._withdraw = self._withdraw, None
        if session is not None:
            await session.close()
        if withdraw is not None:
            withdraw()

    async def _close_at_exit(self) -> None:
        """End the kernel of a process that ends without having said so, as a console does."""
        session, folder = self._session, self._folder
        try:
            if session is not None:
                await session.close_at_exit()
        finally:
            if folder is not None:
                folder.remove()

    def _return_ports(self) -> None:
        if self._ports_cached:
            self._ports_cached = False
            info: dict[str, Any] = dict(self.connection_info)
            for name in PORT_NAMES:
                LocalPortCache.instance().return_port(info[name])

    def _forget_pending(self) -> None:
        """Drop the record of a kernel that failed to start.

        A server would otherwise look it up at its end, not find the kernel, and never stop
        (jupyter_client#960).
        """
        pending = getattr(self._manager.parent, "_pending_kernels", None)
        if isinstance(pending, dict):
            loop = asyncio.get_running_loop()
            loop.call_later(0.1, pending.pop, self.kernel_id, None)

    # -- persistence ----------------------------------------------------------------------------

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what identifies the kernel, its signing key included; called by gateways."""
        info = dict(await super().get_provisioner_info())
        session = self._mine()
        info["sandbox"] = session.sandbox.id if session is not None else None
        return info

    def resolve_path(self, path: str) -> str | None:
        """Return `None`: a path of the sandbox is no path of the server.

        Called from the server's path resolution; it must not tell what exists on the host.
        """
        return None

    # -- the engine thread ------------------------------------------------------------------------

    def _mine(self) -> KernelSession | None:
        """Return the session, unless it belongs to the process that this one was forked from."""
        return self._session if self._pid == os.getpid() else None

    @staticmethod
    async def _hop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await EngineThread.current().call(work)
