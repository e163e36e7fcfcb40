"""What a caller asks for, and what a machine makes of it (B3, B5, B6, B8, B10 to B16).

`SandboxSpec` is checked when it is made: a value that can never be honoured is refused there.
What depends on the engine (how many processors there are, which limits it enforces) is settled
by `resolve_limits`, still before anything is created.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NoReturn

from sandbox_kernel.amounts import parse_memory as parse_memory
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.mounts import host_folder
from sandbox_kernel.sandbox.labels import PREFIX
from sandbox_kernel.sandbox.tiers import check_network

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB

DEFAULT_CPU: Final = 2.0
DEFAULT_MEMORY: Final = 2 * GIB
DEFAULT_TMPFS: Final = 128 * MIB
DEFAULT_SHM: Final = 64 * MIB

RUN_SIZE: Final = 4 * MIB
"""Of the tmpfs on ``/run``, where only the control uid can write."""

OUTPUT_LEAST: Final = MIB
"""Of the tmpfs on ``/output``."""

VOLUME_SIZE: Final = 16 * MIB
"""Of the tmpfs that takes the place of each ``VOLUME`` of an image."""

DEFAULT_PROJECT: Final = 32 * MIB

KEY_LIMIT: Final = 4096
"""Bytes of a workspace's key in UTF-8; it has to fit into a label."""

VM_RUNTIMES: Final = ("runsc", "kata", "kata-*", "io.containerd.runsc.*", "io.containerd.kata*")
"""Names under which engines know the runtimes that give a sandbox a kernel of its own."""

_LONGEST: Final = 10 * 365 * 86400
_MOST_DATA_SETS: Final = 16
_MOST_DEVICES: Final = 16
_MOST_MOUNTS: Final = 16
_SMALLEST_MEMORY: Final = 64 * MIB
_SMALLEST_PIDS: Final = 32
_MACHINES: Final = frozenset({"x86_64", "amd64", "aarch64", "arm64"})

# No part of a path is empty or begins with a dot: in an address that would be another image.
_IMAGE = re.compile(r"(?!.*/(?:[./]|$))[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,511}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")
_VOLUME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,254}")
_DEVICE = re.compile(
    r"gpus=(all|[1-9][0-9]{0,2})|[a-z0-9.-]+\.[a-z0-9.-]+/[A-Za-z0-9_.-]+=[A-Za-z0-9_.:-]+"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """One sandbox, as a caller wants it.

    Parameters
    ----------
    image
        Name of the image, which must be on the engine.
    network
        The tier: ``none`` is nothing but loopback; ``internal`` has an interface on which
        nobody answers; ``egress`` reaches what the firewall of the engine's machine lets out.
    dns
        IPv4 address of the one resolver of the tier ``egress``; by default the engine's own.
    require_egress_firewall
        Whether ``egress`` is refused until a probe has shown that the firewall holds.
    cpu_limit
        Processors, fractions allowed; by default 2, or what the machine has.
    mem_limit
        Memory in bytes, swap included; by default 2 GiB, or what the machine has.
    pids_limit
        Processes and threads.
    tmpfs_size
        Bytes of each of the memory-backed ``/tmp`` and ``/home/sbx``; by default 128 MiB, or
        an eighth of the memory where that is less.
    shm_size
        Bytes of ``/dev/shm``; by default 64 MiB, or a sixteenth of the memory.
    environment
        Variables for the code that runs in it. Their values are secrets: they are handed to
        processes, never written into the container's configuration.
    runtime
        Name of a container runtime of the engine; by default the engine's default, or with the
        isolation ``vm`` the first one that gives it.
    isolation
        The least that will do: ``container`` shares the kernel of the engine's machine, ``vm``
        has one of its own.
    disk_limit
        Bytes of the workspace, where the engine can enforce that; by default no limit.
    disk_soft_limit
        Bytes of the workspace where the engine cannot: it is measured from time to time, and the
        sandbox ends when it is found to be larger. By default it is not watched.
    durability
        ``ephemeral``: the workspace goes with the sandbox. ``persistent``: it stays, and whoever
        asks for its key again gets it again; whoever asks while it is in use shares the sandbox.
    workspace
        The key of a persistent workspace: any text, for example a notebook's path. Keys of
        different owners are never the same.
    template
        A folder of the caller's machine that each new workspace begins as a copy of. A workspace
        that holds nothing at all counts as new.
    template_ignore
        Whether what the template's ``.dockerignore`` and ``.gitignore`` name is left out.
    template_limit
        Bytes of the template; by default no limit.
    project
        A folder of the caller's machine of which a snapshot lies, read-only, in ``/project``. Its
        ``.dockerignore`` and ``.gitignore`` say what is left out.
    project_limit
        Bytes of that snapshot, which lies in memory.
    data_sets
        Volumes of the engine that appear, read-only, as ``/data/<name>``, by that name.
    mounts
        Folders of the engine's machine that appear as ``/mnt/<name>``, by that name: ``/path`` to
        be read, ``/path:rw`` to be written to. Only with an engine on this machine.
    devices
        ``gpus=all``, ``gpus=N``, or the name of a device as the engine's administrator has
        described it (``vendor.example/class=name``).
    lease_ttl
        Seconds without a sign of the owner after which the owner counts as gone.
    resumable
        Seconds for which the sandbox outlives its owner, so that it can be connected to again.
    idle_ttl
        Seconds without use after which it ends; by default never.
    max_lifetime
        Seconds after which it ends in any case; by default never.
    labels
        The caller's own labels.
    prefix
        What the names of the container and of a persistent workspace's volume begin with.

    Raises
    ------
    SandboxSpecRejectedError
        A value can never be honoured.
    """

    image: str = DEFAULT_IMAGE
    network: str = "none"
    dns: str | None = None
    require_egress_firewall: bool = False
    cpu_limit: float | None = None
    mem_limit: int | None = None
    pids_limit: int = 256
    tmpfs_size: int | None = None
    shm_size: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    runtime: str | None = None
    isolation: str = "container"
    disk_limit: int | None = None
    disk_soft_limit: int | None = None
    durability: str = "ephemeral"
    workspace: str | None = None
    template: str | None = None
    template_ignore: bool = False
    template_limit: int | None = None
    project: str | None = None
    project_limit: int = DEFAULT_PROJECT
    data_sets: Mapping[str, str] = field(default_factory=dict, hash=False)
    mounts: Mapping[str, str] = field(default_factory=dict, hash=False)
    devices: tuple[str, ...] = ()
    lease_ttl: float = 60.0
    resumable: float = 0.0
    idle_ttl: float | None = None
    max_lifetime: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    prefix: str = "sbx-"

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not _IMAGE.fullmatch(self.image):
            _refuse("image", self.image, "this is not the name of an image", "Name an image.")
        check_network(self.network, self.dns, self.require_egress_firewall)
        _number("cpu_limit", self.cpu_limit, 0.01, 4096, optional=True)
        _whole("mem_limit", self.mem_limit, _SMALLEST_MEMORY, 1 << 60, optional=True)
        _whole("pids_limit", self.pids_limit, _SMALLEST_PIDS, 1 << 22)
        _whole("tmpfs_size", self.tmpfs_size, MIB, 1 << 60, optional=True)
        _whole("shm_size", self.shm_size, MIB, 1 << 60, optional=True)
        _whole("disk_limit", self.disk_limit, MIB, 1 << 60, optional=True)
        _whole("disk_soft_limit", self.disk_soft_limit, MIB, 1 << 60, optional=True)
        _whole("template_limit", self.template_limit, MIB, 1 << 60, optional=True)
        _whole("project_limit", self.project_limit, MIB, 1 << 60)
        _number("lease_ttl", self.lease_ttl, 2, 86400)
        _number("resumable", self.resumable, 0, _LONGEST)
        _number("idle_ttl", self.idle_ttl, 2, _LONGEST, optional=True)
        _number("max_lifetime", self.max_lifetime, 1, _LONGEST, optional=True)
        if self.isolation not in ("container", "vm"):
            remedy = "Use 'container' or 'vm'."
            _refuse("isolation", self.isolation, "there is no such isolation", remedy)
        _check_workspace(self.durability, self.workspace)
        for setting, value in (("template", self.template), ("project", self.project)):
            if value is not None and not (isinstance(value, str) and value and "\0" not in value):
                _refuse(setting, value, "this is not the path of a folder", "Name a folder.")
        for setting, value in (("runtime", self.runtime), ("prefix", self.prefix)):
            if value is not None and not (isinstance(value, str) and _WORD.fullmatch(value)):
                _refuse(setting, value, "only letters, digits and _.- are possible", "Change it.")
        for name, text in _strings("environment", self.environment):
            if not _VARIABLE.fullmatch(name):
                _refuse("environment", name, "not the name of a variable", "Change the name.")
            if "\0" in text:
                remedy = "Encode the value."
                _refuse(f"environment[{name!r}]", None, "the value holds a zero byte", remedy)
        for name, _ in _strings("labels", self.labels):
            if name.startswith(PREFIX):
                _refuse("labels", name, f"names in {PREFIX}* are reserved", "Choose another name.")
            if not name or len(name) > 255 or _CONTROL.search(name):
                _refuse("labels", name, "this cannot be a label's name", "Choose another name.")
        _check_data_sets(self.data_sets)
        _check_mounts(self.mounts)
        object.__setattr__(self, "devices", _checked_devices(self.devices))
        object.__setattr__(self, "data_sets", MappingProxyType(dict(self.data_sets)))
        object.__setattr__(self, "mounts", MappingProxyType(dict(self.mounts)))
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))
        object.__setattr__(self, "labels", MappingProxyType(dict(self.labels)))

    @property
    def is_shared(self) -> bool:
        """Whether the sandbox may have several holders, or outlive one."""
        return self.durability == "persistent" or self.resumable > 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox gets on a certain machine; every number is settled.

    Parameters
    ----------
    nano_cpus
        Processors in billionths.
    memory
        Bytes, swap included.
    pids
        Processes and threads.
    tmpfs, shm
        Bytes of each of ``/tmp`` and ``/home/sbx``, and of ``/dev/shm``.
    runtime
        Name of the runtime; empty where the engine does not name its default.
    apparmor
        Whether the engine confines with AppArmor.
    disk
        Bytes of the workspace; 0 for no limit.
    project
        Bytes of the memory-backed ``/project``; 0 where there is none.
    output
        Bytes of the memory-backed ``/output``, for artifacts.
    """

    nano_cpus: int
    memory: int
    pids: int
    tmpfs: int
    shm: int
    runtime: str
    apparmor: bool
    disk: int = 0
    project: int = 0
    output: int = 0


def resolve_limits(spec: SandboxSpec, info: Mapping[str, Any], volumes: int = 0) -> Limits:
    """Settle what a spec means on an engine.

    Parameters
    ----------
    spec
        What is wanted.
    info
        The engine's answer to ``/info``.
    volumes
        How many ``VOLUME`` s the image has; each becomes a small tmpfs.

    Raises
    ------
    SandboxSpecRejectedError
        The machine is smaller, or the engine would accept a limit and not enforce it.
    """
    _check_enforcement(spec, info)
    processors = float(info.get("NCPU") or 0)
    installed = int(info.get("MemTotal") or 0)
    cpu = min(DEFAULT_CPU, processors) if spec.cpu_limit is None else spec.cpu_limit
    memory = min(DEFAULT_MEMORY, installed) if spec.mem_limit is None else spec.mem_limit
    if cpu > processors:
        reason = f"the engine's machine has {processors:g} processors"
        _refuse("cpu_limit", cpu, reason, f"Use at most {processors:g}.")
    if memory > installed:
        reason = f"the engine's machine has {installed} bytes of memory"
        _refuse("mem_limit", memory, reason, f"Use at most {installed}.")
    tmpfs = min(DEFAULT_TMPFS, memory // 8) if spec.tmpfs_size is None else spec.tmpfs_size
    shm = min(DEFAULT_SHM, memory // 16) if spec.shm_size is None else spec.shm_size
    # What fills a tmpfs counts as memory. Were there room for all of it, a full /tmp would have
    # every later process killed, those included that could empty it.
    project = 0 if spec.project is None else spec.project_limit
    total = 2 * tmpfs + shm + RUN_SIZE + volumes * VOLUME_SIZE + project
    # Artifacts get as much as /tmp, or what the others leave of the half.
    output = max(min(tmpfs, memory // 2 - total), OUTPUT_LEAST)
    total += output
    if total > memory // 2:
        _refuse(
            "tmpfs_size",
            tmpfs,
            f"/tmp, /home/sbx, /dev/shm, /run, /output, {volumes} image volumes and {project} "  # noqa: S108
            f"bytes for /project come to {total} bytes, more than half of mem_limit = {memory}",
            f"Set mem_limit to at least {2 * total}, or lower tmpfs_size, shm_size and "
            "project_limit.",
        )
    return Limits(
        nano_cpus=round(cpu * 1e9),
        memory=memory,
        pids=spec.pids_limit,
        tmpfs=tmpfs,
        shm=shm,
        runtime=_runtime(spec, info),
        disk=spec.disk_limit or 0,
        project=project,
        output=output,
        apparmor=any(str(o) == "name=apparmor" for o in info.get("SecurityOptions") or ()),
    )


def _check_enforcement(spec: SandboxSpec, info: Mapping[str, Any]) -> None:
    """Refuse an engine that takes a limit, says nothing, and does not keep it."""
    remedy = "Use an engine that can: a rootful one, or a rootless one with cgroup v2."
    cgroups = str(info.get("CgroupDriver") or "none")
    lacking = cgroups == "none"
    for setting, value, keys in (
        ("mem_limit", spec.mem_limit, ("MemoryLimit", "SwapLimit")),
        ("cpu_limit", spec.cpu_limit, ("CpuCfsPeriod", "CpuCfsQuota")),
        ("pids_limit", spec.pids_limit, ("PidsLimit",)),
    ):
        missing = [key for key in keys if info.get(key) is not True]
        if lacking or missing:
            which = "CgroupDriver none" if lacking else " and ".join(missing) + " missing"
            _refuse(setting, value, f"the engine does not enforce this limit ({which})", remedy)
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    if not any(option.split(",")[0] == "name=seccomp" for option in options):
        reason = "the engine filters no system calls (no seccomp among its security options)"
        _refuse("security", None, reason, "Use an engine and a kernel with seccomp.")
    machine = str(info.get("Architecture") or "")
    if machine not in _MACHINES:
        reason = "the system call filter knows x86-64 and 64-bit ARM only"
        _refuse("architecture", machine, reason, "Use an engine on such a machine.")


def _runtime(spec: SandboxSpec, info: Mapping[str, Any]) -> str:
    """Choose the runtime, one that isolates as much as was asked for (B14)."""
    runtimes = sorted(str(name) for name in info.get("Runtimes") or ())
    known = ", ".join(runtimes) or "none"
    if spec.runtime is not None and spec.runtime not in runtimes:
        reason = f"the engine has no such runtime (it has: {known})"
        _refuse("runtime", spec.runtime, reason, "Configure it on the engine, or use another one.")
    chosen = spec.runtime or str(info.get("DefaultRuntime") or "")
    if spec.isolation == "vm" and not is_vm(chosen):
        if spec.runtime is not None:
            reason = f"the runtime {chosen!r} shares the kernel of the engine's machine"
            _refuse("isolation", "vm", reason, "Leave the runtime out, or name one that does not.")
        able = [name for name in runtimes if is_vm(name)]
        if not able:
            reason = f"the engine has no runtime that gives a kernel of its own (it has: {known})"
            _refuse("isolation", "vm", reason, "Install gVisor (runsc) or Kata on the engine.")
        return able[0]
    return chosen


def is_vm(runtime: str) -> bool:
    """Whether a runtime gives a sandbox a kernel of its own, by the name that engines give it."""
    return any(fnmatch.fnmatchcase(runtime, pattern) for pattern in VM_RUNTIMES)


def _check_workspace(durability: object, key: object) -> None:
    if durability not in ("ephemeral", "persistent"):
        remedy = "Use 'ephemeral' or 'persistent'."
        _refuse("durability", durability, "there is no such durability", remedy)
    if durability == "ephemeral":
        if key is not None:
            reason = "an ephemeral workspace has no key"
            _refuse("workspace", key, reason, "Set durability to 'persistent', or leave it out.")
        return
    if not isinstance(key, str) or not key:
        reason = "a persistent workspace needs a key, by which it is found again"
        _refuse("workspace", key, reason, "Set it to a text, for example the notebook's path.")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        # Shown with its escapes; the text itself could not be printed.
        _refuse("workspace", key, "this is no valid Unicode text", "Use another key.")
    if size > KEY_LIMIT:
        reason = f"a key has at most {KEY_LIMIT} bytes, and this one has {size}"
        _refuse("workspace", f"{key[:40]}…", reason, "Use a shorter key, for example a digest.")


def _check_data_sets(data_sets: object) -> None:
    items = _strings("data_sets", data_sets)
    if len(items) > _MOST_DATA_SETS:
        remedy = f"Use at most {_MOST_DATA_SETS}."
        _refuse("data_sets", len(items), "there are too many data sets", remedy)
    for name, volume in items:
        if not _WORD.fullmatch(name):
            reason = "a data set's name is letters, digits and _.-"
            _refuse("data_sets", name, reason, "Change the name.")
        if not _VOLUME.fullmatch(volume):
            _refuse("data_sets", volume, "this is not the name of a volume", "Name a volume.")


def _check_mounts(mounts: object) -> None:
    items = _strings("mounts", mounts)
    if len(items) > _MOST_MOUNTS:
        _refuse("mounts", len(items), "there are too many mounts", f"Use at most {_MOST_MOUNTS}.")
    for name, folder in items:
        if not _WORD.fullmatch(name):
            reason = "a mount's name is letters, digits and _.-"
            _refuse("mounts", name, reason, "Change the name.")
        host_folder(folder, f"mounts[{name!r}]")


def _checked_devices(devices: object) -> tuple[str, ...]:
    if isinstance(devices, str) or not isinstance(devices, list | tuple):
        _refuse("devices", devices, "this is not a list of devices", "Use e.g. ['gpus=all'].")
    for device in devices:
        if not isinstance(device, str) or not _DEVICE.fullmatch(device):
            remedy = "Use 'gpus=all', 'gpus=N' or 'vendor.example/class=name'."
            _refuse("devices", device, "this is not the name of a device", remedy)
    if len(devices) > _MOST_DEVICES or len(set(devices)) < len(devices):
        _refuse("devices", list(devices), "there are too many, or one twice", "Name each once.")
    if sum(device.startswith("gpus=") for device in devices) > 1:
        _refuse("devices", list(devices), "it counts GPUs twice", "Use one 'gpus=' only.")
    return tuple(devices)


def _number(setting: str, value: Any, least: float, most: float, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(setting, value, "this is not a number", f"Use {least:g} to {most:g}.")
    if not least <= value <= most:
        _refuse(setting, value, "this is out of range", f"Use {least:g} to {most:g}.")


def _whole(setting: str, value: Any, least: int, most: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(setting, value, "this is not a whole number", f"Use at least {least}.")
    if not least <= value <= most:
        _refuse(setting, value, "this is out of range", f"Use {least} to {most}.")


def _strings(setting: str, value: object) -> list[tuple[str, str]]:
    """Return the items of a mapping; an error must not show the values, which are secrets."""
    items = list(value.items()) if isinstance(value, Mapping) else None
    if items is None or not all(isinstance(k, str) and isinstance(v, str) for k, v in items):
        _refuse(setting, None, "this must map names to texts", "Make every value a string.")
    return items


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
