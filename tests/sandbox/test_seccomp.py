"""The system call filter as data: what it lets through, by a model of how it is applied."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.sandbox.seccomp import (
    CONDITIONAL,
    NEVER_ALLOWED,
    check_profile,
    load_profile,
    profile_text,
)

PROFILE = load_profile()
WORD = (1 << 64) - 1
TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD = 0x5412, 0x541C, 0x541D, 0x5423


def allowed(name: str, *args: int) -> bool:
    """Whether a call passes: one rule whose conditions all hold is enough."""
    values = [*args, *[0] * (6 - len(args))]
    return any(
        rule["action"] == "SCMP_ACT_ALLOW"
        and name in rule["names"]
        and all(_holds(arg, values[arg["index"]] & WORD) for arg in rule.get("args", []))
        for rule in PROFILE["syscalls"]
    )


def _holds(arg: dict[str, Any], value: int) -> bool:
    if arg["op"] == "SCMP_CMP_EQ":
        return bool(value == arg["value"])
    return bool(value & arg["value"] == arg.get("valueTwo", 0))


@given(st.integers(0, WORD))
def test_every_request_passes_but_those_that_type_into_a_terminal(code: int) -> None:
    """ESC-16: the kernel looks at the low 32 bits only."""
    refused = code & 0xFFFFFFFF in {TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD}
    assert allowed("ioctl", 0, code) is not refused


@pytest.mark.parametrize("request_code", [TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD])
@pytest.mark.parametrize("upper", [0, 1 << 32, 0xDEADBEEF << 32])
def test_requests_that_type_into_a_terminal_are_refused(request_code: int, upper: int) -> None:
    """ESC-16."""
    assert not allowed("ioctl", 0, request_code | upper)
    assert allowed("ioctl", 0, (request_code ^ 0x80) | upper)


@given(family=st.integers(0, WORD), protocol=st.integers(0, 32))
def test_sockets_are_of_four_families_only(family: int, protocol: int) -> None:
    """ESC-05: a family beyond 32 bits is none of them."""
    expected = family in {1, 2, 10} or (family == 16 and protocol == 0)
    assert allowed("socket", family, 1, protocol) is expected


@given(st.integers(0, WORD))
def test_no_file_gets_the_bits_that_change_its_user(mode: int) -> None:
    harmless = mode & 0o6000 == 0
    assert allowed("chmod", 0, mode) is harmless
    assert allowed("fchmodat", 0, 0, mode) is harmless
    assert allowed("openat", 0, 0, 0o100, mode) is harmless
    assert allowed("openat", 0, 0, 0o20200000, mode) is harmless
    assert allowed("openat", 0, 0, 0, mode)
    assert allowed("mkdirat", 0, 0, mode) is harmless


@given(st.integers(0, WORD))
def test_a_clone_makes_no_namespace(flags: int) -> None:
    """ESC-02."""
    assert allowed("clone", flags) is (flags & 0x7E020000 == 0)


def test_threads_and_libzmq_can_live_with_it() -> None:
    assert allowed("clone", 0x3D0F00)
    assert allowed("sched_setscheduler")
    assert allowed("memfd_create")
    fallbacks = [rule for rule in PROFILE["syscalls"] if "clone3" in rule["names"]]
    assert [rule["errnoRet"] for rule in fallbacks] == [38]


@pytest.mark.parametrize("name", sorted(NEVER_ALLOWED))
def test_what_must_never_pass_does_not(name: str) -> None:
    """ESC-04."""
    assert not allowed(name)


def test_it_goes_to_the_engine_as_a_short_text() -> None:
    text = profile_text()
    assert len(text) < 16384
    assert "comment" not in text
    check_profile(json.loads(text))


def _allow(names: list[str], args: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": args or []}


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(defaultAction="SCMP_ACT_ALLOW"),
        lambda p: p.update(architectures=["SCMP_ARCH_X86"]),
        lambda p: p["archMap"][0].update(subArchitectures=["SCMP_ARCH_X32"]),
        lambda p: p["syscalls"].append(_allow(["ptrace"])),
        lambda p: p["syscalls"].append(_allow(["socket"])),
        lambda p: p["syscalls"].append({**_allow(["read"]), "includes": {"caps": ["X"]}}),
        lambda p: p["syscalls"].append({**_allow(["read"]), "action": "SCMP_ACT_LOG"}),
        lambda p: p["syscalls"].append(
            _allow(["socket"], [{"index": 0, "value": 16, "op": "SCMP_CMP_LE"}])
        ),
        lambda p: p["syscalls"].append(
            _allow(["socket"], [{"index": 0, "value": n, "op": "SCMP_CMP_EQ"} for n in (1, 2)])
        ),
    ],
)
def test_an_edit_that_weakens_it_is_noticed_when_it_is_loaded(change: Any) -> None:
    profile = copy.deepcopy(PROFILE)
    change(profile)
    with pytest.raises(ValueError):  # noqa: PT011 - any of its sentences
        check_profile(profile)


def test_each_name_stands_in_it_with_or_without_condition_but_not_both() -> None:
    plain: list[str] = []
    for rule in PROFILE["syscalls"]:
        if not rule.get("args"):
            plain += rule["names"]
    assert len(plain) == len(set(plain))
    assert not set(plain) & CONDITIONAL
