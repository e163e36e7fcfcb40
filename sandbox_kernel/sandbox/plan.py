"""What a sandbox will be, settled down to the engine's request and before anything is created.

A plan is also what a sandbox that already runs is compared with, be it that of another creator
of the same workspace (B7) or one that this process made before it was restarted (B9). For that,
everything that shaped the request and that the container does not tell by itself is kept in one
of its labels.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.faults import image_missing
from sandbox_kernel.engine.images import ImageInfo, image_present
from sandbox_kernel.errors import SandboxConflictError, SandboxSpecRejectedError
from sandbox_kernel.policy import Quota
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.container import (
    SETUP_CAPABILITIES,
    container_body,
    image_parts,
    lease_seconds,
    lifetime_seconds,
)
from sandbox_kernel.sandbox.mounts import check_mounts
from sandbox_kernel.sandbox.network import SharedNetwork, ensure_network
from sandbox_kernel.sandbox.snapshot import check_folders
from sandbox_kernel.sandbox.spec import Limits, SandboxSpec, resolve_limits
from sandbox_kernel.sandbox.tiers import shared_tier
from sandbox_kernel.sandbox.workspace import (
    VolumeMount,
    ensure_workspace,
    quota_options,
    verified,
    workspace_name,
)

Gate = Callable[[SharedNetwork], Awaitable[None]]
"""Lets a network pass, or raises."""

_TOLD: Final = ("image", "network", "durability", "workspace", "labels")
"""Fields of a spec that have labels of their own."""

_NOT_TOLD: Final = ("environment", "template", "template_ignore", "template_limit", "project")
"""Fields that are nobody else's business: secrets, and what is read of the caller's machine."""

_KEPT: Final = tuple(
    field.name for field in dataclasses.fields(SandboxSpec) if field.name not in _TOLD + _NOT_TOLD
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sandbox that is to be.

    Parameters
    ----------
    engine, spec, owner
        Where, what and whose.
    image, limits
        The image and what the spec comes to on this engine.
    labels
        All labels of ours for the container.
    network
        The network of its tier.
    workspace
        What is mounted as its workspace; `None` for a new anonymous volume.
    quota, info
        How many sandboxes the owner may have, and the engine's account of itself.
    is_new
        Whether the workspace was made with this plan.
    """

    engine: Engine
    spec: SandboxSpec
    owner: str
    image: ImageInfo
    limits: Limits
    labels: Mapping[str, str]
    network: SharedNetwork | None
    workspace: VolumeMount | None
    quota: Quota | None
    info: Mapping[str, Any]
    is_new: bool = True

    def body(self, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the engine's request.

        Parameters
        ----------
        labels
            Labels instead of the plan's own.
        """
        labels = self.labels if labels is None else labels
        return container_body(
            self.spec, self.limits, self.image, labels, self.network, self.workspace
        )


class SetupPlan(Plan):
    """The plan of a container in which an image is set up by root, and no code of a user runs.

    It differs from a sandbox's in what root needs to install packages, and in nothing else.
    """

    __slots__ = ()

    def body(self, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the engine's request."""
        body = Plan.body(self, labels)
        # Of a container whose own user is another, root has no capability: it may gain none.
        body["User"] = "0:0"
        body["HostConfig"] |= {"ReadonlyRootfs": False, "CapAdd": list(SETUP_CAPABILITIES)}
        return body


async def make_plan(
    engine: Engine,
    spec: SandboxSpec,
    owner: str,
    extra_labels: Mapping[str, str],
    gate: Gate,
    quota: Quota | None = None,
) -> Plan:
    """Settle everything about a new sandbox; of a persistent workspace, make the volume.

    Parameters
    ----------
    engine, spec, owner
        Where, what and whose.
    extra_labels
        Labels of the layers above, by their full names.
    gate
        Is asked about the network, where there is one.
    quota
        How many sandboxes the owner may have.

    Raises
    ------
    SandboxSpecRejectedError
        The engine cannot give it.
    SandboxImageMissingError, SandboxImageUnsuitableError
        The image is not there, or no sandbox can be made from it.
    SandboxConflictError
        The workspace's volume is something else.
    """
    check_owner(owner)
    image = await image_present(engine, spec.image)
    if image is None:
        raise image_missing(spec.image)
    parts = image_parts(image, spec.image)
    info = await engine.info()
    limits = resolve_limits(spec, info, len(parts.small_volumes))
    await _check_data_sets(engine, spec)
    await asyncio.to_thread(check_mounts, spec, engine.endpoint, info)
    await check_folders(spec)
    labels = names.make_labels(
        owner=owner,
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        image=spec.image,
        network=spec.network,
        ttl=lease_seconds(spec),
        lifetime=lifetime_seconds(spec),
        caller=spec.labels,
        extra=extra_labels,
        foreign=parts.labels,
        durability=spec.durability,
        workspace=spec.workspace,
        limits=_remember(spec, limits),
        maker=secrets.token_hex(8),
    )
    tier = shared_tier(spec.network)
    network = None if tier is None else await ensure_network(engine, tier)
    if network is not None:
        await gate(network)
    workspace, is_new = None, True
    if spec.workspace is not None:
        made = await ensure_workspace(
            engine,
            prefix=spec.prefix,
            owner=owner,
            key=spec.workspace,
            image=spec.image,
            disk=limits.disk,
            # The mark of a helper is that of a container, and a workspace outlives it.
            extra={n: text for n, text in extra_labels.items() if n != names.HELPER},
        )
        is_new = made.is_new
        workspace = VolumeMount(made.name, made.labels, quota_options(limits.disk))
    return Plan(engine, spec, owner, image, limits, labels, network, workspace, quota, info, is_new)


async def plan_of(
    engine: Engine, inspected: Mapping[str, Any], environment: Mapping[str, str]
) -> Plan:
    """Work out from a running container of ours what was asked for.

    Parameters
    ----------
    engine
        The engine.
    inspected
        Its account of the container.
    environment
        Variables for the code, which the container does not tell.

    Raises
    ------
    SandboxConflictError
        Its labels are not those of a sandbox that this version can have made.
    """
    labels = labels_of(inspected)
    owner = labels[names.OWNER]
    spec, limits = told_by(labels, environment)
    image_id = str(inspected["Image"])
    image = await image_present(engine, image_id)
    if image is None:
        raise image_missing(spec.image)
    tier = shared_tier(spec.network)
    network = None if tier is None else await ensure_network(engine, tier)
    workspace = None
    if spec.workspace is not None:
        made = await verify_workspace(engine, spec.prefix, owner, spec.workspace, limits.disk)
        workspace = made
    return Plan(engine, spec, owner, image, limits, labels, network, workspace, None, {})


def told_by(
    labels: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[SandboxSpec, Limits]:
    """Return what was asked for, and what that came to, by the labels of a container.

    Parameters
    ----------
    labels
        Of the container.
    environment
        Variables for the code, which they do not tell.

    Raises
    ------
    SandboxConflictError
        They are not those of a sandbox that this version can have made.
    """
    try:
        kept = json.loads(labels[names.LIMITS])
        limits = Limits(**kept["limits"])
        fields = {**kept["spec"], "devices": tuple(kept["spec"]["devices"])}
        spec = SandboxSpec(
            **fields,
            image=labels[names.IMAGE],
            network=labels[names.NETWORK],
            durability=labels[names.DURABILITY],
            workspace=names.workspace_key(labels),
            labels=names.caller_labels(labels),
            environment=environment,
        )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise SandboxConflictError(
            "The sandbox has labels that this version of sandbox-kernel does not write, so it "
            "cannot be connected to. Remove it, and make a new one"
        ) from error
    return spec, limits


async def verify_workspace(
    engine: Engine, prefix: str, owner: str, key: str, disk: int
) -> VolumeMount:
    """Return how a workspace that exists is mounted.

    Raises
    ------
    SandboxConflictError
        It does not exist, or is something else.
    """
    name = workspace_name(prefix, owner, key)
    volume = await engine.inspect_volume(name)
    if volume is None:
        raise SandboxConflictError(f"The workspace {key!r} has been removed")
    found = verified(volume, name=name, owner=owner, key=key, disk=disk)
    return VolumeMount(name, found.labels, quota_options(disk))


def check_owner(owner: str) -> None:
    """Refuse an owner whom no label can name."""
    try:
        size = len(owner.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= 1024:
        reason = "this is no text of 1 to 1024 bytes"
        raise SandboxSpecRejectedError("owner", owner[:40], reason, "Use a user's name.")


async def _check_data_sets(engine: Engine, spec: SandboxSpec) -> None:
    """Refuse volumes that are not there: an engine would make empty ones."""
    for name, volume in spec.data_sets.items():
        found = await engine.inspect_volume(volume)
        if found is None:
            reason = f"the engine has no volume {volume!r}"
            raise SandboxSpecRejectedError(
                f"data_sets[{name!r}]", volume, reason, "Create it, or correct the name."
            )
        if found.get("Driver") != "local":
            reason = f"the volume {volume!r} is one of the driver {found.get('Driver')!r}"
            raise SandboxSpecRejectedError(
                f"data_sets[{name!r}]", volume, reason, "Use a volume of the driver 'local'."
            )


def _remember(spec: SandboxSpec, limits: Limits) -> str:
    fields = {name: getattr(spec, name) for name in _KEPT}
    fields["data_sets"], fields["mounts"] = dict(spec.data_sets), dict(spec.mounts)
    return json.dumps({"limits": dataclasses.asdict(limits), "spec": fields}, sort_keys=True)


def other_settings(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Name the settings in which the sandboxes with these labels differ, with both values."""
    pairs = {"image": (mine.get(names.IMAGE), theirs.get(names.IMAGE)),
             "network": (mine.get(names.NETWORK), theirs.get(names.NETWORK))}  # fmt: skip
    try:
        here, there = (json.loads(labels.get(names.LIMITS, "")) for labels in (mine, theirs))
        for part in ("limits", "spec"):
            for name in {**here[part], **there[part]}:
                pairs.setdefault(name, (here[part].get(name), there[part].get(name)))
    except (ValueError, TypeError, LookupError, AttributeError):
        return ["it was made by another version of sandbox-kernel"]
    # A setting that one of two versions does not know is what it is when nobody asks for it.
    return [
        f"{name} is {given!r} there and {asked!r} here"
        for name, (asked, given) in pairs.items()
        if (asked or None) != (given or None)
    ]


def kept_prefix(labels: Mapping[str, str]) -> str:
    """Return what the names of a sandbox's objects begin with; the default where no label says."""
    try:
        return SandboxSpec(prefix=json.loads(labels.get(names.LIMITS, ""))["spec"]["prefix"]).prefix
    except (ValueError, TypeError, LookupError):
        return SandboxSpec().prefix


def labels_of(inspected: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a container."""
    found = (inspected.get("Config") or {}).get("Labels") or {}
    return {str(name): str(text) for name, text in found.items()}
