"""A policy in words, one line for each thing that a file says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sandbox_kernel.amounts import memory_text
from sandbox_kernel.policy.document import (
    ISOLATIONS,
    MEMORY_CAPS,
    NETWORKS,
    Cap,
    PolicyDocument,
)
from sandbox_kernel.policy.judgement import Policy

__all__ = ["Statement", "statements"]


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that a policy file says.

    Parameters
    ----------
    key
        The key in the file; for a cap, the name of the setting.
    text
        What it says.
    said_by
        The file.
    """

    key: str
    text: str
    said_by: str


def statements(policy: Policy) -> list[Statement]:
    """Return everything that a policy says, file by file."""
    return [
        Statement(key, text, document.source)
        for document in policy.documents
        for key, text in _lines(document)
    ]


def _lines(document: PolicyDocument) -> Iterator[tuple[str, str]]:
    if document.images is not None:
        yield "images", _only(document.images)
    if not document.allow_host_files:
        yield "allow_host_files", "no template, project or files of the caller's machine"
    if not document.allow_pull:
        yield "allow_pull", "images are not pulled"
    if document.engine_hosts is not None:
        yield "engine_hosts", _only(document.engine_hosts)
    if not document.allow_insecure_engine:
        yield "allow_insecure_engine", "no plain connection to an engine elsewhere"
    for name, cap in document.caps.items():
        yield name, _cap(name, cap)
    if document.network != NETWORKS[-1]:
        yield "network", f"nothing above {document.network!r}"
    if document.require_egress_firewall:
        yield "require_egress_firewall", "a firewall must be proved"
    if document.isolation != ISOLATIONS[0]:
        yield "isolation", f"nothing below {document.isolation!r}"
    if document.runtimes is not None:
        yield "runtimes", _only(document.runtimes)
    if document.max_sandboxes is not None:
        yield "max_sandboxes", f"{document.max_sandboxes} for each owner"
    if document.forbidden_environment:
        yield "forbidden_environment", ", ".join(document.forbidden_environment)
    if document.mounts:
        granted = [f"{m.path} ({'rw' if m.writable else 'ro'})" for m in document.mounts]
        yield "mounts", ", ".join(granted)
    if document.data_sets:
        yield "data_sets", ", ".join(document.data_sets)
    if document.devices:
        yield "devices", ", ".join(document.devices)
    if document.network_consents:
        yield "network_consents", f"{len(document.network_consents)} cells"


def _only(names: tuple[str, ...]) -> str:
    return f"only {', '.join(names)}" if names else "none"


def _cap(name: str, cap: Cap) -> str:
    text = memory_text if name in MEMORY_CAPS else "{:.12g}".format
    parts = []
    if cap.most is not None:
        parts.append(f"at most {text(cap.most)}")
    if cap.default is not None:
        parts.append(f"{text(cap.default)} by default")
    return ", ".join(parts) or "unrestricted"
