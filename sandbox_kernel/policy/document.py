"""One policy file as data: `parse_policy` reads it strictly, and a doubt refuses the whole file.

A key that is not known, a key that stands twice, a value of a wrong kind: each is an error that
names the file and the key, since a restriction that was not understood must not be dropped.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NoReturn

from sandbox_kernel.amounts import parse_memory
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.patterns import engine_pattern, image_pattern

__all__ = [
    "ISOLATIONS",
    "MEMORY_CAPS",
    "NETWORKS",
    "NUMBER_CAPS",
    "Cap",
    "Consent",
    "MountGrant",
    "PolicyDocument",
    "closest",
    "parse_policy",
    "printable",
    "strict_json",
]

NETWORKS: Final = ("none", "internal", "egress")
"""The network tiers, each weaker than the one before."""

ISOLATIONS: Final = ("container", "vm")
"""The kinds of isolation, each stronger than the one before."""

MEMORY_CAPS: Final = (
    "mem_limit",
    "tmpfs_size",
    "shm_size",
    "disk_limit",
    "disk_soft_limit",
    "template_limit",
    "project_limit",
)
"""Caps in bytes, which may be written with a unit."""

NUMBER_CAPS: Final = (
    *("cpu_limit", "pids_limit", "max_lifetime", "idle_ttl", "lease_ttl", "resumable", "timeout"),
)
"""Caps that are plain numbers; those of time are in seconds."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_*.-]{1,255}")


@dataclass(frozen=True, slots=True)
class Cap:
    """A bound of one setting.

    Parameters
    ----------
    most
        The largest value that may be asked for; `None` for no bound.
    default
        What a request gets that leaves the setting out; `None` for the built-in default.
    """

    most: float | None = None
    default: float | None = None


@dataclass(frozen=True, slots=True)
class MountGrant:
    """A folder of the engine's machine that sandboxes may see, with all below it."""

    path: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Consent:
    """Consent to the network for one exact cell, where nobody can be asked (C5).

    Parameters
    ----------
    cell_sha256
        Digest of the cell's text in UTF-8, in hexadecimal.
    notebook
        Path of the notebook, with ``*``; empty for any.
    until
        When it ends; `None` for never.
    """

    cell_sha256: str
    notebook: str = ""
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class PolicyDocument:
    """What one file allows. `None` stands for: this file does not restrict it.

    Mounts, data sets, devices and consents are granted, so that a file which does not speak of
    them grants none.

    Parameters
    ----------
    source
        The file, as errors name it.
    binding
        Whether only root can change the file. One that the restricted person can change is
        self-restraint: it is obeyed, but it can consent to nothing.
    images
        Patterns of the images that may be used.
    allow_pull
        Whether images may be pulled from a registry.
    allow_insecure_engine
        Whether a plain connection to an engine on another machine may be asked for.
    require_egress_firewall
        Whether the tier ``egress`` needs the proof of a firewall.
    caps
        Bounds, by the name of the setting.
    allow_host_files
        Whether a sandbox may begin with files of the caller's machine: template, project, files.
    network
        The weakest network tier that may be asked for.
    isolation
        The weakest isolation that may be asked for.
    runtimes
        The engine's runtimes that may be used, the one first that a request gets which names
        none.
    mounts, data_sets, devices
        What is granted.
    max_sandboxes
        How many sandboxes one owner may have at a time.
    forbidden_environment
        Patterns of variables that may not be handed to a sandbox, without regard to case.
    network_consents
        Cells that get a network where nobody can be asked.
    engine_hosts
        The engines that may be used.
    """

    source: str
    binding: bool = False
    images: tuple[str, ...] | None = None
    allow_pull: bool = True
    allow_insecure_engine: bool = True
    require_egress_firewall: bool = False
    caps: Mapping[str, Cap] = field(default_factory=dict, hash=False)
    allow_host_files: bool = True
    network: str = NETWORKS[-1]
    isolation: str = ISOLATIONS[0]
    runtimes: tuple[str, ...] | None = None
    mounts: tuple[MountGrant, ...] = ()
    data_sets: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    max_sandboxes: int | None = None
    forbidden_environment: tuple[str, ...] = ()
    network_consents: tuple[Consent, ...] = ()
    engine_hosts: tuple[str, ...] | None = None


def parse_policy(content: bytes | str, source: str, *, binding: bool = False) -> PolicyDocument:
    """Read a policy file.

    Parameters
    ----------
    content
        Its content, a JSON object.
    source
        Its path.
    binding
        Whether only root can change it.

    Raises
    ------
    SandboxSpecRejectedError
        It cannot be understood to the last key; the error names file and key.
    """
    data = strict_json(content, source)
    values = _Reader(source).document(data)
    return PolicyDocument(source, binding, **values)


def strict_json(content: bytes | str, source: str) -> dict[str, Any]:
    """Read a JSON object in which no key stands twice.

    Raises
    ------
    SandboxSpecRejectedError
        It is not that; the error names the file and the place, and shows nothing of it.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise _Twice(key)
            found[key] = value
        return found

    def constant(text: str) -> NoReturn:
        raise _NoNumber(text)

    why: str
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except _Twice as error:
        why = f"the key '{printable(error.args[0])}' stands in it twice"
    except _NoNumber as error:
        why = f"{error.args[0]} is no number"
    except json.JSONDecodeError as error:
        why = f"it is not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
    except (ValueError, RecursionError):
        why = "it is not JSON in UTF-8"
    else:
        if isinstance(data, dict):
            return data
        why = "it is not one JSON object"
    raise SandboxSpecRejectedError(source, None, why, "Correct the file.") from None


def printable(name: str) -> str:
    """Return a name that came from a file in a form that can be shown anywhere."""
    return ascii(name[:80])[1:-1]


class _Twice(Exception):
    pass


class _NoNumber(Exception):
    pass


def closest(name: str, known: tuple[str, ...]) -> str:
    """Say which name somebody may have meant, as the remedy of an error."""
    near = difflib.get_close_matches(name, known, n=2)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known are: {', '.join(known)}."


class _Reader:
    """Reads the values of one file; each method gets the key for the text of an error."""

    def __init__(self, source: str) -> None:
        self._source = source

    def document(self, data: Mapping[str, Any]) -> dict[str, Any]:
        readers: dict[str, Callable[[str, Any], Any]] = {
            "images": self._patterns(image_pattern),
            "allow_pull": self._switch,
            "allow_insecure_engine": self._switch,
            "require_egress_firewall": self._switch,
            "allow_host_files": self._switch,
            "caps": self._caps,
            "network": self._one_of(NETWORKS),
            "isolation": self._one_of(ISOLATIONS),
            "runtimes": self._patterns(_no_name),
            "mounts": self._mounts,
            "data_sets": self._patterns(_no_name),
            "devices": self._patterns(_no_text),
            "max_sandboxes": self._count,
            "forbidden_environment": self._patterns(_no_name),
            "network_consents": self._consents,
            "engine_hosts": self._patterns(engine_pattern),
        }
        self._known("", data, tuple(readers))
        return {key: readers[key](key, value) for key, value in data.items()}

    def refuse(self, key: str, reason: str, remedy: str = "Correct the file.") -> NoReturn:
        # Values are left out: a file that nobody could read right may hold anything.
        raise SandboxSpecRejectedError(f"{self._source}: {key}", None, reason, remedy)

    def _known(self, within: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in data:
            if key not in known:
                name = f"{within}.{printable(key)}" if within else printable(key)
                self.refuse(name, "there is no such key in a policy", closest(key, known))

    def _object(self, key: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(key, "this must be an object")
        self._known(key, value, known)
        return value

    def _list(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            self.refuse(key, "this must be a list")
        return value

    def _switch(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self.refuse(key, "this must be true or false")
        return value

    def _text(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            self.refuse(key, "this must be a text")
        return value

    def _count(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, "this must be a whole number, 0 or more")
        return value

    def _one_of(self, known: tuple[str, ...]) -> Callable[[str, Any], str]:
        def read(key: str, value: Any) -> str:
            if value not in known:
                self.refuse(key, f"this must be one of {', '.join(known)}")
            return str(value)

        return read

    def _patterns(
        self, trouble: Callable[[str], str | None]
    ) -> Callable[[str, Any], tuple[str, ...]]:
        def read(key: str, value: Any) -> tuple[str, ...]:
            found = []
            for number, entry in enumerate(self._list(key, value)):
                place = f"{key}[{number}]"
                why = trouble(self._text(place, entry))
                if why:
                    self.refuse(place, why)
                found.append(entry)
            return tuple(found)

        return read

    def _caps(self, key: str, value: Any) -> Mapping[str, Cap]:
        caps = {}
        for name, bounds in self._object(key, value, (*MEMORY_CAPS, *NUMBER_CAPS)).items():
            place = f"{key}.{name}"
            read = self._object(place, bounds, ("max", "default"))
            numbers = {which: self._amount(place, which, read[which], name) for which in read}
            cap = Cap(numbers.get("max"), numbers.get("default"))
            if cap.most is not None and cap.default is not None and cap.default > cap.most:
                self.refuse(f"{place}.default", "this is more than max")
            caps[name] = cap
        return MappingProxyType(caps)

    def _amount(self, place: str, which: str, value: Any, name: str) -> float:
        key = f"{place}.{which}"
        if name in MEMORY_CAPS and isinstance(value, str):
            try:
                value = parse_memory(value, key)
            except SandboxSpecRejectedError as error:
                self.refuse(key, error.reason, error.remedy)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            self.refuse(key, "this must be a number above 0")
        return float(value) if isinstance(value, float) else int(value)

    def _mounts(self, key: str, value: Any) -> tuple[MountGrant, ...]:
        grants = []
        for number, entry in enumerate(self._list(key, value)):
            place = f"{key}[{number}]"
            read = self._object(place, entry, ("path", "mode"))
            path = self._text(f"{place}.path", read.get("path"))
            if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
                self.refuse(f"{place}.path", "this must be an absolute path without '..'")
            mode = self._one_of(("ro", "rw"))(f"{place}.mode", read.get("mode", "ro"))
            grants.append(MountGrant(path.rstrip("/") or "/", mode == "rw"))
        return tuple(grants)

    def _consents(self, key: str, value: Any) -> tuple[Consent, ...]:
        consents = []
        for number, entry in enumerate(self._list(key, value)):
            place = f"{key}[{number}]"
            if isinstance(entry, dict) and "hosts" in entry:
                self.refuse(
                    f"{place}.hosts",
                    "an engine cannot enforce a list of hosts",
                    "Restrict hosts in the firewall of the engine's machine.",
                )
            read = self._object(place, entry, ("cell_sha256", "notebook", "until"))
            digest = self._text(f"{place}.cell_sha256", read.get("cell_sha256")).lower()
            if not _SHA256.fullmatch(digest):
                self.refuse(f"{place}.cell_sha256", "this is not a SHA-256 in hexadecimal")
            notebook = read.get("notebook", "")
            if "notebook" in read:
                self._text(f"{place}.notebook", notebook)
            until = self._moment(f"{place}.until", read["until"]) if "until" in read else None
            consents.append(Consent(digest, notebook, until))
        return tuple(consents)

    def _moment(self, key: str, value: Any) -> datetime:
        try:
            moment = datetime.fromisoformat(self._text(key, value))
        except ValueError:
            self.refuse(key, "this is not a time in ISO 8601, as in 2031-05-01T12:00Z")
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _no_name(text: str) -> str | None:
    return None if _NAME.fullmatch(text) else "this is not a name, nor a pattern of one"


def _no_text(text: str) -> str | None:
    printable = text.isprintable() and len(text) <= 255
    return None if printable else "this is not a name, nor a pattern of one"
