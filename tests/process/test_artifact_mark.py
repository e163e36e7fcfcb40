"""What is told at the end of a command without a look of one's own: /output, processor time."""

from __future__ import annotations

import pytest

from sandbox_kernel.process.verdict import Evidence
from sandbox_kernel.sandbox.live import LiveSandbox
from tests.process.test_stop import shell


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("true", False),
        ("echo x > /output/x", True),
        ("mkdir /output/.hidden; exit 3", True),
        ("ln -s nowhere '/output/a b'", True),
        ("touch '/output/\n'; exec sleep 0", True),
    ],
)
async def test_the_end_tells_whether_something_lies_there(
    any_sandbox: LiveSandbox, text: str, left: bool
) -> None:
    """F3: by dash and ash; links that lead nowhere and hidden names count."""
    async with await shell(any_sandbox, text) as process:
        ended = await process.wait()
    assert ended.artifacts is left


async def test_the_end_tells_the_processor_time(any_sandbox: LiveSandbox) -> None:
    """Magics: of the sandbox, while the command ran."""
    busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"
    async with await shell(any_sandbox, busy) as process:
        worked = (await process.wait()).cpu_seconds
    async with await shell(any_sandbox, "sleep 0.5") as process:
        slept = (await process.wait()).cpu_seconds
    assert worked is not None
    assert slept is not None
    assert 0 <= slept < worked < 60


def test_amounts_that_are_none_are_passed_over() -> None:
    """Verdict: numbers of a sandbox are never trusted."""
    told = Evidence()
    assert told.with_cpu(["ns", "1000000000", "3500000000"]).cpu_seconds == 2.5
    assert told.with_cpu(["us", "0", "1500000"]).cpu_seconds == 1.5
    for words in (["ns", "-", "5"], ["ns", "9", "5"], ["xs", "1", "2"], ["ns", "1"], []):
        assert told.with_cpu(words) == told
