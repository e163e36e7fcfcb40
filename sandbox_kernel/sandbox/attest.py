"""Attest, then start: is the container what was asked for (decision 11; ESC-19).

Between creation and start the engine's own account of the container is compared with the
request, field by field. What was not asked for has to be empty, known to us or not; so a
field that a newer engine or a plugin adds is refused until somebody has looked at it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sandbox_kernel.errors import SandboxAttestationError
from sandbox_kernel.sandbox.container import WORKSPACE
from sandbox_kernel.sandbox.network import SharedNetwork

CAPABILITIES: Final = frozenset(
    """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
    SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG
    WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
    """.split()  # noqa: SIM905 - one name a line would be a page
)
"""All there are; Podman spells ``ALL`` out."""

_SHOWN = 160
_ANONYMOUS = "com.docker.volume.anonymous"


def attest(
    body: Mapping[str, Any],
    inspected: Mapping[str, Any],
    warnings: Sequence[str] = (),
    network: SharedNetwork | None = None,
    *,
    running: bool = False,
) -> None:
    """Refuse a container that is not exactly what was asked for.

    Parameters
    ----------
    body
        The request.
    inspected
        The engine's account of the container, which was not started yet.
    warnings
        What the engine remarked at its creation. Each one says that it will not do something.
    network
        The network that the request names by its id, where it has one.
    running
        Whether it is to run: one that somebody else has made and started.

    Raises
    ------
    SandboxAttestationError
        With every difference.
    """
    found = [f"the engine warned: {warning.strip()}" for warning in warnings]
    try:
        found += differences(body, inspected, network, running=running)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise SandboxAttestationError(
            "The engine describes the container in a way that cannot be understood, so it was "
            "not started"
        ) from error
    if found:
        raise SandboxAttestationError(
            "The engine would run something else than was asked for, so it was not started: "
            + "; ".join(found)
        )


def differences(
    body: Mapping[str, Any],
    inspected: Mapping[str, Any],
    network: SharedNetwork | None = None,
    *,
    running: bool = False,
) -> list[str]:
    """List where the engine's account differs from the request."""
    wanted = {key: value for key, value in body.items() if key != "HostConfig"}
    found = _compare("", wanted, inspected.get("Config") or {})
    host = inspected.get("HostConfig") or {}
    found += _compare("HostConfig.", body["HostConfig"], host)
    found += _compare_state(body, inspected, running)
    found += _compare_networks(body, inspected, network)
    return found


def volume_name(inspected: Mapping[str, Any]) -> str:
    """Return the name of the volume that is the workspace."""
    found = [m for m in inspected["Mounts"] if m.get("Destination") == WORKSPACE]
    return str(found[0]["Name"])


def _compare(prefix: str, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    found = []
    for key in sorted({*wanted, *got}):
        asked = canonical(key, wanted.get(key))
        given = canonical(key, got.get(key))
        if asked != given:
            found.append(f"{prefix}{key} is {_show(given)} instead of {_show(asked)}")
    return found


def _compare_state(
    body: Mapping[str, Any], inspected: Mapping[str, Any], running: bool
) -> list[str]:
    """Compare what is told outside the two echoes of the request."""
    host = body["HostConfig"]
    # In no order that means anything.
    mounts = sorted(
        (str(m.get("Destination")), str(m.get("Type")), bool(m.get("RW")), m.get("Driver") or "")
        for m in inspected.get("Mounts") or ()
    )
    volumes = {
        m.get("Destination"): m.get("Source") if m.get("Type") == "bind" else m.get("Name")
        for m in inspected.get("Mounts") or ()
    }
    state = inspected.get("State") or {}
    wanted_mounts = sorted(
        (m["Target"], m["Type"], not m["ReadOnly"], "" if m["Type"] == "bind" else "local")
        for m in host["Mounts"]
    )
    named = {m["Target"]: m["Source"] for m in host["Mounts"] if "Source" in m}
    command = [inspected.get("Path"), *(inspected.get("Args") or ())]
    facts: tuple[tuple[str, object, object], ...] = (
        ("the image", _image(inspected.get("Image")), _image(body["Image"])),
        ("the command", command, list(body["Cmd"])),
        ("the list of mounts", mounts, wanted_mounts),
        ("the list of what is mounted", {place: volumes.get(place) for place in named}, named),
        ("whether it runs", bool(state.get("Running")), running),
        ("being unconfined", inspected.get("AppArmorProfile") == "unconfined", False),
    )
    return [
        f"{name} is {_show(given)} instead of {_show(asked)}"
        for name, given, asked in facts
        if given != asked
    ]


def _compare_networks(
    body: Mapping[str, Any], inspected: Mapping[str, Any], network: SharedNetwork | None
) -> list[str]:
    """Compare what the container is connected to, and how.

    An engine lists a network that was asked for by its id under its name, or under the id.
    """
    asked = body["HostConfig"]["NetworkMode"]
    names = {asked} if network is None else {network.id, network.name}
    ids = {None, ""} if network is None else {None, "", network.id}
    given = (inspected.get("NetworkSettings") or {}).get("Networks") or {}
    found = []
    if network is not None and asked != network.id:
        found.append(f"the network asked for is {_show(asked)} instead of {_show(network.id)}")
    if not set(given) <= names or len(given) > 1:
        found.append(f"the list of networks is {_show(sorted(given))} instead of {_show(asked)}")
    for name, settings in given.items():
        settings = settings or {}
        if name in names and network is not None and settings.get("NetworkID") not in ids:
            found.append(f"the network {name!r} is {_show(settings['NetworkID'])}, another one")
        # An address or a name of its own, a link to another container, options of a driver.
        for key in ("IPAMConfig", "Links", "DriverOpts"):
            if (value := _neutral(settings.get(key))) is not None:
                found.append(f"{key} of the network {name!r} is {_show(value)} instead of empty")
    return found


def canonical(key: str, value: Any) -> Any:
    """Return a value in one spelling out of those that mean the same to an engine."""
    if key in {"Labels", "Sysctls"}:
        return dict(value or {}) or None
    if key == "Env":
        return _variables(value or ())
    if key in {"ExposedPorts", "Volumes"}:
        return sorted(value or ()) or None
    if key in {"MaskedPaths", "ReadonlyPaths"}:
        return sorted(value or ()) or None
    if key in {"CapDrop", "CapAdd"}:
        return _capabilities(value or ())
    if key == "SecurityOpt":
        return sorted(_security_option(option) for option in value or ()) or None
    if key == "Ulimits":
        return sorted(_ulimit(limit) for limit in value or ()) or None
    if key == "Tmpfs":
        return {k: sorted(v.split(",")) for k, v in (value or {}).items()} or None
    if key == "Image":
        return _image(value)
    if key == "RestartPolicy" and value and value.get("Name") in {"", "no"}:
        value = {**value, "Name": "no"}
    if key == "Mounts":
        value = [{**m, "VolumeOptions": _volume_options(m)} for m in value or ()]
    if key == "Entrypoint" and value == [""]:
        return None
    return _neutral(value)


def _neutral(value: Any) -> Any:
    """Leave out what is empty: null, false, zero and nothing are the same to an engine."""
    if isinstance(value, Mapping):
        kept = {k: n for k, v in value.items() if (n := _neutral(v)) is not None}
        return kept or None
    if isinstance(value, list | tuple):
        items = [_neutral(item) for item in value]
        return items if any(item is not None for item in items) else None
    return value or None


def _variables(entries: Sequence[str]) -> dict[str, str] | None:
    return dict(entry.partition("=")[::2] for entry in entries) or None


def _capabilities(names: Sequence[str]) -> list[str] | None:
    plain = {name.upper().removeprefix("CAP_") for name in names}
    return ["ALL"] if plain >= CAPABILITIES else sorted(plain) or None


def _security_option(option: str) -> str:
    name, _, value = option.partition("=")
    if name == "seccomp":
        try:
            return "seccomp=" + json.dumps(json.loads(value), sort_keys=True)
        except ValueError:
            return option
    return "no-new-privileges:true" if option == "no-new-privileges" else option


def _ulimit(limit: Mapping[str, Any]) -> tuple[str, str]:
    name = str(limit["Name"]).lower().removeprefix("rlimit_")
    return name, json.dumps({**limit, "Name": name}, sort_keys=True)


def _volume_options(mount: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(mount.get("VolumeOptions") or {})
    labels = dict(options.pop("Labels", None) or {})
    # Docker's own mark, from 24 on, of a volume that goes with its container.
    if labels.get(_ANONYMOUS) == "":
        del labels[_ANONYMOUS]
    # As pairs, so that none is left out for being empty.
    return {**options, "Labels": [f"{k}={v}" for k, v in sorted(labels.items())]}


def _image(name: Any) -> str:
    return str(name).removeprefix("sha256:")


def _show(value: object) -> str:
    text = "empty" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
