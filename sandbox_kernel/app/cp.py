"""``jupyter sandbox cp``: files into and out of sandboxes and workspaces (F1, F2, F4)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from traitlets import Bool

from sandbox_kernel.amounts import memory_text
from sandbox_kernel.app.command import ENGINE_FLAGS
from sandbox_kernel.app.places import Place, read_place
from sandbox_kernel.app.sandboxes import SandboxesCommand
from sandbox_kernel.app.streaming import Signals, apart, run_guarded, to_descriptor
from sandbox_kernel.errors import SandboxConflictError, SandboxError
from sandbox_kernel.process.files import Transfer
from sandbox_kernel.process.result import Chunk
from sandbox_kernel.sandbox.facade import Sandbox
from sandbox_kernel.sandbox.files import SandboxFiles
from sandbox_kernel.sandbox.found import SandboxInfo, choose
from sandbox_kernel.sandbox.opening import Opening
from sandbox_kernel.sandbox.visit import Visit, visit
from sandbox_kernel.sandbox.workspace_access import SandboxWorkspaces

_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("f", "force"): ({"CpApp": {"force": True}}, "Replace files that are there."),
}

_EXAMPLES = """\
jupyter sandbox cp data.csv 3f2a:
jupyter sandbox cp 3f2a:/output/plots results/
jupyter sandbox cp workspace:thesis:model.bin model.bin
jupyter sandbox cp 3f2a:log.txt - | tail
"""

Report = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class _Far:
    """The far side of a copy."""

    files: SandboxFiles
    is_folder: Callable[[str], Awaitable[bool]]


class CpApp(SandboxesCommand):
    """``jupyter sandbox cp``."""

    name = "jupyter-sandbox-cp"
    description = """Copy a file or a folder into a sandbox, or out of one. One side is a path of
    this machine, or - for the standard input or output; the other one SANDBOX:PATH, or
    workspace:KEY:PATH for a workspace, whether a sandbox runs on it or not. Paths in a sandbox are
    relative to /workspace. Into a folder that is there, a copy goes under its own name.
    What is there is replaced only with --force; links and devices are left out, and named."""
    examples = _EXAMPLES
    arguments = "SOURCE TARGET"

    flags = _FLAGS

    force = Bool(False, help="Replace files that are there. Since 0.2.").tag(config=True)

    def take(self, words: list[str]) -> None:
        """Take the two places."""
        if len(words) != 2:
            self._usage("needs a source and a target (see --help)")
        self._source, self._target = (read_place(word) for word in words)
        if self._source.is_remote == self._target.is_remote:
            self._usage(
                "one side has to be SANDBOX:PATH or workspace:KEY:PATH, and the other one here"
            )

    def run(self) -> int:
        """Copy."""
        far = self._source if self._source.is_remote else self._target
        self._info = self._find(far)
        if self._source.is_remote:
            return run_guarded(self._print if self._target.kind == "stream" else self._out)
        return run_guarded(self._in)

    def _find(self, far: Place) -> SandboxInfo | None:
        """Return the sandbox to copy from or to; `None` for a workspace on which none runs."""
        infos = self.sandboxes()
        if far.kind == "sandbox":
            return choose(infos, far.name)
        return next((info for info in infos if info.workspace == far.name), None)

    # -- both ways ----------------------------------------------------------------------------

    async def _in(self, signals: Signals) -> int:
        source, target = self._source, self._target.path
        async with self._far(self._target) as far:
            if target and not target.endswith("/") and await far.is_folder(target):
                target += "/"
            with self._progress() as report:
                transfer = await far.files.put(
                    sys.stdin.buffer if source.kind == "stream" else source.path,
                    target,
                    overwrite=self.force,
                    progress=report,
                )
        self._tell(transfer)
        return 0

    async def _out(self, signals: Signals) -> int:
        source, target = self._source, _into(self._target.path)
        if self._info is None:
            transfer = await self._workspaces().get(
                source.name, source.path, target, overwrite=self.force
            )
        else:
            async with self._visit(self._info) as there:
                with self._progress() as report:
                    transfer = await there.files.get(
                        source.path, target, overwrite=self.force, progress=report
                    )
        self._tell(transfer)
        return 0

    async def _print(self, signals: Signals) -> int:
        source = self._source
        if self._info is None:
            data = await self._workspaces().read(source.name, source.path)
        else:
            async with self._visit(self._info) as there:
                data = await there.files.read(source.path)
        await apart(to_descriptor, Chunk(1, data))
        return 0

    # -- the far side -------------------------------------------------------------------------

    def _workspaces(self) -> SandboxWorkspaces:
        return SandboxWorkspaces(engine=self.engine_settings(), owner=self.whose())

    def _visit(self, info: SandboxInfo) -> Opening[Visit]:
        timeouts = self.settle({"image": info.image}).timeouts
        return visit(self.endpoint(), info, timeouts, {})

    @contextlib.asynccontextmanager
    async def _far(self, place: Place) -> AsyncIterator[_Far]:
        """Give the files of a sandbox; of a workspace without one, in a sandbox made for it."""
        if self._info is not None:
            async with self._visit(self._info) as there:
                yield _Far(there.files, there.is_folder)
            return
        order = self.settle({"durability": "persistent", "workspace": place.name})
        async with Sandbox.from_order(order, owner=self.whose()) as sandbox:

            async def is_folder(path: str) -> bool:
                return (await sandbox.run(["test", "-d", path])).returncode == 0

            yield _Far(sandbox.files, is_folder)

    # -- telling ------------------------------------------------------------------------------

    def fail(self, error: SandboxError) -> int:
        """Show an error, and what helps when something is there."""
        code = super().fail(error)
        if isinstance(error, SandboxConflictError) and not (self.force or self.json_output):
            self.err.print("What is there is replaced with --force.")
        return code

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Report]:
        """Show how far it is, on a terminal."""
        bars = Progress(
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self.err,
            transient=True,
            disable=not self.err.is_terminal or self.json_output,
        )
        task = bars.add_task("", total=None)

        def report(done: int, total: int | None) -> None:
            bars.update(task, completed=done, total=total)

        with bars:
            yield report

    def _tell(self, transfer: Transfer) -> None:
        if self.json_output:
            self.print_json(
                {
                    "ok": True,
                    "path": transfer.path,
                    "files": transfer.files,
                    "folders": transfer.folders,
                    "links": transfer.links,
                    "bytes": transfer.size,
                    "skipped": [{"path": s.path, "reason": s.reason} for s in transfer.skipped],
                    "changed": list(transfer.changed),
                }
            )
            return
        for skipped in transfer.skipped:
            self.err.print(f"left out {skipped}", markup=False)
        if self.err.is_terminal:
            many = "file" if transfer.files == 1 else "files"
            size = memory_text(transfer.size)
            self.err.print(f"{transfer.files} {many}, {size}: {transfer.path}", markup=False)


def _into(target: str) -> str:
    """Return a target as one to go into, where it is a folder that is there."""
    if target.endswith(os.sep) or not Path(target).is_dir():
        return target
    return target + os.sep
