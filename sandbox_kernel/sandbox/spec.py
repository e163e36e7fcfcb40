"""What a caller asks for, and what a machine makes of it (B3, B5, B12, B14).

`SandboxSpec` is checked when it is made: a value that can never be honoured is refused there.
What depends on the engine (how many processors there are, which limits it enforces) is settled
by `resolve_limits`, still before anything is created.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NoReturn

from sandbox_kernel.amounts import parse_memory as parse_memory
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.errors import SandboxSpecRejectedError
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

VOLUME_SIZE: Final = 16 * MIB
"""Of the tmpfs that takes the place of each ``VOLUME`` of an image."""

_SMALLEST_MEMORY: Final = 64 * MIB
_SMALLEST_PIDS: Final = 32
_MACHINES: Final = frozenset({"x86_64", "amd64", "aarch64", "arm64"})

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,511}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")
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
        Name of a container runtime of the engine; by default the engine's default.
    lease_ttl
        Seconds without a sign of the owner after which the sandbox ends.
    max_lifetime
        Seconds after which it ends in any case; by default never.
    labels
        The caller's own labels.
    prefix
        What the container's name begins with.

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
    lease_ttl: float = 60.0
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
        _number("lease_ttl", self.lease_ttl, 2, 86400)
        _number("max_lifetime", self.max_lifetime, 1, 10 * 365 * 86400, optional=True)
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
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))
        object.__setattr__(self, "labels", MappingProxyType(dict(self.labels)))


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
    """

    nano_cpus: int
    memory: int
    pids: int
    tmpfs: int
    shm: int
    runtime: str
    apparmor: bool


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
    fixed = RUN_SIZE + volumes * VOLUME_SIZE
    total = 2 * tmpfs + shm + fixed
    if total > memory // 2:
        _refuse(
            "tmpfs_size",
            tmpfs,
            f"/tmp, /home/sbx, /dev/shm, /run and {volumes} image volumes come to {total} "  # noqa: S108
            f"bytes, more than half of mem_limit = {memory}",
            f"Set mem_limit to at least {2 * total}, or lower tmpfs_size and shm_size.",
        )
    return Limits(
        nano_cpus=round(cpu * 1e9),
        memory=memory,
        pids=spec.pids_limit,
        tmpfs=tmpfs,
        shm=shm,
        runtime=spec.runtime or str(info.get("DefaultRuntime") or ""),
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
    runtimes = info.get("Runtimes") or {}
    if spec.runtime is not None and spec.runtime not in runtimes:
        known = ", ".join(sorted(runtimes)) or "none"
        reason = f"the engine has no such runtime (it has: {known})"
        _refuse("runtime", spec.runtime, reason, "Configure it on the engine, or use another one.")


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


def _strings(setting: str, value: Any) -> list[tuple[str, str]]:
    """Return the items of a mapping; an error must not show the values, which are secrets."""
    items = list(value.items()) if isinstance(value, Mapping) else None
    if items is None or not all(isinstance(k, str) and isinstance(v, str) for k, v in items):
        _refuse(setting, None, "this must map names to texts", "Make every value a string.")
    return items


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
