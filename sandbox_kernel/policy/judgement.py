"""The policy that is in force, made of files, and its judgement of requests.

The error of a refusal names the setting, the value, the limit and the file that says so. What
is above a limit is refused and never lowered in silence; only what a request leaves out is
filled in, with the built-in default or the limit, whichever is less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.document import Consent, PolicyDocument
from sandbox_kernel.policy.patterns import EngineRule, matches_name
from sandbox_kernel.policy.rules import RULES

__all__ = ["Decision", "Filled", "Owner", "Policy", "Quota"]

_ASK: Final = "Ask whoever administers the policy for more."

_NO_POLICY: Final = "the built-in policy"
"""What errors call the policy where there is no file."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What is known of whoever asks.

    Parameters
    ----------
    name
        As it stands in the label of the sandboxes.
    sandboxes
        How many there are.
    """

    name: str
    sandboxes: int


@dataclass(frozen=True, slots=True)
class Quota:
    """How many sandboxes one owner may have at a time, and the file that says so."""

    most: int
    said_by: str

    def refusal(self, owner: str, sandboxes: int) -> SandboxSpecRejectedError:
        """Return the error for an owner that has as many as are allowed."""
        return SandboxSpecRejectedError(
            "max_sandboxes",
            None,
            f"{owner!r} has {sandboxes} running, and the policy in {self.said_by} allows "
            f"{self.most}",
            "End one of them first (`docker ps --filter label=io.sandbox-kernel.owner`).",
        )


@dataclass(frozen=True, slots=True)
class Filled:
    """A value that a policy gave to a setting which the request left out."""

    value: object
    said_by: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A request that is allowed.

    Parameters
    ----------
    filled
        Values for settings that the request left out.
    quota
        How many sandboxes the owner may have; `None` for any number.
    engines
        The engines that may be used, one rule for each file that says something of them.
    longest_timeout
        The longest timeout of a command, so that none may run without; `None` for no bound.
    """

    filled: Mapping[str, Filled] = field(default_factory=dict)
    quota: Quota | None = None
    engines: tuple[EngineRule, ...] = ()
    longest_timeout: Filled | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Every policy file in force. A request must pass all of them.

    Parameters
    ----------
    documents
        The files; none of them restricts nothing, and grants nothing that must be granted.
    """

    documents: tuple[PolicyDocument, ...] = ()

    def __post_init__(self) -> None:
        # One order and no repetition: the judgement depends on what is said, not on who is
        # asked first.
        unique = {(d.source, repr(d)): d for d in self.documents}
        object.__setattr__(self, "documents", tuple(unique[key] for key in sorted(unique)))

    def merge(self, other: Policy) -> Policy:
        """Return the policy that both have to allow a request for it to pass."""
        return Policy(self.documents + other.documents)

    def judge(
        self,
        request: Mapping[str, object],
        owner: Owner | None = None,
        built_in: Mapping[str, object] | None = None,
    ) -> Decision:
        """Decide on a request.

        Parameters
        ----------
        request
            Settings by name; one that is absent or `None` is left out. Fields that no policy
            has a say in are passed over.
        owner
            Who asks, where the sandboxes of this owner have been counted.
        built_in
            What a setting is that everybody leaves out.

        Returns
        -------
        Decision
            With what is to be filled in.

        Raises
        ------
        SandboxSpecRejectedError
            A file does not allow it.
        """
        for refusal in self.refusals(request, owner, built_in):
            raise refusal
        return Decision(
            self._fillings(request, built_in or {}),
            self.quota,
            self.engines,
            self._longest_timeout,
        )

    def refusals(
        self,
        request: Mapping[str, object],
        owner: Owner | None = None,
        built_in: Mapping[str, object] | None = None,
    ) -> Iterator[SandboxSpecRejectedError]:
        """Yield everything that speaks against a request."""
        built_in = built_in or {}
        filled = self._fillings(request, built_in)
        documents = self.documents or (PolicyDocument(_NO_POLICY),)
        for name, rule in RULES.items():
            value = request.get(name)
            if value is None:
                value = filled[name].value if name in filled else built_in.get(name)
            if value is None:
                continue
            for document in documents:
                answer = rule.refuse(document, value)
                if answer is not None:
                    source = document.source
                    said_by = source if source == _NO_POLICY else f"the policy in {source}"
                    yield SandboxSpecRejectedError(
                        name, answer.shown, f"{said_by} {answer.reason}", f"{answer.remedy} {_ASK}"
                    )
                    break
        quota = self.quota
        if quota is not None and owner is not None and owner.sandboxes >= quota.most:
            yield quota.refusal(owner.name, owner.sandboxes)

    def _fillings(
        self, request: Mapping[str, object], built_in: Mapping[str, object]
    ) -> dict[str, Filled]:
        filled = {}
        for name, rule in RULES.items():
            if request.get(name) is None:
                filling = rule.fill(self.documents, built_in.get(name))
                if filling is not None:
                    filled[name] = Filled(*filling)
        return filled

    @property
    def quota(self) -> Quota | None:
        """How many sandboxes one owner may have."""
        limits = [
            Quota(d.max_sandboxes, d.source) for d in self.documents if d.max_sandboxes is not None
        ]
        return min(limits, key=lambda quota: quota.most, default=None)

    @property
    def _longest_timeout(self) -> Filled | None:
        caps = [(d.caps["timeout"].most, d.source) for d in self.documents if "timeout" in d.caps]
        bounds = [(most, source) for most, source in caps if most is not None]
        return Filled(*min(bounds)) if bounds else None

    @property
    def engines(self) -> tuple[EngineRule, ...]:
        """The engines that may be used; no rule at all allows every one."""
        return tuple(
            EngineRule(d.engine_hosts, d.source)
            for d in self.documents
            if d.engine_hosts is not None
        )

    def consent(self, cell_sha256: str, notebook: str, now: datetime) -> Consent | None:
        """Return the consent to a network for a cell, where nobody can be asked (C5).

        Every file must consent, and one of them must be out of reach of the person who runs
        this: a notebook must not be able to approve itself.

        Parameters
        ----------
        cell_sha256
            Digest of the cell's text in UTF-8, in hexadecimal.
        notebook
            Path of the notebook.
        now
            The time, with its zone.
        """
        found: Consent | None = None
        for document in self.documents:
            consent = _first(document.network_consents, cell_sha256.lower(), notebook, now)
            if consent is None:
                return None
            if document.binding:
                found = consent
        return found


def _first(
    consents: Iterable[Consent], digest: str, notebook: str, now: datetime
) -> Consent | None:
    for consent in consents:
        there = not consent.notebook or matches_name(consent.notebook, notebook)
        over = consent.until is not None and now >= consent.until
        if consent.cell_sha256 == digest and there and not over:
            return consent
    return None
