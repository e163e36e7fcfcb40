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
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import zmq
from jupyter_client.connect import KernelConnectionInfo, LocalPortCache
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import TraitError

from sandbox_kernel.config import (
    SETTINGS,
    Resolved,
    SandboxDefaults,
    check_setting,
    unknown_setting,
)
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import ensure_image
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.kernel.beside import Beside
from sandbox_kernel.kernel.channels import Address
from sandbox_kernel.kernel.folder import PrivateFolder
from sandbox_kernel.kernel.launch_error import KernelLaunchError, launch_error
from sandbox_kernel.kernel.process import KernelOrder
from sandbox_kernel.kernel.record import KernelRecord, RecordFile
from sandbox_kernel.kernel.session import KernelSession, kernel_address, kernel_ports
from sandbox_kernel.kernel.wire import CHANNELS
from sandbox_kernel.kernel.workspace import NOTEBOOK, workspace_of
from sandbox_kernel.kernel.zmtp import ZmtpLimits
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.order import Order, settle
from sandbox_kernel.sandbox.owner import current_owner

T = TypeVar("T")

PORT_NAMES = tuple(f"{channel}_port" for channel in CHANNELS)
FILES_LIMIT = 256 << 20
"""Bytes of the notebook's folder that a workspace begins as, unless something else is said."""

EXIT_PATIENCE = 10.0
"""Seconds that `SandboxProvisioner.wait` waits; an engine that is gone must not hang it."""

_STANZA = frozenset({"provisioner_name", "config"})
_CONSTRUCTOR_ONLY = frozenset({"kernel_id", "kernel_spec", "parent", "config", "log"})
_PYTHONS = re.compile(r"python(\d(\.\d+)?)?")
_KEPT_ID = 64


# The metaclass that jupyter_client makes for its base is one of both, which mypy cannot see.
class SandboxProvisioner(KernelProvisionerBase, SandboxDefaults):  # type: ignore[metaclass]
    """Runs a kernel in a hardened container of its own on a Docker engine.

    Its traits are those of `SandboxDefaults`. They are set in the kernelspec
    (``metadata.kernel_provisioner.config``), in the application's configuration, or in the
    files that `sandbox_kernel.config` reads; the policy has the last word.
    """

    def __init__(self, **kwargs: Any) -> None:
        try:
            _check_kernelspec(kwargs)
            super().__init__(**kwargs)
            _check_application(self.config)
        except SandboxError as error:
            raise launch_error(error) from error
        except TraitError as error:
            # Its text repeats the value, which in a variable may be a secret.
            text = "" if "'environment'" in str(error) else f": {error}"
            raise KernelLaunchError(
                f"A setting of the sandbox in Jupyter's configuration is of the wrong kind{text}"
            ) from error
        self.connection_info: KernelConnectionInfo = {}
        self._session: KernelSession | None = None
        self._pid = os.getpid()
        self._has_process = False
        self._ran_before = False
        self._order: KernelOrder | None = None
        self._settled: Order | None = None
        self._ports_inside = kernel_ports(self.kernel_id)
        self._folder: PrivateFolder | None = None
        self._ports_cached = False
        self._withdraw: Callable[[], None] | None = None
        self._place = ("", ".")
        self._record: RecordFile | None = None
        self._beside: Beside | None = None
        self._workspace: str | None = None

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
        if session.telling and self._has_process:
            return None
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

        Raises
        ------
        KernelLaunchError
            The configuration has something wrong in it, or the policy refuses the kernel.
        """
        outer = dict(kwargs.get("env") or os.environ)
        self._place = (outer.get("JPY_SESSION_NAME", ""), str(kwargs.get("cwd") or "."))
        try:
            self._settled = self._settle(outer, str(kwargs.get("cwd") or "."))
        except SandboxError as error:
            await self._give_up()
            raise launch_error(error) from error
        if self._beside is None and self._may_have_files(self._settled):
            self._beside = Beside(self._place[1])
        manager = self._manager
        for unused in ("stdout", "stderr", "stdin", "independent", "transport_encryption"):
            kwargs.pop(unused, None)
        arguments = list(kwargs.pop("extra_arguments", None) or ())
        self._prepare_connection(manager, self._settled.settings["local_transport"])
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
            environment=self._environment(launch["env"], outer, notebook, self._settled.settings),
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
        if self._order is None or self._settled is None:
            raise RuntimeError("pre_launch has not been called")
        try:
            endpoint = self._settled.endpoint()
            thread = EngineThread.current()
            await thread.call(
                functools.partial(self._launch, thread, endpoint, self._settled, self._order)
            )
            self._keep_record()
        except BaseException as error:
            await self._give_up()
            if isinstance(error, SandboxError):
                raise launch_error(error) from error
            raise
        self._has_process = self._ran_before = True
        return self.connection_info

    async def _give_up(self) -> None:
        """Leave nothing behind of a launch that failed; the manager does not clean up after it."""
        # Clients of a kernel that ran before wait at its endpoints for the next attempt.
        await self._discard_all(endpoints=not self._ran_before)
        self._forget_pending()

    async def _launch(
        self, thread: EngineThread, endpoint: Endpoint, settled: Order, order: KernelOrder
    ) -> None:
        """Launch in the session that is there, else in a new one; runs in the engine's loop."""
        session = self._session
        startup_timeout = settled.settings["startup_timeout"]
        if session is not None and session.usable:
            try:
                await session.launch(order, startup_timeout)
                return
            except SandboxError as error:
                self.log.info("the sandbox cannot be used again: %s", error)
        await self._close_session()
        engine = await thread.engine(endpoint)
        await ensure_image(engine, settled.spec.image, settled.pull_policy)
        session = await KernelSession.open(
            engine,
            settled.spec,
            owner=current_owner(),
            labels={names.KERNEL: ascii(self.kernel_id)[1:-1][:_KEPT_ID]},
            addresses=self._addresses(),
            limits=_limits(settled),
            quota=settled.quota,
        )
        self._session = session
        self._withdraw = thread.at_exit(self._close_at_exit)
        session.channels.beside = self._beside
        await session.launch(order, startup_timeout)
        self._workspace = settled.spec.workspace

    def _prepare_connection(self, manager: Any, transport: str) -> None:
        """Choose the endpoints on this machine; a restart keeps them."""
        if transport == "ipc":
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
            **dict(zip(PORT_NAMES, self._ports_inside, strict=True)),
            "transport": "tcp",
            "ip": kernel_address(self.kernel_id),
            "kernel_name": self._manager.kernel_name,
            "jupyter_session": notebook,
        }

    def _environment(
        self,
        substituted: dict[str, str],
        outer: dict[str, str],
        notebook: str,
        settings: Resolved,
    ) -> dict[str, str]:
        """Return the kernel's variables: nothing of the server's but what was named."""
        kept = {name: outer[name] for name in settings["env_keep"] if name in outer}
        spec = {name: substituted[name] for name in self.kernel_spec.env}
        session = {"JPY_SESSION_NAME": notebook} if notebook else {}
        home = {
            "HOME": "/home/sbx",
            "MPLCONFIGDIR": "/home/sbx/.mpl",
            "PYTHONUSERBASE": "/workspace/.pyuser",
            "PIP_NO_CACHE_DIR": "1",
        }
        return {**home, **session, **kept, **spec, **settings["environment"]}

    def _settle(self, outer: Mapping[str, str], folder: str) -> Order:
        """Have configuration and policy settle what this kernel asks for.

        Parameters
        ----------
        outer
            The variables that the kernel was to get outside of a sandbox.
        folder
            Where the kernel was to run: the notebook's folder.
        """
        order = settle(self._asked(), door="kernel", variables=tuple(self.kernel_spec.env))
        spec = order.spec
        places: dict[str, Any] = {
            name: str(Path(folder, value).expanduser().absolute())
            for name, value in (("template", spec.template), ("project", spec.project))
            if value is not None
        }
        if order.settings["files"] == "snapshot":
            places = {**places, **_snapshot_of(folder, order)}
        workspace = order.settings["workspace"]
        kept = workspace_of(workspace, outer.get("JPY_SESSION_NAME", ""))
        if workspace == NOTEBOOK and self._workspace not in {None, kept["workspace"]}:
            # The notebook has another name by now, and its files stay with the kernel.
            self.log.warning(
                "The kernel goes on with the workspace of its notebook's former name. To have it "
                "under the new one later: jupyter sandbox workspaces clone %s %s",
                shlex.quote(str(self._workspace)),
                shlex.quote(kept["workspace"]),
            )
            kept["workspace"] = self._workspace
        # The kernel gets its variables with its command, and a restart may change them.
        return replace(
            order,
            spec=replace(
                spec,
                **kept,
                **places,
                environment={},
            ),
        )

    def _may_have_files(self, order: Order) -> bool:
        """Whether files of the notebook's folder are withheld from this kernel, and need not be."""
        if order.settings["files"] == "snapshot":
            return False
        try:
            settle({**self._asked(), "files": "snapshot"}, door="kernel")
        except SandboxError:
            return False
        return True

    def _asked(self) -> dict[str, Any]:
        """Return the settings that kernelspec and application say anything of."""
        said = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in said.items() if value is not None}

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
        self._workspace = None
        record, self._record = self._record, None
        if record is not None:
            record.remove()
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
        session, folder, record = self._session, self._folder, self._record
        lives = False
        try:
            if session is not None:
                lives = await session.close_at_exit()
        finally:
            if folder is not None:
                folder.remove()
            if record is not None:
                record.leave() if lives else record.remove()

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
        """Return what another process needs to serve this kernel when this one has gone (K6).

        Called by gateways, which keep it as JSON. It holds the key that signs the kernel's
        messages: whoever reads it can run code in the kernel, so it must be kept as a
        connection file is, readable by its user alone.
        """
        info = dict(await super().get_provisioner_info())
        record = self._known()
        return info if record is None else {**info, **record.told()}

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Serve a kernel again whose process has gone, where `get_provisioner_info` was called.

        The manager then has that kernel, with its connection file, its endpoints and its key.
        Called by gateways at their start, on a new provisioner.

        Raises
        ------
        KernelLaunchError
            The kernel has ended, it ends with the process that started it, or that one lives.
        """
        await super().load_provisioner_info(provisioner_info)
        try:
            record = KernelRecord.of(provisioner_info)
            settled = settle(self._asked(), door="kernel", variables=tuple(self.kernel_spec.env))
            self._take_up(record)
            thread = EngineThread.current()
            await thread.call(
                functools.partial(self._attach, thread, settled.endpoint(), settled, record)
            )
            self._keep_record()
        except BaseException as error:
            self._session = None
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.remove()
            if isinstance(error, SandboxError):
                raise launch_error(error) from error
            raise
        self._has_process = self._ran_before = True

    def _take_up(self, record: KernelRecord) -> None:
        """Give the manager the kernel's connection, and what a restart starts it with."""
        manager = self._manager
        info: dict[str, Any] = dict(record.connection_info)
        self.connection_info = cast(KernelConnectionInfo, info)
        self._ports_inside = kernel_ports(self.kernel_id)
        if info["transport"] == "ipc":
            self._folder = PrivateFolder(again=Path(info["ip"]).parent)
        manager.connection_file = record.connection_file
        for name in PORT_NAMES:
            setattr(manager, name, 0)
        manager.load_connection_info(self.connection_info)
        manager.write_connection_file(jupyter_session=Path(record.session).name)
        self._place = (record.session, record.folder)
        # What the manager notes at a start, and asks for at a restart.
        manager._attempted_start = True
        session = {"JPY_SESSION_NAME": record.session} if record.session else {}
        manager._launch_args = {"env": {**os.environ, **session}, "cwd": record.folder}

    async def _attach(
        self, thread: EngineThread, endpoint: Endpoint, settled: Order, record: KernelRecord
    ) -> None:
        """Take over the session of another process; runs in the engine's loop."""
        self._session = await KernelSession.attach(
            await thread.engine(endpoint),
            record.sandbox,
            owner=current_owner(),
            holder=record.holder,
            origin=record.origin,
            connection=self._inner_connection(Path(record.session).name),
            addresses=self._addresses(),
            limits=_limits(settled),
            timeout=settled.settings["startup_timeout"],
        )
        self._withdraw = thread.at_exit(self._close_at_exit)
        self._workspace = self._session.sandbox.spec.workspace

    def _known(self) -> KernelRecord | None:
        """Return what there is to know of the kernel that runs."""
        session = self._mine()
        if session is None or session.process is None:
            return None
        return KernelRecord(
            kernel_id=self.kernel_id,
            kernel_name=str(self._manager.kernel_name),
            connection_info=dict(self.connection_info),
            connection_file=str(Path(self._manager.connection_file).absolute()),
            sandbox=session.sandbox.id,
            holder=session.sandbox.holder,
            origin=session.process.origin,
            outlives=session.sandbox.spec.resumable,
            session=self._place[0],
            folder=str(Path(self._place[1]).absolute()),
        )

    def _keep_record(self) -> None:
        """Keep what is known of the kernel for this user's other processes."""
        old, self._record = self._record, None
        if old is not None:
            old.leave()
        record = self._known()
        if record is None:
            return
        try:
            self._record = RecordFile(record)
        except OSError as error:
            self.log.warning("jupyter sandbox attach will not find this kernel: %s", error)

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


def _snapshot_of(folder: str, order: Order) -> dict[str, Any]:
    """Return the fields of a spec whose new workspace begins as the notebook's folder (K9)."""
    if order.spec.template is not None:
        raise SandboxSpecRejectedError(
            "files",
            "snapshot",
            "a new workspace cannot begin both as the notebook's folder and as a template",
            "Leave one of `files` and `template` out.",
        )
    limit = order.spec.template_limit
    return {
        "template": str(Path(folder).absolute()),
        "template_ignore": True,
        "template_limit": FILES_LIMIT if limit is None else limit,
    }


def _limits(settled: Order) -> ZmtpLimits:
    return ZmtpLimits(settled.settings["max_message_bytes"], settled.settings["max_message_parts"])


def _check_kernelspec(given: Mapping[str, Any]) -> None:
    """Refuse what a kernelspec has wrong: Jupyter passes it on as arguments, and only warns.

    A mistyped limit would silently be no limit.
    """
    where = "the kernelspec"
    metadata = getattr(given.get("kernel_spec"), "metadata", None) or {}
    stanza = metadata.get("kernel_provisioner")
    for name in stanza if isinstance(stanza, dict) else ():
        if name not in _STANZA:
            shown = f"kernel_provisioner.{name}"
            raise SandboxSpecRejectedError(
                shown, None, f"there is no such entry (in {where})", "Known are: config."
            )
    for name, value in given.items():
        if name in _CONSTRUCTOR_ONLY:
            continue
        if name not in SETTINGS:
            raise unknown_setting(f"kernel_provisioner.config.{name}", name, where)
        if value is not None:
            check_setting(name, value, where)


def _check_application(config: Mapping[str, Any]) -> None:
    for section in (SandboxDefaults.__name__, SandboxProvisioner.__name__):
        for name in config.get(section, ()):
            if name not in SETTINGS:
                raise unknown_setting(f"{section}.{name}", name, "Jupyter's configuration")
