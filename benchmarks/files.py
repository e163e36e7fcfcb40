"""Compare ways to carry files, in one run: ``python benchmarks/files.py``.

``docker cp`` and `Files` take turns in one and the same sandbox, with one large file and with a
tree of small ones, in and out. What arrives is compared byte by byte. `Files` judges all that
comes out, lets the user of the code own what goes in, and leaves nothing half written; `docker cp`
works as the engine's root, through links and without bounds. What each costs in memory on this
side is in the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from report import Measurement, circumstances, compare, keep, table
from rich.console import Console
from turns import PROGRESS, command_line, read, turns

from sandbox_kernel import Sandbox, SandboxSpec
from sandbox_kernel.config import engine_settings
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.process.files import Files
from sandbox_kernel.sandbox.live import CODE_USER

TARGET = 1 / 0.7
MEASUREMENTS = (
    Measurement("file_in", "a large file in", target=TARGET),
    Measurement("file_out", "a large file out", target=TARGET),
    Measurement("tree_in", "many small files in", target=TARGET),
    Measurement("tree_out", "many small files out", target=TARGET),
    Measurement("memory", "memory that it takes here", unit="bytes"),
)
PACKAGES = ("aiodocker", "aiohttp", "sandbox-kernel")
_SAMPLES = 0.01
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sizes:
    """How much to carry: bytes of the large file, and files of the tree with bytes of each."""

    large: int
    files: int
    small: int


FULL = Sizes(large=200 * 1024 * 1024, files=2000, small=4000)
QUICK = Sizes(large=300_000, files=20, small=100)

Values = dict[str, list[float]]


class DockerCp:
    """The ``docker`` program, started anew for each turn."""

    name = "docker cp"

    def __init__(self, endpoint: Endpoint, container: str) -> None:
        program = shutil.which("docker")
        if program is None:
            raise SystemExit("There is no program docker to compare with.")
        tls = endpoint.tls
        self._command = [program, "--host", endpoint.url.replace("https://", "tcp://")]
        if tls is not None:
            self._command += ["--tlsverify", f"--tlscert={tls.cert}", f"--tlskey={tls.key}"]
            self._command += [f"--tlscacert={tls.ca}"]
        self._container = container
        self._pid = 0

    def memory(self) -> int:
        """Return the bytes that the program has in memory now."""
        return resident(self._pid) if self._pid else 0

    async def put(self, source: Path, target: str) -> None:
        """Carry something into the workspace."""
        await self._run(str(source), f"{self._container}:/workspace/{target}")

    async def get(self, source: str, target: Path) -> None:
        """Carry something out of the workspace."""
        await self._run(f"{self._container}:/workspace/{source}", str(target))

    async def _run(self, *paths: str) -> None:
        process = await asyncio.create_subprocess_exec(*self._command, "cp", "--quiet", *paths)
        self._pid = process.pid
        code = await process.wait()
        self._pid = 0
        if code:
            raise RuntimeError(f"docker cp ended with {code}")


class OurFiles:
    """`Files`, in this process."""

    name = "Files"

    def __init__(self, engine: Engine, container: str) -> None:
        self._files = Files(engine, container, user=CODE_USER)
        self._before = 0

    def memory(self) -> int:
        """Return the bytes in memory now, beyond those of before the first turn."""
        self._before = self._before or resident(os.getpid())
        return resident(os.getpid()) - self._before

    async def put(self, source: Path, target: str) -> None:
        """Carry something into the workspace."""
        await self._files.put(source, target)

    async def get(self, source: str, target: Path) -> None:
        """Carry something out of the workspace."""
        await self._files.get(source, target)


Contestant = DockerCp | OurFiles


def resident(pid: int) -> int:
    """Return the bytes that a process of this machine has in memory."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


@contextlib.asynccontextmanager
async def peak(one: Contestant) -> AsyncIterator[list[int]]:
    """Watch the memory of a contestant; the list has its highest value at the end."""
    found = [one.memory()]

    async def watch() -> None:
        while True:
            found[0] = max(found[0], one.memory())
            await asyncio.sleep(_SAMPLES)

    watching = asyncio.create_task(watch())
    try:
        yield found
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def make_sources(folder: Path, sizes: Sizes) -> tuple[Path, Path]:
    """Make the large file and the tree, of bytes that nothing can compress."""
    large = folder / "large"
    with large.open("wb") as file:
        left = sizes.large
        while left:
            left -= file.write(os.urandom(min(left, 1 << 20)))
    tree = folder / "tree"
    for number in range(sizes.files):
        file_ = tree / f"{number % 20}" / f"{number}"
        file_.parent.mkdir(parents=True, exist_ok=True)
        file_.write_bytes(os.urandom(sizes.small))
    return large, tree


async def measure(
    one: Contestant, sources: Sequence[Path], turn: str, scratch: Path, values: Values
) -> None:
    """Let a contestant carry everything in and out once, and add what was found.

    Each turn has names of its own, since nobody but root can remove the folders of `docker cp`.
    """
    async with peak(one) as memory:
        for what, source in zip(("file", "tree"), sources, strict=True):
            name = f"{what}-{turn}"
            began = time.perf_counter()
            await one.put(source, name)
            values[f"{what}_in"].append(time.perf_counter() - began)
            back = scratch / what
            began = time.perf_counter()
            await one.get(name, back)
            values[f"{what}_out"].append(time.perf_counter() - began)
            if not same(source, back):
                raise RuntimeError(f"what {one.name} carried is not what it was")
    values["memory"].append(memory[0])


def same(one: Path, other: Path) -> bool:
    """Say whether two files or trees have the same content."""
    if one.is_file():
        return filecmp.cmp(one, other, shallow=False)
    names = sorted(path.relative_to(one) for path in one.rglob("*"))
    if names != sorted(path.relative_to(other) for path in other.rglob("*")):
        return False
    return all(same(one / name, other / name) for name in names if (one / name).is_file())


async def run(
    endpoint: Endpoint, image: str | None, rounds: int, sizes: Sizes
) -> dict[str, Values]:
    """Let the contestants take turns, and return the values of each."""
    spec = SandboxSpec(labels={"made-by": "benchmarks/files.py"})
    spec = replace(spec, image=image) if image else spec
    values: dict[str, Values] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="sandbox-files-") as name:
        folder = Path(name)
        sources = make_sources(folder, sizes)
        async with Engine(endpoint) as engine, Sandbox.create(spec) as sandbox:
            contestants = (DockerCp(endpoint, sandbox.id), OurFiles(engine, sandbox.id))
            files = Files(engine, sandbox.id, user=CODE_USER)
            for number, one in turns(contestants, [one.name for one in contestants], rounds):
                scratch = folder / "scratch"
                scratch.mkdir()
                turn = f"{number}-{contestants.index(one)}"
                await measure(one, sources, turn, scratch, values[one.name])
                shutil.rmtree(scratch)
                await files.remove(f"file-{turn}")
                if isinstance(one, OurFiles):
                    await files.remove(f"tree-{turn}", recursive=True)
    return {one.name: values[one.name] for one in contestants}


def main() -> None:
    """Measure, show and keep."""
    parser = command_line(__doc__ or "", rounds=3)
    parser.add_argument("--image", help="the sandbox's image (the configured one)")
    options = read(parser)
    sizes, rounds = QUICK if options.quick else FULL, options.rounds
    endpoint = resolve_endpoint(engine_settings())
    values = asyncio.run(run(endpoint, options.image, rounds, sizes))
    summary = {
        **circumstances(rounds, sizes, PACKAGES, MEASUREMENTS),
        "baseline": DockerCp.name,
        "ways": compare(values, DockerCp.name),
    }
    title = (
        f"Medians of {rounds} turns: a file of {sizes.large:,} bytes, a tree of {sizes.files} "
        f"files with {sizes.small} each; load {summary['machine']['load'][0]} at the end"
    )
    Console().print(table(title, MEASUREMENTS, summary["ways"], DockerCp.name))
    PROGRESS.print(f"Written to {keep(summary, 'files', options.json)}")


if __name__ == "__main__":
    main()
