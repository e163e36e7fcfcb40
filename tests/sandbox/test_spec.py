"""What can be asked for, and what an engine makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.sandbox.spec import (
    GIB,
    MIB,
    RUN_SIZE,
    VOLUME_SIZE,
    SandboxSpec,
    parse_memory,
    resolve_limits,
)

INFO: dict[str, Any] = {
    "NCPU": 2,
    "MemTotal": 8 * GIB,
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsPeriod": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "CgroupDriver": "cgroupfs",
    "SecurityOptions": ["name=seccomp,profile=default"],
    "Architecture": "x86_64",
    "Runtimes": {"runc": {}, "runsc": {}},
    "DefaultRuntime": "runc",
}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2G", 2 * GIB),
        ("1.5g", 3 * GIB // 2),
        ("512M", 512 * MIB),
        ("7", 7),
        (9, 9),
        ("1KiB", 1024),
    ],
)
def test_memory_is_read_as_dockerspawner_reads_it(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1e3", "0x10", "nan", "1 2", None, True])
def test_what_is_no_amount_of_memory_is_refused_by_name(text: Any) -> None:
    with pytest.raises(SandboxSpecRejectedError, match="tmpfs_size"):
        parse_memory(text, "tmpfs_size")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("image", ""), ("image", "-v"), ("image", "a b"), ("image", "a\nb"), ("image", None),
        ("image", "a/../b"), ("image", "a/../../b:1"), ("image", "a/./b"), ("image", "a//b"),
        ("image", "a/"), ("image", "a/.b"), ("image", "r.example.org/x/../../sha256:ab"),
        ("network", "host"), ("network", "bridge"), ("network", "container:x"), ("network", ""),
        ("cpu_limit", 0), ("cpu_limit", -1), ("cpu_limit", float("nan")), ("cpu_limit", "2"),
        ("cpu_limit", True), ("cpu_limit", float("inf")),
        ("mem_limit", 1), ("mem_limit", "2G"), ("mem_limit", -1), ("mem_limit", 1.5),
        ("pids_limit", 0), ("pids_limit", -1), ("pids_limit", None), ("pids_limit", 5),
        ("tmpfs_size", 0), ("shm_size", 0), ("lease_ttl", 1), ("lease_ttl", None),
        ("max_lifetime", 0), ("runtime", "a b"), ("runtime", ""), ("prefix", "/x"), ("prefix", ""),
        ("environment", {"a b": "c"}), ("environment", {"A": 1}), ("environment", [("A", "b")]),
        ("isolation", "kvm"), ("isolation", None), ("durability", "forever"), ("durability", None),
        ("workspace", "a key"), ("disk_limit", 1), ("disk_limit", "1G"), ("resumable", -1),
        ("disk_soft_limit", 1), ("disk_soft_limit", True), ("disk_soft_limit", "1G"),
        ("resumable", None), ("idle_ttl", 1), ("idle_ttl", float("nan")), ("template", ""),
        ("template", 1), ("project", "a\0b"), ("project_limit", 1), ("project_limit", None),
        ("data_sets", {"../x": "v"}), ("data_sets", {"x": "/etc"}), ("data_sets", {"x": ""}),
        ("data_sets", ["x"]), ("data_sets", {f"d{n}": "vol" for n in range(17)}),
        ("devices", "gpus=all"), ("devices", ["gpus=0"]), ("devices", ["/dev/sda"]),
        ("devices", ["gpus=all", "gpus=all"]), ("devices", ["gpus=1", "gpus=2"]),
        ("devices", [None]), ("devices", {"a": 1}),
        ("environment", {"": "x"}), ("environment", None), ("labels", {"": "x"}),
        ("labels", {"io.sandbox-kernel.owner": "root"}), ("labels", {"x": 1}),
    ],
)  # fmt: skip
def test_a_value_that_can_never_be_honoured_is_refused_by_name(setting: str, value: Any) -> None:
    """Every refusal names setting, reason and remedy (features, first paragraph)."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        SandboxSpec(**{setting: value})
    assert caught.value.setting == setting
    assert setting in str(caught.value)
    assert caught.value.reason
    assert caught.value.remedy.endswith(".")


def test_values_of_the_environment_are_never_shown() -> None:
    """B12."""
    assert "hunter2" not in repr(SandboxSpec(environment={"PASSWORD": "hunter2"}))
    for bad in ({"A": "hunter2\0"}, {"B": "hunter2", "C": 1}):
        with pytest.raises(SandboxSpecRejectedError) as caught:
            SandboxSpec(environment=bad)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)


def test_a_spec_does_not_change_with_what_it_was_made_from() -> None:
    given_labels = {"a": "b"}
    spec = SandboxSpec(labels=given_labels)
    given_labels["a"] = "c"
    assert spec.labels["a"] == "b"
    assert spec == SandboxSpec(labels={"a": "b"})
    hash(spec)


def test_defaults_fit_the_machine() -> None:
    """B5."""
    limits = resolve_limits(SandboxSpec(), INFO)
    assert (limits.nano_cpus, limits.memory) == (2_000_000_000, 2 * GIB)
    assert (limits.tmpfs, limits.shm) == (128 * MIB, 64 * MIB)
    small = resolve_limits(SandboxSpec(), {**INFO, "NCPU": 1, "MemTotal": 512 * MIB})
    assert (small.nano_cpus, small.memory) == (1_000_000_000, 512 * MIB)
    assert (small.tmpfs, small.shm) == (64 * MIB, 32 * MIB)


@pytest.mark.parametrize(
    ("setting", "value"), [("cpu_limit", 2.5), ("mem_limit", 9 * GIB), ("runtime", "kata")]
)
def test_more_than_the_machine_has_is_refused(setting: str, value: Any) -> None:
    """B5, B14."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        resolve_limits(SandboxSpec(**{setting: value}), INFO)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"MemoryLimit": False}, "mem_limit"),
        ({"SwapLimit": False}, "mem_limit"),
        ({"CpuCfsQuota": False}, "cpu_limit"),
        ({"CpuCfsPeriod": None}, "cpu_limit"),
        ({"PidsLimit": False}, "pids_limit"),
        ({"CgroupDriver": "none"}, "mem_limit"),
        ({"CgroupDriver": ""}, "mem_limit"),
        ({"SecurityOptions": []}, "security"),
        ({"SecurityOptions": None}, "security"),
        ({"Architecture": "s390x"}, "architecture"),
    ],
)
def test_a_limit_that_the_engine_does_not_enforce_is_refused(
    change: dict[str, Any], setting: str
) -> None:
    """B5: also when the engine would accept it silently, and for the defaults."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        resolve_limits(SandboxSpec(), {**INFO, **change})
    assert caught.value.setting == setting


@given(
    memory=st.integers(64 * MIB, 8 * GIB),
    tmpfs=st.none() | st.integers(MIB, GIB),
    shm=st.none() | st.integers(MIB, GIB),
    volumes=st.integers(0, 4),
)
def test_memory_backed_places_never_exceed_half_of_the_memory(
    memory: int, tmpfs: int | None, shm: int | None, volumes: int
) -> None:
    """RES-05."""
    spec = SandboxSpec(mem_limit=memory, tmpfs_size=tmpfs, shm_size=shm)
    try:
        limits = resolve_limits(spec, INFO, volumes)
    except SandboxSpecRejectedError:
        return
    places = 2 * limits.tmpfs + limits.shm + limits.output
    assert places + RUN_SIZE + volumes * VOLUME_SIZE <= memory // 2
    assert MIB <= limits.output <= max(limits.tmpfs, MIB)


def test_a_runtime_that_isolates_as_asked_is_chosen() -> None:
    """B14: verified by its name; the engine's account of the container is compared as well."""
    assert resolve_limits(SandboxSpec(isolation="vm"), INFO).runtime == "runsc"
    assert resolve_limits(SandboxSpec(), INFO).runtime == "runc"
    kata = {**INFO, "Runtimes": {"runc": {}, "kata-qemu": {}}}
    assert resolve_limits(SandboxSpec(isolation="vm"), kata).runtime == "kata-qemu"
    default = {**INFO, "DefaultRuntime": "runsc"}
    assert resolve_limits(SandboxSpec(isolation="vm"), default).runtime == "runsc"
    for spec in (SandboxSpec(isolation="vm", runtime="runc"), SandboxSpec(isolation="vm")):
        with pytest.raises(SandboxSpecRejectedError, match="isolation"):
            resolve_limits(spec, {**INFO, "Runtimes": {"runc": {}}})
