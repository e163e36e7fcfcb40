"""`SandboxDefaults`: every setting, with its type, its built-in default and what it is for.

A setting is a trait of this class and nothing else: the environment group, the files, the
kernelspec and ``jupyter sandbox config show`` are made from the traits and their tags. A trait
that is `None` says nothing, so that the next lower layer decides.

The tags of a trait: ``part`` is who uses the setting (``sandbox``: `SandboxSpec`; ``engine``:
`EngineSettings`; ``image``, ``command``, ``kernel``), ``built_in`` what it is when nobody says
anything, ``since`` the version that brought it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, cast

from traitlets import (
    Bool,
    CaselessStrEnum,
    Dict,
    Float,
    Integer,
    List,
    TraitError,
    TraitType,
    Unicode,
    Union,
)
from traitlets.config import Configurable

from sandbox_kernel.amounts import parse_memory
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.document import ISOLATIONS, closest

__all__ = [
    "DEFAULT_IMAGE",
    "R_IMAGE",
    "SETTINGS",
    "SandboxDefaults",
    "Setting",
    "check_setting",
    "unknown_setting",
]

DEFAULT_IMAGE: Final = "sandbox-kernel/python:latest"
R_IMAGE: Final = "sandbox-kernel/r:latest"
"""What `jupyter sandbox build` makes."""

Part = Literal["sandbox", "engine", "image", "command", "kernel"]

_GIB: Final = 1024**3
_MIB: Final = 1024**2
_PATHS: Final = frozenset({"tls_cert_path", "tls_key_path", "tls_ca_path"})
_SECRET: Final = frozenset({"environment"})


class SandboxDefaults(Configurable):
    """Settings of every sandbox, however it is made. Names follow DockerSpawner's."""

    # -- the sandbox ------------------------------------------------------------------------------

    image = Unicode(
        None,
        allow_none=True,
        help="""Image that sandboxes run from. A kernel's image must hold the kernel, and python3,
        version 3.8 or later, for the relay. The default is what `jupyter sandbox build` makes.

        Example: 'sandbox-kernel/python:ml'""",
    ).tag(config=True, part="sandbox", built_in=DEFAULT_IMAGE, since="0.1")
    network = Unicode(
        None,
        allow_none=True,
        help="""Network tier: 'none' is loopback only, 'internal' has an interface on which nobody
        answers, 'egress' reaches what the firewall of the engine's machine lets out. The default
        is 'none', since code that cannot be trusted has nobody to talk to.""",
    ).tag(config=True, part="sandbox", built_in="none", since="0.1")
    dns = Unicode(
        None,
        allow_none=True,
        help="""IPv4 address of the one resolver of the tier 'egress'. By default the engine's own.

        Example: '192.0.2.53'""",
    ).tag(config=True, part="sandbox", built_in=None, since="0.2")
    require_egress_firewall = Bool(
        None,
        allow_none=True,
        help="""Refuse the tier 'egress' until a probe has shown that the firewall of the engine's
        machine holds. Off by default, since the proof takes seconds; turn it on where the tier
        is offered to others.""",
    ).tag(config=True, part="sandbox", built_in=False, since="0.2")
    cpu_limit = Float(
        None,
        allow_none=True,
        help="""Processors, fractions allowed. By default 2, or what the engine's machine has.

        Example: 1.5""",
    ).tag(config=True, part="sandbox", built_in=2.0, since="0.1")
    mem_limit = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="""Memory, swap included, in bytes or with a unit (K, M, G, T). By default 2 GiB, or
        what the engine's machine has.

        Example: '4G'""",
    ).tag(config=True, part="sandbox", built_in=2 * _GIB, since="0.1")
    pids_limit = Integer(
        None,
        allow_none=True,
        help="""Processes and threads together. The default of 256 leaves room for numerical
        libraries, and none for a fork bomb.""",
    ).tag(config=True, part="sandbox", built_in=256, since="0.1")
    tmpfs_size = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="""Size of each of the memory-backed /tmp and home folder. What lies there counts as
        memory; by default 128 MiB, or an eighth of the memory where that is less.

        Example: '256M'""",
    ).tag(config=True, part="sandbox", built_in=128 * _MIB, since="0.2")
    shm_size = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="""Size of /dev/shm. By default 64 MiB, or a sixteenth of the memory where that is
        less; libraries that share arrays between processes want more.

        Example: '512M'""",
    ).tag(config=True, part="sandbox", built_in=64 * _MIB, since="0.2")
    disk_limit = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="""Disk space, where the engine can enforce it; refused where it cannot. No limit by
        default.

        Example: '10G'""",
    ).tag(config=True, part="sandbox", built_in=None, since="0.2")
    disk_soft_limit = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="""Disk space for the workspace where the engine cannot enforce a limit: it is measured
        about three times a minute, and the sandbox ends when it is found to be larger. Not
        watched by default.

        Example: '10G'""",
    ).tag(config=True, part="sandbox", built_in=None, since="0.2")
    project_limit = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="""Most that the snapshot of a project may take, which lies in memory.

        Example: '200M'""",
    ).tag(config=True, part="sandbox", built_in=32 * _MIB, since="0.2")
    runtime = Unicode(
        None,
        allow_none=True,
        help="""A container runtime of the engine. By default the engine's own default.

        Example: 'runsc'""",
    ).tag(config=True, part="sandbox", built_in=None, since="0.1")
    isolation = CaselessStrEnum(
        list(ISOLATIONS),
        default_value=None,
        allow_none=True,
        help="""The least isolation: 'container' shares the kernel of the engine's machine, 'vm' has
        one of its own and needs a runtime that gives it (gVisor, Kata).""",
    ).tag(config=True, part="sandbox", built_in="container", since="0.2")
    template = Unicode(
        None,
        allow_none=True,
        help="""A folder of this machine that each new workspace begins as a copy of. For a kernel,
        a relative path begins in the notebook's folder.

        Example: '/srv/courses/physics/template'""",
    ).tag(config=True, part="sandbox", built_in=None, since="0.2")
    template_ignore = Bool(
        None,
        allow_none=True,
        help="""Leave out of the template what its .dockerignore and .gitignore name. Off by
        default, since a template is made to be copied as it is.""",
    ).tag(config=True, part="sandbox", built_in=False, since="0.2")
    template_limit = Union(
        [Integer(), Unicode()],
        default_value=None,
        allow_none=True,
        help="""Most that the template may take, in bytes or with a unit. No limit by default, but
        256 MiB for a kernel's `files`.

        Example: '1G'""",
    ).tag(config=True, part="sandbox", built_in=None, since="0.2")
    project = Unicode(
        None,
        allow_none=True,
        help="""A folder of this machine of which a snapshot lies, read-only, in /project; what its
        .dockerignore and .gitignore name stays outside. For a kernel, a relative path begins in
        the notebook's folder.

        Example: '.'""",
    ).tag(config=True, part="sandbox", built_in=None, since="0.2")
    data_sets = Dict(
        default_value=None,
        key_trait=Unicode(),
        value_trait=Unicode(),
        allow_none=True,
        help="""Volumes of the engine that appear, read-only, as /data/NAME. Only those that the
        policy grants. Layers add to each other, name by name.

        Example: {'iris': 'course-iris'}""",
    ).tag(config=True, part="sandbox", built_in={}, since="0.2")
    devices = List(
        Unicode(),
        default_value=None,
        allow_none=True,
        help="""Devices for the code in the sandbox, of those that the policy grants: 'gpus=all',
        'gpus=2', or a name that the engine's administrator has described.

        Example: ['gpus=1']""",
    ).tag(config=True, part="sandbox", built_in=[], since="0.2")
    mounts = Dict(
        default_value=None,
        key_trait=Unicode(),
        value_trait=Unicode(),
        allow_none=True,
        help="""Folders of the engine's machine that appear as /mnt/NAME: read-only, or with ':rw'
        to be written to. Only with an engine on this machine, and only those that the policy
        grants. Layers add to each other, name by name.

        Example: {'shared': '/srv/shared', 'results': '/srv/results:rw'}""",
    ).tag(config=True, part="sandbox", built_in={}, since="0.2")
    environment = Dict(
        default_value=None,
        key_trait=Unicode(),
        value_trait=Unicode(),
        allow_none=True,
        help="""Variables for the code in the sandbox. Layers add to each other, name by name.
        Values are secrets: they show neither in the container's configuration nor in errors.

        Example: {'OMP_NUM_THREADS': '2'}""",
    ).tag(config=True, part="sandbox", built_in={}, since="0.1")
    lease_ttl = Float(
        None,
        allow_none=True,
        help="""Seconds after which the engine ends a sandbox whose owner is not heard of, for
        example since it was suspended or cut off. A killed owner is noticed at once.""",
    ).tag(config=True, part="sandbox", built_in=60.0, since="0.1")
    resumable = Float(
        None,
        allow_none=True,
        help="""Seconds for which a sandbox outlives its owner, so that it can be connected to
        again. 0 by default: it ends with its owner.""",
    ).tag(config=True, part="sandbox", built_in=0.0, since="0.2")
    idle_ttl = Float(
        None,
        allow_none=True,
        help="Seconds without use after which a sandbox ends. Never by default.",
    ).tag(config=True, part="sandbox", built_in=None, since="0.2")
    max_lifetime = Float(
        None,
        allow_none=True,
        help="Seconds after which a sandbox ends in any case. Never by default.",
    ).tag(config=True, part="sandbox", built_in=None, since="0.1")
    prefix = Unicode(
        None,
        allow_none=True,
        help="""What the names of containers and volumes begin with, so that one engine can serve
        several installations.""",
    ).tag(config=True, part="sandbox", built_in="sbx-", since="0.2")

    # -- the engine -------------------------------------------------------------------------------

    host = Unicode(
        None,
        allow_none=True,
        help="""Where the Docker engine listens: unix:///path, tcp://host[:port] or
        https://host[:port]. By default DOCKER_HOST, the current docker context or the usual
        sockets, in this order.

        Example: 'tcp://engine.example.org:2376'""",
    ).tag(config=True, part="engine", built_in=None, since="0.1")
    tls_cert_path = Unicode(
        None,
        allow_none=True,
        help="File of the client's certificate; by default /certs/client/cert.pem.",
    ).tag(config=True, part="engine", built_in=None, since="0.1")
    tls_key_path = Unicode(
        None,
        allow_none=True,
        help="""File of the client's key, which nobody else may be able to read; by default
        /certs/client/key.pem.""",
    ).tag(config=True, part="engine", built_in=None, since="0.1")
    tls_ca_path = Unicode(
        None,
        allow_none=True,
        help="""File of the authority that signed the engine's certificate; by default
        /certs/client/ca.pem.""",
    ).tag(config=True, part="engine", built_in=None, since="0.1")
    allow_insecure_engine = Bool(
        None,
        allow_none=True,
        help="""Allow a plain connection to an engine on another machine. Off by default: whoever is
        on the way owns that machine.""",
    ).tag(config=True, part="engine", built_in=False, since="0.1")
    require_explicit_host = Bool(
        None,
        allow_none=True,
        help="""Never look an engine up: only `host` counts. Once a layer has turned it on, no
        higher one can turn it off.""",
    ).tag(config=True, part="engine", built_in=False, since="0.1")

    # -- images, commands, kernels ----------------------------------------------------------------

    pull_policy = CaselessStrEnum(
        ["never", "missing", "always"],
        default_value=None,
        allow_none=True,
        help="""When to pull the image. 'never' by default, since a start that waits for a large
        pull looks like a hang; pull it beforehand.""",
    ).tag(config=True, part="image", built_in="never", since="0.1")
    timeout = Float(
        None,
        allow_none=True,
        help="Seconds that a command may take which does not say otherwise.",
    ).tag(config=True, part="command", built_in=120.0, since="0.2")
    max_timeout = Float(
        None, allow_none=True, help="The longest timeout in seconds that a command may ask for."
    ).tag(config=True, part="command", built_in=3600.0, since="0.2")
    workspace = Unicode(
        None,
        allow_none=True,
        help="""Which workspace a kernel gets. 'ephemeral' goes with its sandbox; 'notebook' is
        that of the notebook, 'user' one for all notebooks of a person, and any other text the
        name of one, for all of that person's kernels that name it. All but the first outlive
        sandbox and server.

        Example: 'notebook'""",
    ).tag(config=True, part="kernel", built_in="ephemeral", since="0.2")
    files = CaselessStrEnum(
        ["none", "snapshot"],
        default_value=None,
        allow_none=True,
        help="""Which files of the notebook's folder a kernel sees. With 'snapshot' each new
        workspace begins as a copy of the folder, without what .dockerignore and .gitignore name and
        up to `template_limit`; what is written stays in the sandbox. 'none' by default: nothing
        of this machine enters a sandbox unasked.

        Example: 'snapshot'""",
    ).tag(config=True, part="kernel", built_in="none", since="0.2")
    env_keep = List(
        Unicode(),
        default_value=None,
        allow_none=True,
        help="""Names of the server's variables that a kernel gets too. None by default: the
        server's environment holds its tokens.

        Example: ['LANG', 'TZ']""",
    ).tag(config=True, part="kernel", built_in=[], since="0.1")
    startup_timeout = Float(
        None, allow_none=True, help="Seconds that a kernel has to start listening."
    ).tag(config=True, part="kernel", built_in=60.0, since="0.1")
    max_message_bytes = Integer(
        None,
        allow_none=True,
        help="""Largest message from a kernel, in bytes; a larger one is left out and logged, since
        nothing behind this bounds what the server would have to hold.""",
    ).tag(config=True, part="kernel", built_in=64 * _MIB, since="0.1")
    max_message_parts = Integer(
        None, allow_none=True, help="Most parts of one message from a kernel."
    ).tag(config=True, part="kernel", built_in=4096, since="0.1")
    local_transport = CaselessStrEnum(
        ["ipc", "tcp"],
        default_value=None,
        allow_none=True,
        help="""Where clients on this machine connect: 'ipc' is Unix sockets in a private folder,
        'tcp' is ports on loopback that every local user can reach. 'ipc' by default, but for
        Windows.""",
    ).tag(config=True, part="kernel", built_in="tcp" if os.name == "nt" else "ipc", since="0.1")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one setting.

    Parameters
    ----------
    name
        Of the trait.
    part
        Who uses it.
    built_in
        What it is when nobody says anything; `None` where the engine or its machine decides.
    help
        For people.
    since
        The version that brought it.
    in_environment
        Whether the environment group can hold it.
    """

    name: str
    part: Part
    built_in: object
    help: str
    since: str
    in_environment: bool

    @property
    def is_memory(self) -> bool:
        """Whether it is an amount of memory."""
        return isinstance(_TRAITS[self.name], Union)

    @property
    def is_secret(self) -> bool:
        """Whether its values must not be shown."""
        return self.name in _SECRET

    @property
    def trait(self) -> TraitType[Any, Any]:
        """Its type."""
        return _TRAITS[self.name]


_TRAITS: Final[Mapping[str, TraitType[Any, Any]]] = {
    name: trait for name, trait in vars(SandboxDefaults).items() if isinstance(trait, TraitType)
}

SETTINGS: Final[Mapping[str, Setting]] = {
    name: Setting(
        name=name,
        part=cast(Part, trait.metadata["part"]),
        built_in=trait.metadata["built_in"],
        help=" ".join(trait.help.split()),
        since=trait.metadata["since"],
        in_environment=not isinstance(trait, Dict | List),
    )
    for name, trait in _TRAITS.items()
}
"""Every setting, by name."""


def check_setting(name: str, value: object, where: str = "") -> Any:
    """Return a value in the form that it is used in.

    Parameters
    ----------
    name
        A name in `SETTINGS`.
    value
        As it was written; not `None`.
    where
        The file or variable that holds it, for the text of an error.

    Raises
    ------
    SandboxSpecRejectedError
        It is of the wrong kind. What may be a secret is not repeated.
    """
    setting = SETTINGS[name]
    place = f" (in {where})" if where else ""

    def refuse(reason: str, remedy: str, shown: object) -> NoReturn:
        raise SandboxSpecRejectedError(name, shown, f"{reason}{place}", remedy)

    if name in _PATHS:
        return _path(value, refuse)
    try:
        holder = SandboxDefaults(**{name: value})
    except (TraitError, ValueError, TypeError):
        shown = None if setting.is_secret else value
        expected = setting.trait.info().removesuffix(" or None")
        refuse(f"this must be {expected}", "Correct the value.", shown)
    checked = getattr(holder, name)
    if setting.is_memory:
        try:
            return parse_memory(checked, name)
        except SandboxSpecRejectedError as error:
            refuse(error.reason, error.remedy, value)
    return checked


def _path(value: Any, refuse: Any) -> str:
    # Somebody who pastes the certificate itself gets told without seeing it repeated.
    if isinstance(value, str) and "-----BEGIN" in value:
        refuse("this holds key material, not a path", "Write it to a file and name the file.", None)
    if not isinstance(value, str | os.PathLike):
        refuse("this must be a path", "Give the file's absolute path.", None)
    path = Path(value).expanduser()
    if not path.is_absolute():
        refuse("this is not an absolute path", "Give the file's absolute path.", str(value))
    return str(path)


def unknown_setting(shown: str, name: str, where: str) -> SandboxSpecRejectedError:
    """Return the error for a setting that does not exist.

    Its value is left out: a misplaced secret would end up in a notebook.

    Parameters
    ----------
    shown
        What the error calls it.
    name
        Its name, to find out what may have been meant.
    where
        What holds it.
    """
    return SandboxSpecRejectedError(
        shown, None, f"there is no such setting (in {where})", closest(name, tuple(SETTINGS))
    )
