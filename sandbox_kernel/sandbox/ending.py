"""Why a sandbox ended, for programs and for people (K4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from sandbox_kernel.sandbox.container import (
    grace_seconds,
    idle_seconds,
    lease_seconds,
    lifetime_seconds,
)
from sandbox_kernel.sandbox.lease import IDLE, LIFETIME, NO_CLOCK, RELEASED, SILENCE
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec

EndKind = Literal[
    "removed",
    "out-of-memory",
    "disk-full",
    "lease-expired",
    "lifetime",
    "idle",
    "taken-over",
    "exited",
    "engine-lost",
]
"""With ``taken-over`` the sandbox lives on, and is somebody else's."""

_KILLED: Final = 137


@dataclass(frozen=True, slots=True)
class EndReason:
    """Why a sandbox ended.

    Parameters
    ----------
    kind
        For programs.
    exit_code
        Of the container's main process, where it is known.
    text
        For people.
    """

    kind: EndKind
    exit_code: int | None
    text: str


def reason_of(
    code: int | None,
    spec: SandboxSpec,
    limits: Limits,
    *,
    killed_from_outside: bool,
    out_of_memory: bool,
    said: str,
) -> EndReason:
    """Tell from the main process's exit code why a sandbox ended.

    Parameters
    ----------
    code
        The exit code.
    spec, limits
        Of the sandbox.
    killed_from_outside
        Whether the engine was told to kill it.
    out_of_memory
        Whether something in it was killed for lack of memory.
    said
        What the main process wrote last.
    """
    if code == SILENCE:
        ttl, grace = lease_seconds(spec), grace_seconds(spec)
        text = f"The sandbox's lease ended: its owner was not heard of for {ttl + grace} s."
        return EndReason("lease-expired", code, text)
    if code == LIFETIME:
        text = f"The sandbox's lifetime of {lifetime_seconds(spec)} s is over."
        return EndReason("lifetime", code, text)
    if code == IDLE:
        text = f"The sandbox ended: it was not used for {idle_seconds(spec)} s."
        return EndReason("idle", code, text)
    if code == RELEASED and spec.is_shared:
        text = "The sandbox ended when the last one who held it let it go."
        return EndReason("removed", code, text)
    if code == RELEASED:
        text = "The connection that kept the sandbox alive broke, and the sandbox ended."
        return EndReason("engine-lost", code, text)
    if code == NO_CLOCK:
        text = (
            f"The sandbox ended: its limit of {limits.pids} processes left none for the clock of "
            "its lease."
        )
        return EndReason("exited", code, text)
    if code == _KILLED and killed_from_outside:
        return EndReason("removed", code, "The sandbox was killed on the engine.")
    if code == _KILLED and out_of_memory:
        size = limits.memory // (1024 * 1024)
        text = f"The sandbox ran out of memory; its limit is {size} MiB."
        return EndReason("out-of-memory", code, text)
    text = f"The sandbox's main process ended with exit code {code}."
    return EndReason("exited", code, f"{text} It said: {said[-300:]!r}" if said else text)
