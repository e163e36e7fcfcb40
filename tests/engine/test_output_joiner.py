"""Reading the engine's output frames: every byte once, in order, on its own stream."""

from __future__ import annotations

import random
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.streams import Chunk, OutputJoiner

pieces = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=20)


class Queue:
    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.sizes: list[int] = []

    def feed_data(self, chunk: Chunk, size: int) -> None:
        self.chunks.append(chunk)
        self.sizes.append(size)


def runs(chunks: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Join what follows each other on the same stream."""
    full = [(stream, data) for stream, data in chunks if data]
    return [
        (stream, b"".join(data for _, data in group))
        for stream, group in groupby(full, key=lambda one: one[0])
    ]


@given(pieces, st.integers())
def test_all_bytes_come_out_in_order_however_they_are_cut(
    sent: list[tuple[int, bytes]], seed: int
) -> None:
    """W10: order among the two streams is kept, and no chunk is empty."""
    data = b"".join(
        bytes([stream, 0, 0, 0]) + len(piece).to_bytes(4, "big") + piece for stream, piece in sent
    )
    chance = random.Random(seed)
    queue = Queue()
    joiner = OutputJoiner(queue)
    while data:
        size = chance.choice([1, 3, 8, 20, len(data)])
        assert joiner.feed_data(data[:size]) == (False, b"")
        data = data[size:]
    assert runs([(chunk.stream, chunk.data) for chunk in queue.chunks]) == runs(sent)
    assert all(queue.chunks[i].data for i in range(len(queue.chunks)))
    assert queue.sizes == [len(chunk.data) for chunk in queue.chunks]


async def test_a_large_output_of_both_streams_is_whole(
    engine: Engine, busybox_image: str, run_labels: dict[str, str]
) -> None:
    """W10: by the socket and over mTLS, in chunks that are worth a reader's while."""
    text = "i=0; while [ $i -lt 20 ]; do head -c 200000 /dev/zero; echo $i >&2; i=$((i+1)); done"
    created = await engine.create_container(
        None, {"Image": busybox_image, "Cmd": ["sleep", "300"], "Labels": run_labels}
    )
    try:
        await engine.start_container(created.id)
        got = {1: b"", 2: b""}
        argv = ["sh", "-c", text]
        async with await engine.exec(created.id, argv, user="10001:10001", stdin=False) as stream:
            while (chunk := await stream.read()) is not None:
                got[chunk.stream] += chunk.data
    finally:
        await engine.remove_container(created.id)
    assert got[1] == bytes(4_000_000)
    assert got[2] == "".join(f"{i}\n" for i in range(20)).encode()
