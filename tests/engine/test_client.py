"""The engine client against a real engine, over its socket and over mutual TLS alike."""

from __future__ import annotations

from sandbox_kernel.engine.client import Engine


async def test_a_command_gives_its_output_and_its_exit_code(engine: Engine, container: str) -> None:
    """E2: an exec over either road carries both output streams and the exit code."""
    async with await engine.exec(
        container, ["sh", "-c", "echo out; echo err >&2; exit 3"], user="10001:10001"
    ) as stream:
        got = {1: b"", 2: b""}
        while (chunk := await stream.read()) is not None:
            got[chunk.stream] += chunk.data
    state = await engine.inspect_exec(stream.id)
    assert got == {1: b"out\n", 2: b"err\n"}
    assert (state.running, state.exit_code) == (False, 3)
