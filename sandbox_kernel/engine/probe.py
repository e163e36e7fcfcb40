"""Can this engine be used, and what is it? (features E4 and E7).

`probe` answers within a few seconds: with a report, or with an error whose kind tells the
causes apart and whose text ends with what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.faults import describe, remedy
from sandbox_kernel.errors import SandboxEngineTimeoutError, SandboxUnavailableError

__all__ = ["ProbeReport", "probe"]

PROBE_TIMEOUT: Final = 5.0

_LIMITS = {
    "memory": "MemoryLimit",
    "swap": "SwapLimit",
    "cpu": "CpuCfsQuota",
    "pids": "PidsLimit",
}


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What an engine that can be used says of itself.

    Parameters
    ----------
    endpoint
        Where it is and which rule chose it.
    product, version, api_version
        ``Docker`` or ``Podman``, its version, and the API version that is spoken.
    operating_system, architecture, kernel
        Its machine.
    cpus, memory
        Processors and bytes of that machine.
    cgroup_driver, cgroup_version
        How limits are enforced; the driver ``none`` enforces none.
    unenforced_limits
        Which of ``memory``, ``swap``, ``cpu`` and ``pids`` it accepts without effect.
    runtimes, default_runtime
        The container runtimes that may be asked for.
    seccomp, userns, rootless
        Whether it filters system calls, remaps users, runs without root.
    security_options
        As the engine lists them.
    warnings
        As the engine words them.
    """

    endpoint: Endpoint
    product: str
    version: str
    api_version: str
    operating_system: str
    architecture: str
    kernel: str
    cpus: int
    memory: int
    cgroup_driver: str
    cgroup_version: str
    unenforced_limits: tuple[str, ...]
    runtimes: tuple[str, ...]
    default_runtime: str
    seccomp: bool
    userns: bool
    rootless: bool
    security_options: tuple[str, ...]
    warnings: tuple[str, ...]


async def probe(endpoint: Endpoint, timeout: float = PROBE_TIMEOUT) -> ProbeReport:
    """Find out whether an engine can be used.

    Parameters
    ----------
    endpoint
        The engine.
    timeout
        Bound of the whole, in seconds.

    Raises
    ------
    SandboxUnavailableError
        It cannot; `kind` says why: ``no-socket``, ``permission-denied``, ``refused``, ``tls``,
        ``not-docker``, ``api-too-old``, ``silent`` or ``lost``.
    """
    engine = Engine(endpoint)
    try:
        async with asyncio.timeout(timeout):
            await engine.open(timeout)
            version, info = await asyncio.gather(engine.version(), engine.info())
    except SandboxEngineTimeoutError as error:
        raise _silent(endpoint, timeout) from error
    except TimeoutError as error:
        raise _silent(endpoint, timeout) from error
    finally:
        await engine.close()
    return report(endpoint, engine.api_version, version, info)


def _silent(endpoint: Endpoint, timeout: float) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        "silent",
        f"The Docker engine {describe(endpoint)} gave no answer within {timeout:g} s",
        remedy("silent", endpoint),
    )


def report(
    endpoint: Endpoint, api_version: str, version: Mapping[str, Any], info: Mapping[str, Any]
) -> ProbeReport:
    """Read a report out of the engine's answers."""
    options = tuple(str(option) for option in info.get("SecurityOptions") or ())
    names = {option.partition(",")[0] for option in options}
    driver = str(info.get("CgroupDriver") or "")
    off = driver == "none"
    components = version.get("Components")
    named = [str(c.get("Name", "")) for c in components or () if isinstance(c, Mapping)]
    return ProbeReport(
        endpoint=endpoint,
        product="Podman" if any("Podman" in name for name in named) else "Docker",
        version=str(version.get("Version") or ""),
        api_version=api_version,
        operating_system=str(info.get("OperatingSystem") or ""),
        architecture=str(info.get("Architecture") or ""),
        kernel=str(info.get("KernelVersion") or ""),
        cpus=int(info.get("NCPU") or 0),
        memory=int(info.get("MemTotal") or 0),
        cgroup_driver=driver,
        cgroup_version=str(info.get("CgroupVersion") or ""),
        # With no cgroup driver the engine still claims each limit, and applies none.
        unenforced_limits=tuple(
            limit for limit, key in _LIMITS.items() if off or info.get(key) is False
        ),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        default_runtime=str(info.get("DefaultRuntime") or ""),
        seccomp="name=seccomp" in names,
        userns="name=userns" in names,
        rootless="name=rootless" in names,
        security_options=options,
        warnings=tuple(str(warning) for warning in info.get("Warnings") or ()),
    )
