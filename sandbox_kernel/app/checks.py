"""What ``status`` knows to check, as pure functions of what was found (feature E7).

A check is *ok*, a *note* (worth knowing), a *warning* (works, weaker than it could be) or a
*problem* (sandboxes will not run); a problem has a remedy to paste. The floors of versions
are those of published weaknesses; distributions carry fixes under old numbers, so a version
below a floor is a warning and never more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sandbox_kernel.config import ConfigFile
from sandbox_kernel.engine.images import ImageInfo, how_to_get, is_ours
from sandbox_kernel.engine.probe import ProbeReport
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Policy, statements
from sandbox_kernel.sandbox.spec import SandboxSpec, resolve_limits

__all__ = [
    "Check",
    "config_check",
    "engine_checks",
    "image_check",
    "policy_check",
    "sandbox_check",
    "version_tuple",
]

Level = Literal["ok", "note", "warning", "problem"]

_ENGINE_FLOORS = ((26, 0, 0), (25, 0, 5), (23, 0, 11))
_RUNC_HARD = (1, 1, 12)
_RUNC_FLOORS = ((1, 4, 0), (1, 3, 3), (1, 2, 8))


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def version_tuple(text: str) -> tuple[int, int, int] | None:
    """Read the first three numbers of a version such as ``20.10.24+dfsg1``."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _at_least(version: tuple[int, int, int], floors: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a version is on or above the floor of its own series; floors newest first."""
    if version >= floors[0]:
        return True
    return any(version[0] == floor[0] and version[1] == floor[1] and version >= floor
               for floor in floors)  # fmt: skip


def engine_checks(report: ProbeReport, version: Mapping[str, Any]) -> list[Check]:
    """Check an engine that answers.

    Parameters
    ----------
    report
        What the probe found.
    version
        The engine's answer to ``/version``, for the versions of its parts.
    """
    memory = f"{report.memory / 2**30:.1f} GiB"
    checks = [
        Check(
            "engine",
            "ok",
            f"{report.product} {report.version}, API {report.api_version}, on "
            f"{report.operating_system} ({report.architecture}, kernel {report.kernel}), "
            f"{report.cpus} processors, {memory}",
        ),
        *_version_checks(report, version),
        _seccomp(report),
        _limits(report),
        _users(report),
        Check(
            "runtimes",
            "ok",
            f"{', '.join(report.runtimes) or 'none named'}; default {report.default_runtime}",
        ),
    ]
    if report.cgroup_version == "1":
        checks.append(
            Check("cgroup", "note", "cgroup v1 is used; v2 accounts memory more completely")
        )
    checks += [Check("engine says", "note", text) for text in report.warnings]
    return checks


def _version_checks(report: ProbeReport, version: Mapping[str, Any]) -> list[Check]:
    checks = []
    number = version_tuple(report.version)
    if report.product == "Docker" and number and not _at_least(number, _ENGINE_FLOORS):
        checks.append(
            Check(
                "engine version",
                "warning",
                f"Docker {report.version} is older than the fix of CVE-2024-29018 (names are "
                "looked up for networks that have no way out); sandboxes without a network are "
                "not affected",
                "Update Docker to 26 or later; your distribution may carry the fix under the old "
                "number.",
            )
        )
    for part in version.get("Components") or ():
        if not isinstance(part, Mapping) or part.get("Name") != "runc":
            continue
        text = str(part.get("Version") or "")
        number = version_tuple(text)
        if number is None:
            continue
        hint = (
            "your distribution may carry the fix under the old number "
            "(apt-get changelog runc | grep CVE)."
        )
        if number < _RUNC_HARD:
            checks.append(
                Check(
                    "runc version",
                    "warning",
                    f"runc {text} is older than the fix of CVE-2024-21626 (a way out of a "
                    "container)",
                    f"Update runc to 1.1.12 or later, better 1.2.8 or 1.3.3; {hint}",
                )
            )
        elif not _at_least(number, _RUNC_FLOORS):
            checks.append(
                Check(
                    "runc version",
                    "warning",
                    f"runc {text} is older than the fixes of CVE-2025-31133, CVE-2025-52565 and "
                    "CVE-2025-52881",
                    f"Update runc to 1.2.8, 1.3.3 or later; {hint}",
                )
            )
        else:
            checks.append(Check("runc version", "ok", f"runc {text}"))
    return checks


def _seccomp(report: ProbeReport) -> Check:
    if report.seccomp:
        return Check("seccomp", "ok", "system calls are filtered")
    return Check(
        "seccomp",
        "problem",
        "the engine cannot filter system calls, and no sandbox runs without the filter",
        "Use an engine with seccomp: a kernel with CONFIG_SECCOMP_FILTER, and not "
        "`dockerd --seccomp-profile=unconfined`.",
    )


def _limits(report: ProbeReport) -> Check:
    missing = report.unenforced_limits
    if missing == ("swap",):
        return Check(
            "limits",
            "problem",
            "the engine does not limit swap, so a limit of memory would mean little",
            "Start the engine's machine with the kernel parameter swapaccount=1, or move it to "
            "cgroup v2.",
        )
    if missing:
        return Check(
            "limits",
            "problem",
            f"the engine does not enforce limits of {', '.join(missing)} (cgroup driver "
            f"{report.cgroup_driver or 'unknown'}, version {report.cgroup_version or 'unknown'})",
            "Rootless engines need cgroup v2 with systemd and delegated controllers: "
            "https://docs.docker.com/engine/security/rootless/ . Else use a rootful engine.",
        )
    return Check("limits", "ok", "memory, swap, cpu and pids are limited")


def _users(report: ProbeReport) -> Check:
    if report.rootless:
        return Check("users", "ok", "the engine runs without root")
    if report.userns:
        return Check("users", "ok", "users in containers are remapped on the engine's machine")
    return Check(
        "users",
        "note",
        "users in containers are not remapped; `dockerd --userns-remap=default` adds a wall",
    )


def sandbox_check(info: Mapping[str, Any], spec: SandboxSpec) -> Check:
    """Check what a sandbox with the configured settings gets on the engine's machine."""
    try:
        limits = resolve_limits(spec, info)
    except SandboxSpecRejectedError as error:
        return Check("sandbox", "problem", f"{error.setting}: {error.reason}", error.remedy)
    network = "no network" if spec.network == "none" else f"the network tier {spec.network!r}"
    return Check(
        "sandbox",
        "ok",
        f"by default {limits.nano_cpus / 1e9:g} processors, {limits.memory / 2**30:.1f} GiB of "
        f"memory, {limits.pids} processes, {network}",
    )


def config_check(files: Sequence[ConfigFile]) -> Check:
    """Say which configuration files hold."""
    names = ", ".join(str(file.path) for file in files)
    return Check("configuration", "ok", names or "no file; the built-in defaults hold")


_OPENS = ("mounts", "data_sets", "devices")
"""What a policy can open beside the one mount that a sandbox has (B2, B15, B16)."""


def policy_check(policy: Policy) -> Check:
    """Say which policy files are in force, and whether somebody can take them away."""
    loose = [d.source for d in policy.documents if not d.binding]
    if not policy.documents:
        return Check("policy", "ok", "no file; nothing is restricted")
    names = ", ".join(document.source for document in policy.documents)
    opened = {s.key: s.text for s in statements(policy) if s.key in _OPENS}
    # Each file has to grant it.
    granted = [key for key in opened if all(getattr(d, key) for d in policy.documents)]
    if granted:
        names += "; sandboxes may be given more than their workspace: " + ", ".join(
            f"{key} {opened[key]}" for key in granted
        )
    if loose:
        return Check(
            "policy",
            "note",
            f"{names}; self-restraint only, since others than root can change {', '.join(loose)}",
        )
    return Check("policy", "ok", names)


def image_check(ref: str, image: ImageInfo | None, version: str) -> Check:
    """Check the image that sandboxes run from."""
    if image is None:
        return Check("image", "problem", f"{ref} is not on the engine", f"Run: {how_to_get(ref)}")
    labels = image.config.get("Labels") or {}
    made = str(labels.get("io.sandbox-kernel-image.version") or "")
    text = f"{ref} ({image.size / 1e6:.0f} MB)"
    if made and made != version:
        return Check(
            "image",
            "warning",
            f"{text} was built by sandbox-kernel {made[:20]}, this is {version}",
            f"Run: {how_to_get(ref) if is_ours(ref) else 'jupyter sandbox build --tag ' + ref}",
        )
    return Check("image", "ok", text)
