"""Compare ways to run a command in a sandbox, in one run: ``python benchmarks/exec.py``.

``docker exec``, a bare exec of aiodocker and `Sandbox` take turns in one and the same sandbox, and
each is compared with the bare exec. What a sandbox's wrapper does besides (account for the exit,
end the whole tree, keep output apart from reports) is in its figures; what the others leave
running is a figure of theirs.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, replace

from contestants import BareExec, Contestant, DockerExec, Wrapper
from report import Measurement, circumstances, compare, keep, table
from rich.console import Console
from turns import PROGRESS, command_line, read, turns

from sandbox_kernel import Sandbox, SandboxSpec
from sandbox_kernel.config import engine_settings
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.sandbox.live import CODE_USER, CONTROL_USER

MEASUREMENTS = (
    Measurement("true", "true", target=1.5),
    Measurement("output", "much output", target=1.5),
    Measurement("many", "many at once"),
    Measurement("cpu_inside", "CPU in the sandbox while it waits"),
    Measurement("cpu_here", "CPU of the client while it waits"),
    Measurement("stop", "stop of a sleep"),
    Measurement("stop_tree", "stop of a tree"),
    Measurement("left", "processes of the tree left", unit="count"),
)
PACKAGES = ("aiodocker", "aiohttp", "sandbox-kernel")
SLEEP = "echo $$; exec sleep 1000"
# Some of them have a session of their own, and all hold the output.
TREE = "echo $$; for i in $(seq {count}); do setsid sleep 1000 & done; exec sleep 1000"
_LIST = "for p in /proc/[0-9]*; do cat $p/stat; grep ^Uid: $p/status; done 2>/dev/null"
_TICKS_PER_SECOND = 100


@dataclass(frozen=True)
class Sizes:
    """How much to do in a turn: runs of true, bytes, runs at once, seconds to wait, processes."""

    runs: int
    output: int
    many: int
    wait: float
    tree: int


FULL = Sizes(runs=10, output=20_000_000, many=150, wait=5.0, tree=20)
QUICK = Sizes(runs=2, output=100_000, many=3, wait=0.1, tree=3)

Values = dict[str, list[float]]


class Watcher:
    """Looks at the processes of the user's code in the container, as the control uid."""

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine = engine
        self._container = container

    async def processes(self) -> dict[int, float]:
        """Return the seconds of CPU that each has used, by pid."""
        text = b""
        stream = await self._engine.exec(
            self._container, ["sh", "-c", _LIST], user=CONTROL_USER, stdin=False
        )
        async with stream:
            while (chunk := await stream.read()) is not None:
                text += chunk.data
        found: dict[int, float] = {}
        uid = CODE_USER.partition(":")[0]
        lines = text.decode().splitlines()
        for stat, status in zip(lines[::2], lines[1::2], strict=False):
            fields = stat.rpartition(")")[2].split()
            if status.split()[1] == uid and fields[0] != "Z":
                ticks = int(fields[11]) + int(fields[12])
                found[int(stat.split()[0])] = ticks / _TICKS_PER_SECOND
        return found

    async def clear(self) -> None:
        """End what a turn has left."""
        while await self.processes():
            stream = await self._engine.exec(
                self._container, ["sh", "-c", "kill -9 -1"], user=CODE_USER, stdin=False
            )
            async with stream:
                while await stream.read() is not None:
                    pass


async def measure(one: Contestant, watcher: Watcher, sizes: Sizes, values: Values) -> None:
    """Let a contestant do everything once, and add what was found to its values."""

    def timed(key: str, began: float) -> None:
        values[key].append(time.perf_counter() - began)

    for _ in range(sizes.runs):
        began = time.perf_counter()
        await one.run(["true"])
        timed("true", began)
    began = time.perf_counter()
    size = await one.run(["head", "-c", str(sizes.output), "/dev/zero"])
    timed("output", began)
    if size != sizes.output:
        raise RuntimeError(f"{size} bytes of output instead of {sizes.output}")
    began = time.perf_counter()
    await asyncio.gather(*(one.run(["true"]) for _ in range(sizes.many)))
    timed("many", began)
    async with one.running(SLEEP) as running:
        inside, here = await watcher.processes(), running.cpu()
        await asyncio.sleep(sizes.wait)
        values["cpu_here"].append(running.cpu() - here)
        after = await watcher.processes()
        values["cpu_inside"].append(sum(after[pid] - used for pid, used in inside.items()))
        began = time.perf_counter()
        await running.stop()
        timed("stop", began)
    async with one.running(TREE.format(count=sizes.tree - 1)) as running:
        while len(await watcher.processes()) < sizes.tree:
            pass
        began = time.perf_counter()
        await running.stop()
        timed("stop_tree", began)
        values["left"].append(len(await watcher.processes()))
    await watcher.clear()


async def run(
    endpoint: Endpoint, image: str | None, rounds: int, sizes: Sizes
) -> dict[str, Values]:
    """Let the contestants take turns, and return the values of each."""
    spec = SandboxSpec(pids_limit=4096, labels={"made-by": "benchmarks/exec.py"})
    spec = replace(spec, image=image) if image else spec
    values: dict[str, Values] = defaultdict(lambda: defaultdict(list))
    # An engine of the sandbox's own, in a thread of its own, as a notebook has it.
    async with Engine(endpoint) as engine, Sandbox.create(spec) as sandbox:
        contestants: list[Contestant] = [BareExec(engine, sandbox.id)]
        if DockerExec.usable():
            contestants.append(DockerExec(endpoint, sandbox.id))
        contestants.append(Wrapper(sandbox))
        watcher = Watcher(engine, sandbox.id)
        for _, one in turns(contestants, [one.name for one in contestants], rounds):
            await measure(one, watcher, sizes, values[one.name])
    return {one.name: values[one.name] for one in contestants}


def main() -> None:
    """Measure, show and keep."""
    parser = command_line(__doc__ or "", rounds=5)
    parser.add_argument("--image", help="the sandbox's image (the configured one)")
    options = read(parser)
    sizes, rounds = QUICK if options.quick else FULL, options.rounds
    endpoint = resolve_endpoint(engine_settings())
    values = asyncio.run(run(endpoint, options.image, rounds, sizes))
    summary = {
        **circumstances(rounds, sizes, PACKAGES, MEASUREMENTS),
        "baseline": BareExec.name,
        "ways": compare(values, BareExec.name),
    }
    title = (
        f"Medians of {rounds * sizes.runs} runs of true and {rounds} of the rest: "
        f"{sizes.output:,} bytes, {sizes.many} at once, {sizes.wait:g} s of waiting, a tree of "
        f"{sizes.tree}; load {summary['machine']['load'][0]} at the end"
    )
    Console().print(table(title, MEASUREMENTS, summary["ways"], BareExec.name))
    PROGRESS.print(f"Written to {keep(summary, 'exec', options.json)}")


if __name__ == "__main__":
    main()
