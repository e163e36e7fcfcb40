"""How each field of a request is judged: one rule per field, so that a field is one line more.

A rule answers two questions. What does a request get that leaves the field out? And does a
certain file allow a certain value? A field without a rule is none of a policy's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sandbox_kernel.amounts import memory_text, parse_memory
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.document import (
    ISOLATIONS,
    MEMORY_CAPS,
    NETWORKS,
    NUMBER_CAPS,
    PolicyDocument,
)
from sandbox_kernel.policy.mounts import host_folder
from sandbox_kernel.policy.patterns import any_name, image_matches, matches_name

__all__ = ["RULES", "Answer", "Rule"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rule has to say against a value.

    Parameters
    ----------
    shown
        What of the value an error may show.
    reason
        What the file says; the words "the policy in FILE" come before it.
    remedy
        What to do instead.
    """

    shown: object
    reason: str
    remedy: str


Filling = tuple[object, str]
"""A value for a field that was left out, and the file that says so."""


class Rule(Protocol):
    """How one field is judged."""

    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        """Return what a request gets that leaves the field out; `None` for the built-in."""
        ...

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        """Return what the file has against a value, or `None` if nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _Capped:
    """A number with a largest value; `text` shows it.

    The default of a cap is not for a field that is itself the bound of another one.
    """

    cap: str
    text: Callable[[float], str]
    has_default: bool = True

    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        caps = [(d.caps[self.cap], d.source) for d in documents if self.cap in d.caps]
        defaults = [(cap.default, source) for cap, source in caps if cap.default is not None]
        if not self.has_default:
            defaults = []
        bounds = [(cap.most, source) for cap, source in caps if cap.most is not None]
        candidates: list[tuple[float, str]] = []
        if defaults:
            candidates.append(min(defaults))
        elif isinstance(built_in, int | float):
            candidates.append((built_in, ""))
        if bounds:
            candidates.append(min(bounds))
        # Where the built-in default is within bounds, it stands, and no file has said anything.
        value, source = min(candidates, default=(0, ""))
        return (value, source) if source else None

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        cap = document.caps.get(self.cap)
        if cap is None or cap.most is None:
            return None
        amount = _amount(value) if self.cap in MEMORY_CAPS else value
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if number and amount <= cap.most:
            return None
        most = self.text(cap.most)
        asked = f", and {self.text(amount)} is more" if number and self.cap in MEMORY_CAPS else ""
        return Answer(value, f"allows at most {most}{asked}", f"Ask for at most {most}.")


def _amount(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_memory(value)
    except SandboxSpecRejectedError:
        return None


@dataclass(frozen=True, slots=True)
class _Ranked:
    """One of a row of words; a file says how far in the row a request may go, or must."""

    field: str
    row: tuple[str, ...]
    ceiling: bool

    def _limit(self, document: PolicyDocument) -> str:
        return str(getattr(document, self.field))

    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        if self.ceiling:
            # The built-in value is the first of the row, which every file allows.
            return None
        ranked = [(self.row.index(self._limit(d)), d) for d in documents]
        rank, document = max(ranked, key=lambda pair: pair[0], default=(0, None))
        return (self.row[rank], document.source) if rank and document is not None else None

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        limit = self._limit(document)
        bound = self.row.index(limit)
        if value in self.row:
            rank = self.row.index(value)
            if rank <= bound if self.ceiling else rank >= bound:
                return None
        elif limit == (self.row[-1] if self.ceiling else self.row[0]):
            # The file restricts nothing; that there is no such word, the spec says better.
            return None
        word = "nothing above" if self.ceiling else "nothing below"
        return Answer(value, f"allows {word} {limit!r}", f"Ask for {limit!r}.")


@dataclass(frozen=True, slots=True)
class _Switched:
    """A switch that a file can hold in one position."""

    field: str
    free: bool
    """What the file says when it leaves the choice to the request."""
    refused: Callable[[Any], bool]
    filled: object
    reason: str
    remedy: str

    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        if built_in == self.filled:
            return None
        for document in documents:
            if getattr(document, self.field) is not self.free:
                return self.filled, document.source
        return None

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        if getattr(document, self.field) is self.free or not self.refused(value):
            return None
        return Answer(value, self.reason, self.remedy)


@dataclass(frozen=True, slots=True)
class _Images:
    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        return None

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        allowed = document.images
        if allowed is None:
            return None
        if isinstance(value, str) and any(image_matches(pattern, value) for pattern in allowed):
            return None
        remedy = f"Use one that fits {_listed(allowed)}." if allowed else "None is allowed."
        return Answer(value, "does not allow this image", remedy)


@dataclass(frozen=True, slots=True)
class _Runtimes:
    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        # The engine's own default runtime is whatever the engine says, so it is never left open.
        lists = [(d.runtimes, d.source) for d in documents if d.runtimes is not None]
        if not lists:
            return None
        names = [name for runtimes, _ in lists for name in runtimes if "*" not in name]
        fit = [name for name in names if all(any_name(r, name) for r, _ in lists)]
        return (fit[0] if fit else "", lists[0][1])

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        allowed = document.runtimes
        if allowed is None or (isinstance(value, str) and value and any_name(allowed, value)):
            return None
        remedy = f"Use one of {_listed(allowed)}." if allowed else "None is allowed."
        return Answer(value or None, "does not allow this runtime", remedy)


@dataclass(frozen=True, slots=True)
class _Granted:
    """A list of names, each of which a file must grant."""

    field: str
    noun: str

    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        return None

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        granted = getattr(document, self.field)
        for name in _names(value):
            if not any_name(granted, name):
                remedy = f"It grants {_listed(granted)}." if granted else "It grants none."
                return Answer(name, f"does not grant this {self.noun}", remedy)
        return None


def _names(value: Any) -> list[str]:
    # A data set that is mounted under another name is judged by what it is, not by that name.
    entries = value.values() if isinstance(value, Mapping) else value
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        entries = [entries]
    return [str(entry) for entry in entries]


@dataclass(frozen=True, slots=True)
class _Mounts:
    """Folders of the engine's machine, by the names under which the sandbox sees them."""

    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        return None

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        for text in value.values():
            folder = host_folder(str(text))
            for grant in document.mounts:
                below = (folder.path + "/").startswith(grant.path.rstrip("/") + "/")
                if below and (folder.read_only or grant.writable):
                    break
            else:
                how = "read-only" if folder.read_only else "for writing"
                paths = [f"{g.path} ({'rw' if g.writable else 'ro'})" for g in document.mounts]
                remedy = f"It grants {', '.join(paths)}." if paths else "It grants none."
                return Answer(folder.path, f"does not grant this mount {how}", remedy)
        return None


@dataclass(frozen=True, slots=True)
class _Variables:
    def fill(self, documents: Sequence[PolicyDocument], built_in: object) -> Filling | None:
        return None

    def refuse(self, document: PolicyDocument, value: Any) -> Answer | None:
        for name in value:
            for pattern in document.forbidden_environment:
                if matches_name(pattern, str(name), ignore_case=True):
                    reason = f"forbids variables that fit {pattern!r}"
                    return Answer(str(name), reason, "Leave the variable out.")
        return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _number_text(value: float) -> str:
    return f"{value:.12g}"


_CAPS: Final = {
    **{name: _Capped(name, memory_text) for name in MEMORY_CAPS},
    **{name: _Capped(name, _number_text) for name in NUMBER_CAPS},
}

_HOST_FILES: Final = _Switched(
    "allow_host_files",
    free=True,
    refused=lambda value: value is not None,
    filled=None,
    reason="lets no files of this machine into a sandbox by themselves",
    remedy="Leave the setting out.",
)

RULES: Final[Mapping[str, Rule]] = {
    "image": _Images(),
    "pull_policy": _Switched(
        "allow_pull",
        free=True,
        refused=lambda value: value != "never",
        filled="never",
        reason="allows no image to be pulled",
        remedy="Use 'never', and have the image put on the engine.",
    ),
    "allow_insecure_engine": _Switched(
        "allow_insecure_engine",
        free=True,
        refused=bool,
        filled=False,
        reason="allows no plain connection to an engine",
        remedy="Use an engine with TLS.",
    ),
    "require_egress_firewall": _Switched(
        "require_egress_firewall",
        free=False,
        refused=lambda value: not value,
        filled=True,
        reason="demands the proof of a firewall",
        remedy="Leave the setting out.",
    ),
    "template": _HOST_FILES,
    "project": _HOST_FILES,
    "files": _Switched(
        "allow_host_files",
        free=True,
        refused=lambda value: value != "none",
        filled="none",
        reason="lets no files of this machine into a sandbox by themselves",
        remedy="Use 'none', and put files there on purpose.",
    ),
    **_CAPS,
    "max_timeout": _Capped("timeout", _number_text, has_default=False),
    "network": _Ranked("network", NETWORKS, ceiling=True),
    "isolation": _Ranked("isolation", ISOLATIONS, ceiling=False),
    "runtime": _Runtimes(),
    "mounts": _Mounts(),
    "data_sets": _Granted("data_sets", "data set"),
    "devices": _Granted("devices", "device"),
    "environment": _Variables(),
    "env_keep": _Variables(),
}
"""The rule of each field of a request that a policy has a say in."""
