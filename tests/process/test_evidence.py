"""Why a command failed, where the kernel has counted it; and the pure part of that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.process.result import Reason
from sandbox_kernel.process.verdict import (
    Evidence,
    agree,
    parse_evidence,
    parse_identity,
    verdict,
)
from sandbox_kernel.sandbox.live import LiveSandbox
from tests.process.conftest import MakeSandbox, sh

EAT = "exec python3 -c 'x = []\nwhile True: x.append(bytearray(10 << 20))'"


async def test_lack_of_memory_is_told_by_the_kernels_count(make_sandbox: MakeSandbox) -> None:
    """Issue 3, RES-04, peers 22: with the peak; another 137 is not mistaken for it."""
    sandbox = await make_sandbox(mem_limit=256 << 20)
    result = await sh(sandbox, EAT)
    assert (result.returncode, result.reason) == (137, "out-of-memory")
    assert "killed for lack of memory" in result.evidence
    assert result.peak_memory is not None
    assert 0.9 * sandbox.limits.memory < result.peak_memory <= sandbox.limits.memory
    # What was counted before a command began is not held against it.
    result = await sh(sandbox, "kill -9 $$")
    assert (result.returncode, result.reason) == (137, "finished")
    # Nor is what a command got over.
    result = await sh(sandbox, f"({EAT}); exit 0")
    assert (result.returncode, result.reason) == (0, "finished")


async def test_a_child_that_lacked_memory_explains_the_failure(
    make_sandbox: MakeSandbox, any_image: str
) -> None:
    """Issue 3, RES-04: the command's own code is kept."""
    sandbox = await make_sandbox(any_image, mem_limit=128 << 20)
    eat = "head -c 300m /dev/zero | tail -c 300m >/dev/null"
    result = await sh(sandbox, f"{eat}; [ $? -eq 0 ] || exit 4")
    assert (result.returncode, result.reason) == (4, "out-of-memory")


async def test_the_limit_of_processes_explains_a_failure(make_sandbox: MakeSandbox) -> None:
    """Issue 3, RES-01: by the count of refused forks."""
    sandbox = await make_sandbox(pids_limit=40)
    result = await sh(sandbox, "for i in $(seq 60); do sleep 1 & done; wait; exit 3")
    assert result.returncode != 0
    assert result.reason == "pids-limit"
    assert "limit was reached" in result.evidence
    assert (await sh(sandbox, "exit 3")).reason == "finished"


@pytest.mark.parametrize("place", ["/tmp", "/home/sbx", "/dev/shm"])
async def test_a_full_disk_explains_a_failure(sandbox: LiveSandbox, place: str) -> None:
    """Issue 3, RES-05: only while no room is left, and only for a command that failed."""
    full = f"head -c 2000m /dev/zero >{place}/file"
    result = await sh(sandbox, f"{full} || exit 5")
    assert (result.returncode, result.reason) == (5, "disk-full")
    assert result.evidence == f"no room is left in {place}"
    assert (await sh(sandbox, f"{full}; exit 0")).reason == "finished"
    result = await sh(sandbox, f"rm {place}/file; exit 5")
    assert (result.returncode, result.reason) == (5, "finished")


async def test_no_more_files_is_a_full_disk_too(any_sandbox: LiveSandbox) -> None:
    """Issue 3, RES-05."""
    result = await sh(any_sandbox, "cd /tmp && seq 40000 | xargs touch || exit 5")
    assert (result.returncode, result.reason) == (5, "disk-full")


@pytest.mark.parametrize(
    ("code", "evidence", "flags", "reason"),
    [
        (0, Evidence(1, 1, 1, "/tmp"), "", "finished"),
        (3, Evidence(0, 0, 1, ""), "", "finished"),
        (137, Evidence(0, 0), "", "finished"),
        (137, Evidence(0, 0), "o", "finished"),
        (137, Evidence(None, None), "o", "out-of-memory"),
        (1, Evidence(None, None), "o", "finished"),
        (137, Evidence(1, 0), "", "out-of-memory"),
        (137, Evidence(1, 0), "k", "killed"),
        (130, Evidence(1, 0), "i", "interrupted"),
        (130, Evidence(0, 0), "", "finished"),
        (1, Evidence(0, 0), "ki", "finished"),
        (1, Evidence(0, 2, None, "/tmp"), "", "pids-limit"),
        (1, Evidence(0, 0, None, "/tmp"), "", "disk-full"),
        (None, Evidence(), "k", "killed"),
        (None, Evidence(), "o", "out-of-memory"),
        (None, Evidence(1, 1, 1, "/tmp"), "", "unknown"),
    ],
)
def test_a_verdict_needs_evidence(
    code: int | None, evidence: Evidence, flags: str, reason: Reason
) -> None:
    """Issue 3: nothing is guessed from a code."""
    given_, _ = verdict(
        code, evidence, killed="k" in flags, interrupted="i" in flags, out_of_memory="o" in flags
    )
    assert given_ == reason


@given(st.lists(st.one_of(st.text(max_size=25), st.integers().map(str)), max_size=9))
def test_reports_of_any_content_are_read_or_ignored(words: list[str]) -> None:
    """EXW-10: they come from where hostile code runs."""
    code, evidence = parse_evidence(words)
    assert code is None or 0 <= code <= 255
    assert evidence.oom_kills is None or evidence.oom_kills >= 0
    identity = parse_identity("pipes", ("", ""), "", words)
    # Zero and negative numbers mean groups, or everything, to a kill.
    assert identity is None or min(identity.root, identity.session, identity.pid) >= 1


@given(st.none() | st.integers(0, 255), st.none() | st.integers(0, 255))
def test_only_two_equal_codes_agree(reported: int | None, recorded: int | None) -> None:
    """W13: unknown is never a code."""
    assert agree(reported, recorded) == (reported is not None and reported == recorded)
