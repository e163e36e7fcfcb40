"""`settle`: what every door does before it makes a sandbox (K7, A1).

It takes what was asked for, has configuration and policy settle it, and gives an `Order` from
which a sandbox can be made. Doors differ only in what they hand in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sandbox_kernel.config import (
    SETTINGS,
    Door,
    EngineSettings,
    Resolved,
    load_policy_in_force,
    resolve,
    unknown_setting,
)
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.engine.images import PullPolicy
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec, is_vm

__all__ = ["Order", "Timeouts", "judge_found", "judge_helper", "requested_by", "settle"]

_FIELDS = {field.name: field for field in dataclasses.fields(SandboxSpec)}
_SETTLED_OTHERWISE = frozenset({"environment", "durability", "workspace", "labels", "prefix"})


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the commands in a sandbox may take (C4).

    Parameters
    ----------
    default
        Seconds for a command that does not say.
    most
        The longest timeout in seconds that a command may ask for.
    bounded_by
        The policy file on account of which a command must have a timeout; empty if it need not.
    """

    default: float
    most: float
    bounded_by: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """A request that configuration and policy have settled.

    Parameters
    ----------
    spec
        The sandbox to make.
    engine
        What is configured about the engine.
    settings
        Every setting that holds, those included that are not of the sandbox itself.
    """

    spec: SandboxSpec
    engine: EngineSettings
    settings: Resolved

    @property
    def pull_policy(self) -> PullPolicy:
        """When to pull the image."""
        return cast(PullPolicy, self.settings["pull_policy"])

    @property
    def quota(self) -> Quota | None:
        """How many sandboxes the owner may have at a time; to be given to `LiveSandbox.create`."""
        return self.settings.quota

    @property
    def timeouts(self) -> Timeouts:
        """How long the commands in the sandbox may take."""
        bound = self.settings.decision.longest_timeout
        return Timeouts(
            self.settings["timeout"],
            self.settings["max_timeout"],
            "" if bound is None else bound.said_by,
        )

    def endpoint(self) -> Endpoint:
        """Choose the engine.

        Raises
        ------
        SandboxSpecRejectedError
            The engine's address cannot be used, or the policy does not allow this engine.
        SandboxUnavailableError
            There is none, or certificate files are missing.
        """
        try:
            return resolve_endpoint(self.engine)
        except SandboxSpecRejectedError as error:
            raise self.settings.locate(error) from error


def settle(
    requested: Mapping[str, object] | SandboxSpec | None = None,
    *,
    door: Door,
    engine: str | EngineSettings | None = None,
    variables: Collection[str] = (),
) -> Order:
    """Settle a request.

    Parameters
    ----------
    requested
        Settings and fields of `SandboxSpec` by name, or a spec, of which what differs from the
        defaults counts as asked for.
    door
        By which way it is asked for.
    engine
        An engine's address; or settings, which then hold instead of the configured ones.
    variables
        Names of the variables that code in the sandbox gets besides ``environment``.

    Raises
    ------
    SandboxSpecRejectedError
        Something of it, or of a layer of the configuration, cannot be honoured, or the policy
        refuses it. Nothing was created.

    Examples
    --------
    >>> order = settle({"mem_limit": "1G"}, door="python")
    >>> order.spec.mem_limit
    1073741824
    """
    asked = requested_by(requested) if isinstance(requested, SandboxSpec) else dict(requested or {})
    if isinstance(engine, str):
        asked["host"] = engine
    elif engine is not None and engine.allow_insecure_engine:
        asked["allow_insecure_engine"] = True
    resolved = resolve(asked, door=door, variables=variables)
    arguments = resolved.spec
    for name in set(arguments) - set(_FIELDS):
        if name not in SETTINGS or SETTINGS[name].part == "kernel":
            raise unknown_setting(name, name, "what was asked for")
        error = SandboxSpecRejectedError(
            name, arguments[name], "this version cannot give it", "Leave the setting out."
        )
        raise resolved.locate(error)
    try:
        spec = SandboxSpec(**arguments)
    except SandboxSpecRejectedError as error:
        raise resolved.locate(error) from error
    settings = resolved.engine
    if isinstance(engine, EngineSettings):
        settings = dataclasses.replace(engine, allowed=settings.allowed)
    return Order(spec, settings, resolved)


def judge_found(spec: SandboxSpec, limits: Limits) -> None:
    """Have the policy that holds now judge a sandbox that runs already.

    What it got counts, not what was asked for: a policy fills in what a request leaves out, and
    here it is too late for that.

    Parameters
    ----------
    spec, limits
        What it was made to be, and what that came to.

    Raises
    ------
    SandboxSpecRejectedError
        The policy does not allow it any more.
    """
    never = math.inf
    got: dict[str, object] = {
        **{name: getattr(spec, name) for name in _FIELDS if name not in _SETTLED_OTHERWISE},
        "require_egress_firewall": spec.require_egress_firewall or spec.network != "egress",
        "cpu_limit": limits.nano_cpus / 1e9,
        "mem_limit": limits.memory,
        "pids_limit": limits.pids,
        "tmpfs_size": limits.tmpfs,
        "shm_size": limits.shm,
        "disk_limit": limits.disk or never,
        "disk_soft_limit": spec.disk_soft_limit or never,
        "project_limit": limits.project or None,
        # Nobody remembers what a workspace began with.
        "template_limit": None,
        "idle_ttl": spec.idle_ttl or never,
        "max_lifetime": spec.max_lifetime or never,
        "runtime": limits.runtime or None,
        "isolation": "vm" if is_vm(limits.runtime) else "container",
    }
    load_policy_in_force().judge(got, built_in={"project_limit": 1})


def judge_helper(image: str | None) -> None:
    """Have the policy judge the image of a short sandbox that looks into a workspace.

    Raises
    ------
    SandboxSpecRejectedError
        The policy does not allow it.
    """
    load_policy_in_force().judge({"image": image})


def requested_by(spec: SandboxSpec) -> dict[str, Any]:
    """Return the fields of a spec that differ from its defaults, by name."""
    plain = SandboxSpec()
    asked = {name: getattr(spec, name) for name in _FIELDS}
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in asked.items()
        if value != getattr(plain, name)
    }
