"""What ``status`` makes of what it finds (E7)."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_kernel.app.checks import (
    Check,
    engine_checks,
    image_check,
    policy_check,
    sandbox_check,
    version_tuple,
)
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import DEFAULT_IMAGE, ImageInfo
from sandbox_kernel.engine.probe import ProbeReport, report
from sandbox_kernel.policy import Policy, parse_policy
from sandbox_kernel.sandbox.spec import SandboxSpec

INFO: dict[str, Any] = {
    "OperatingSystem": "Debian GNU/Linux 12",
    "Architecture": "x86_64",
    "KernelVersion": "6.1",
    "NCPU": 4,
    "MemTotal": 8 * 2**30,
    "CgroupDriver": "systemd",
    "CgroupVersion": "2",
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "Runtimes": {"runc": {}},
    "DefaultRuntime": "runc",
    "SecurityOptions": ["name=seccomp,profile=builtin", "name=cgroupns"],
}


def engine(version: str = "28.5.2", **info: Any) -> ProbeReport:
    return report(Endpoint("unix:///x.sock"), "1.51", {"Version": version}, {**INFO, **info})


def found(report: ProbeReport, name: str, runc: str = "1.3.3") -> Check:
    version = {"Components": [{"Name": "runc", "Version": runc}, {"Name": "other"}]}
    [check] = [c for c in engine_checks(report, version) if c.name == name]
    return check


def image(**labels: str) -> ImageInfo:
    return ImageInfo("sha256:1", (), (), 10**9, "linux", "amd64", {"Labels": labels})


def test_a_current_engine_has_no_problem_and_no_warning() -> None:
    """E7"""
    version = {"Components": [{"Name": "runc", "Version": "1.3.3"}]}
    assert {c.level for c in engine_checks(engine(), version)} == {"ok", "note"}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("20.10.24+dfsg1", (20, 10, 24)),
        ("1.1.5+ds1-1+deb12u1", (1, 1, 5)),
        ("v1.2", (1, 2, 0)),
        ("28.0.0-rc.1", (28, 0, 0)),
        ("unknown", None),
        ("", None),
    ],
)
def test_versions_are_read_as_distributions_write_them(text: str, numbers: object) -> None:
    assert version_tuple(text) == numbers


@pytest.mark.parametrize(
    ("version", "warned"),
    [("20.10.24", True), ("23.0.10", True), ("23.0.11", False), ("24.0.9", True),
     ("25.0.4", True), ("25.0.5", False), ("26.0.0", False), ("28.5.2", False)],
)  # fmt: skip
def test_an_engine_below_the_floor_of_its_series_is_warned_about(
    version: str, warned: bool
) -> None:
    """E7"""
    checks = engine_checks(engine(version), {})
    assert any(c.name == "engine version" and c.level == "warning" for c in checks) == warned


@pytest.mark.parametrize(
    ("runc", "cve"),
    [("1.1.5+ds1-1+deb12u1", "CVE-2024-21626"), ("1.1.12", "CVE-2025-31133"),
     ("1.2.7", "CVE-2025-31133"), ("1.3.2", "CVE-2025-31133")],
)  # fmt: skip
def test_an_old_runc_is_warned_about_with_the_weakness_and_what_to_do(runc: str, cve: str) -> None:
    """E7"""
    check = found(engine(), "runc version", runc)
    assert check.level == "warning"
    assert cve in check.text
    assert check.remedy


@pytest.mark.parametrize("runc", ["1.2.8", "1.3.3", "1.4.0", "2.0.0"])
def test_a_current_runc_is_fine(runc: str) -> None:
    """E7"""
    assert found(engine(), "runc version", runc).level == "ok"


def test_an_engine_that_enforces_no_limits_is_a_problem() -> None:
    """E7, B5"""
    check = found(engine(CgroupDriver="none", CgroupVersion="1"), "limits")
    assert check.level == "problem"
    assert "memory, swap, cpu, pids" in check.text
    assert check.remedy


def test_swap_without_a_limit_is_a_problem_with_its_own_remedy() -> None:
    """E7, B5"""
    check = found(engine(SwapLimit=False), "limits")
    assert check.level == "problem"
    assert "swapaccount=1" in check.remedy


def test_what_a_sandbox_gets_by_default_is_told() -> None:
    """E7, B5"""
    info = {**INFO, "CpuCfsPeriod": True}
    assert sandbox_check(info, SandboxSpec()).level == "ok"
    assert "2 processors, 2.0 GiB" in sandbox_check(info, SandboxSpec()).text
    refused = sandbox_check({**info, "Architecture": "riscv64"}, SandboxSpec())
    assert refused.level == "problem"
    assert refused.remedy


def test_a_policy_that_opens_more_than_the_workspace_is_told() -> None:
    """B2, B11, B16: the one mount is the rule, and whoever looks learns of exceptions."""
    opens = parse_policy(
        '{"mounts": [{"path": "/srv"}], "data_sets": ["iris"]}', "a.json", binding=True
    )
    text = policy_check(Policy((opens,))).text
    assert "mounts /srv (ro), data_sets iris" in text
    # What another file does not grant too is not granted.
    other = parse_policy('{"data_sets": ["iris"]}', "b.json", binding=True)
    text = policy_check(Policy((opens, other))).text
    assert "data_sets iris" in text
    assert "mounts" not in text
    assert "more than" not in policy_check(Policy((parse_policy("{}", "c.json"),))).text


def test_an_engine_without_seccomp_is_a_problem() -> None:
    """E7"""
    assert found(engine(SecurityOptions=[]), "seccomp").level == "problem"


def test_a_missing_image_names_the_command_that_makes_it() -> None:
    """E5, E7"""
    check = image_check(DEFAULT_IMAGE, None, "0.1.0")
    assert check.level == "problem"
    assert "jupyter sandbox build" in check.remedy
    assert "docker pull other:1" in image_check("other:1", None, "0.1.0").remedy


def test_an_image_of_another_version_is_a_warning() -> None:
    """E7"""
    old = image(**{"io.sandbox-kernel-image.version": "0.0.9"})
    assert image_check(DEFAULT_IMAGE, old, "0.1.0").level == "warning"
    assert image_check(DEFAULT_IMAGE, image(), "0.1.0").level == "ok"
