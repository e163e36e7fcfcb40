"""`settle`: what every door does before it makes a sandbox (K7, A1).

It takes what was asked for, has configuration and policy settle it, and gives an `Order` from
which a sandbox can be made. Doors differ only in what they hand in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sandbox_kernel.config import (
    SETTINGS,
    Door,
    EngineSettings,
    Resolved,
    resolve,
    unknown_setting,
)
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.engine.images import PullPolicy
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox.spec import SandboxSpec

__all__ = ["Order", "Timeouts", "requested_by", "settle"]

_FIELDS = {field.name: field for field in dataclasses.fields(SandboxSpec)}


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


def requested_by(spec: SandboxSpec) -> dict[str, Any]:
    """Return the fields of a spec that differ from its defaults, by name."""
    plain = SandboxSpec()
    asked = {name: getattr(spec, name) for name in _FIELDS}
    return {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in asked.items()
        if value != getattr(plain, name)
    }
