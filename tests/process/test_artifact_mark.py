"""Whether a command left something in /output, told at its end without a look of one's own."""

from __future__ import annotations

import pytest

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
