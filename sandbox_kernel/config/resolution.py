"""From layers to what holds: `resolve` for the doors, `survey` for people who look.

The layers are read anew each time, so that a changed file holds for the next sandbox.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from traitlets.config.loader import LazyConfigValue

from sandbox_kernel.config.defaults import SETTINGS, check_setting
from sandbox_kernel.config.engine import EngineSettings
from sandbox_kernel.config.environment import read_environment
from sandbox_kernel.config.files import (
    BASE_SECTION,
    DOOR_SECTIONS,
    ConfigFile,
    load_config_files,
    load_policy_in_force,
)
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Decision, Policy, Quota

__all__ = [
    "Door",
    "Effective",
    "Origin",
    "Resolved",
    "Survey",
    "engine_settings",
    "resolve",
    "survey",
]

Door = Literal["kernel", "python", "command", "magics"]
"""By which way a sandbox is asked for."""

OriginKind = Literal["built-in", "environment", "file", "caller", "policy"]

_BUILT_IN: Final = {name: setting.built_in for name, setting in SETTINGS.items()}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from.

    Parameters
    ----------
    kind
        The layer.
    where
        The variable or the file.
    """

    kind: OriginKind
    where: str = ""

    def __str__(self) -> str:
        words = {"built-in": "built-in default", "caller": "asked for"}
        return words.get(self.kind, self.where)


@dataclass(frozen=True, slots=True)
class Effective:
    """The value of a setting that holds, and where it comes from.

    Parameters
    ----------
    value
        The value; its text is left out of a representation, since it may be a secret.
    origin
        The highest layer that had a say in it.
    """

    value: Any = field(repr=False)
    origin: Origin


@dataclass(frozen=True, slots=True)
class Resolved:
    """What holds for one sandbox.

    Parameters
    ----------
    settings
        Every setting, by name.
    further
        What was asked for that is no setting, such as labels.
    decision
        The policy's.
    """

    settings: Mapping[str, Effective]
    further: Mapping[str, object] = field(default_factory=dict, repr=False)
    decision: Decision = field(default_factory=Decision)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value

    @property
    def spec(self) -> dict[str, Any]:
        """The arguments of a `SandboxSpec`: what somebody said, not the built-in defaults.

        A built-in default may depend on the engine's machine, which the spec leaves open.
        """
        said = {
            name: effective.value
            for name, effective in self.settings.items()
            if SETTINGS[name].part == "sandbox" and effective.origin.kind != "built-in"
        }
        return {**said, **self.further}

    @property
    def engine(self) -> EngineSettings:
        """What is configured about the engine."""

        def path(name: str) -> Path | None:
            return None if self[name] is None else Path(self[name])

        return EngineSettings(
            host=self["host"],
            tls_cert_path=path("tls_cert_path"),
            tls_key_path=path("tls_key_path"),
            tls_ca_path=path("tls_ca_path"),
            allow_insecure_engine=self["allow_insecure_engine"],
            require_explicit_host=self["require_explicit_host"],
            allowed=self.decision.engines,
        )

    @property
    def quota(self) -> Quota | None:
        """How many sandboxes the owner may have at a time."""
        return self.decision.quota

    def locate(self, error: SandboxSpecRejectedError) -> SandboxSpecRejectedError:
        """Return an error that also says which file or variable holds the refused value."""
        return _locate(error, self.settings)


@dataclass(frozen=True, slots=True)
class Survey:
    """What holds by default, for people: also where the policy refuses it.

    Parameters
    ----------
    settings
        Every setting, by name.
    files
        The configuration files that were read.
    policy
        The policy.
    refusals
        What the policy refuses of it.
    """

    settings: Mapping[str, Effective]
    files: tuple[ConfigFile, ...]
    policy: Policy
    refusals: tuple[SandboxSpecRejectedError, ...]


def resolve(
    requested: Mapping[str, object] | None = None,
    *,
    door: Door = "python",
    variables: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
    files: Sequence[ConfigFile] | None = None,
    policy: Policy | None = None,
) -> Resolved:
    """Settle what a request comes to, and have the policy judge it.

    Parameters
    ----------
    requested
        What the kernelspec or the caller asks for. A name that is no setting, such as
        ``labels``, is judged by the policy and passed on. `None` asks for nothing.
    door
        By which way it is asked for.
    variables
        Names of variables that are handed to the sandbox besides ``environment``.
    environ, files, policy
        The other layers; by default what holds for this process.

    Returns
    -------
    Resolved
        What to make a sandbox from.

    Raises
    ------
    SandboxSpecRejectedError
        A layer has something wrong in it, or the policy refuses the request.

    Examples
    --------
    >>> resolve({"mem_limit": "4G"}, environ={}, files=(), policy=Policy()).spec
    {'mem_limit': 4294967296}
    """
    files = load_config_files() if files is None else files
    policy = load_policy_in_force() if policy is None else policy
    settings, further = _layered(requested or {}, door, environ, files)
    request = _asked(settings, further, variables)
    try:
        decision = policy.judge(request, built_in=_BUILT_IN)
    except SandboxSpecRejectedError as refusal:
        raise _locate(refusal, settings) from None
    settings = _filled(settings, decision)
    return Resolved(_bounded(settings), further, decision)


def survey(
    *,
    environ: Mapping[str, str] | None = None,
    files: Sequence[ConfigFile] | None = None,
    policy: Policy | None = None,
    door: Door = "command",
) -> Survey:
    """Say what holds for a request that asks for nothing.

    Raises
    ------
    SandboxSpecRejectedError
        A layer or a policy file has something wrong in it.
    """
    files = load_config_files() if files is None else files
    policy = load_policy_in_force() if policy is None else policy
    settings, further = _layered({}, door, environ, files)
    request = _asked(settings, further)
    refusals = tuple(
        _locate(refusal, settings) for refusal in policy.refusals(request, built_in=_BUILT_IN)
    )
    if not refusals:
        settings = _filled(settings, policy.judge(request, built_in=_BUILT_IN))
    return Survey(settings, tuple(files), policy, refusals)


def engine_settings(
    requested: Mapping[str, object] | None = None,
    *,
    door: Door = "command",
    environ: Mapping[str, str] | None = None,
    files: Sequence[ConfigFile] | None = None,
    policy: Policy | None = None,
) -> EngineSettings:
    """Return what is configured about the engine, whatever holds for sandboxes.

    Parameters
    ----------
    requested
        Settings of the engine that the caller asks for.
    door, environ, files, policy
        As for `resolve`.

    Raises
    ------
    SandboxSpecRejectedError
        A layer has something wrong in it, or the policy refuses these settings.
    """
    files = load_config_files() if files is None else files
    policy = load_policy_in_force() if policy is None else policy
    settings, _ = _layered(requested or {}, door, environ, files)
    ours = {name: e for name, e in settings.items() if SETTINGS[name].part == "engine"}
    try:
        decision = policy.judge(_said(ours))
    except SandboxSpecRejectedError as refusal:
        raise _locate(refusal, settings) from None
    return Resolved(settings, decision=decision).engine


def _layers(
    requested: Mapping[str, object],
    door: Door,
    environ: Mapping[str, str] | None,
    files: Sequence[ConfigFile],
) -> Iterator[tuple[str, Any, Origin]]:
    """Yield every value that somebody set, from low to high."""
    for name, (value, variable) in read_environment(environ).items():
        yield name, value, Origin("environment", variable)
    for section in (BASE_SECTION, DOOR_SECTIONS.get(door, "")):
        for file in files:
            origin = Origin("file", str(file.path))
            for name, value in file.section(section).items():
                yield name, value, origin
    for name, value in requested.items():
        if _is_asked_of(door, name):
            yield name, value, Origin("caller")


def _is_asked_of(door: Door, name: str) -> bool:
    """Whether a name is that of a setting at a door: a kernel's settings are for kernels alone.

    Of a spec, ``workspace`` is a key, and of a kernel it says how to come by one.
    """
    return name in SETTINGS and (SETTINGS[name].part != "kernel" or door == "kernel")


def _layered(
    requested: Mapping[str, object],
    door: Door,
    environ: Mapping[str, str] | None,
    files: Sequence[ConfigFile],
) -> tuple[dict[str, Effective], dict[str, object]]:
    settings = {name: Effective(value, Origin("built-in")) for name, value in _BUILT_IN.items()}
    for name, value, origin in _layers(requested, door, environ, files):
        below = settings[name].value
        if isinstance(value, LazyConfigValue):
            # c.SandboxDefaults.env_keep.append(…) and the like change what lies below.
            value = value.get_value(below)
        if value is None:
            continue
        value = check_setting(name, value, origin.where)
        if isinstance(value, dict):
            value = {**below, **value}
        if name == "require_explicit_host" and below:
            continue
        settings[name] = Effective(value, origin)
    further = {n: v for n, v in requested.items() if not _is_asked_of(door, n) and v is not None}
    return settings, further


def _asked(
    settings: Mapping[str, Effective],
    further: Mapping[str, object],
    variables: Collection[str] = (),
) -> dict[str, object]:
    # Of variables the policy judges the names, and nobody else needs to see the values.
    names = (*settings["environment"].value, *variables)
    return {**_said(settings), "environment": names, **further}


def _said(settings: Mapping[str, Effective]) -> dict[str, object]:
    return {name: e.value for name, e in settings.items() if e.origin.kind != "built-in"}


def _filled(settings: Mapping[str, Effective], decision: Decision) -> dict[str, Effective]:
    filled = {
        name: Effective(filling.value, Origin("policy", filling.said_by))
        for name, filling in decision.filled.items()
        if name in settings
    }
    return {**settings, **filled}


def _bounded(settings: dict[str, Effective]) -> dict[str, Effective]:
    """Keep the timeout within the longest one."""
    timeout, most = settings["timeout"], settings["max_timeout"]
    if timeout.value <= most.value:
        return settings
    if timeout.origin.kind in {"built-in", "policy"}:
        return {**settings, "timeout": most}
    refusal = SandboxSpecRejectedError(
        "timeout",
        timeout.value,
        f"this is more than max_timeout = {most.value:g}",
        f"Use at most {most.value:g}, or raise max_timeout.",
    )
    raise _locate(refusal, settings)


def _locate(
    error: SandboxSpecRejectedError, settings: Mapping[str, Effective]
) -> SandboxSpecRejectedError:
    effective = settings.get(error.setting)
    if effective is None or effective.origin.kind not in {"file", "environment"}:
        return error
    place = f"(in {effective.origin.where})"
    if place in error.reason:
        return error
    return SandboxSpecRejectedError(
        error.setting, error.value, f"{error.reason} {place}", error.remedy
    )
