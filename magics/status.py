"""``%sandbox_status``: one picture of engine, session, runs and image, taken within 5 seconds.

An engine that does not answer is part of the picture, not an error. What is wrong comes with what
to do about it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sandbox_magics import view
from sandbox_magics.runs import Run, Runs
from sandbox_magics.sandboxes import Session

if TYPE_CHECKING:
    from sandbox_kernel.sandbox.order import Order
    from sandbox_kernel.sandbox.outlook import Outlook
    from sandbox_kernel.sandbox.usage import Usage

__all__ = ["Status", "diagnosis", "take"]

PATIENCE: Final = 5.0
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what it is about, whether it is well, and the words.

    Parameters
    ----------
    name
        What it is about.
    state
        ``ok``, ``off``, ``busy`` or ``problem``.
    text
        For people.
    remedy
        What to do, as something to paste.
    """

    name: str
    state: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Status:
    """A picture of everything; its representations are text, HTML and data.

    Parameters
    ----------
    rows
        In order.
    data
        The same for programs.
    """

    rows: tuple[Row, ...]
    data: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        last = ""
        lines = []
        for row in self.rows:
            name = row.name if row.name != last else ""
            last = row.name
            remedy = f" → {row.remedy}" if row.remedy else ""
            lines.append(f"{name:<{width}}  {row.text}{remedy}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        rows = [
            (
                row.name,
                f"{_DOTS[row.state]} {row.text}" + (f" → {row.remedy}" if row.remedy else ""),
            )
            for row in self.rows
        ]
        return {
            "text/plain": str(self),
            "text/html": view.table_html(rows),
            "application/json": self.data,
        }


# Shape as well as colour, and words beside both.
_DOTS: Final = {"ok": "●", "off": "○", "busy": "◐", "problem": "✗"}


async def take(
    asked: dict[str, Any], session: Session | None, runs: Runs, detailed: bool
) -> Status:
    """Take the picture; runs in the worker's loop.

    Parameters
    ----------
    asked
        The settings that a session would be made with.
    session
        The session, if there ever was one.
    runs
        All runs.
    detailed
        Whether to show more of everything.
    """
    from sandbox_kernel.errors import SandboxError
    from sandbox_kernel.sandbox.order import settle
    from sandbox_kernel.sandbox.outlook import look

    order: Order | None = None
    outlook: Outlook | None = None
    trouble: SandboxError | None = None
    try:
        order = await asyncio.to_thread(settle, asked, door="magics")
        outlook = await look(order, PATIENCE * 0.6)
    except SandboxError as error:
        trouble = error
    usage = await _usage(session)
    rows = [
        Row("sandbox", "ok", "shape A: the kernel is trusted, the cells are sandboxed"),
        _engine_row(outlook, trouble),
        *_session_rows(session, usage),
        *_run_rows(runs, detailed),
        *_image_rows(outlook),
    ]
    return Status(tuple(rows), _data(outlook, trouble, session, usage, runs))


def diagnosis(checks: Sequence[Mapping[str, str]]) -> Status:
    """Return the picture of what ``jupyter sandbox status`` has found."""
    levels = {"ok": "ok", "note": "off", "warning": "busy", "problem": "problem"}
    rows = tuple(
        Row(
            check["name"],
            levels.get(check["level"], "problem"),
            view.one_line(check["text"], 400),
            view.one_line(check["remedy"], 400),
        )
        for check in checks
    )
    return Status(rows, {"checks": [dict(check) for check in checks]})


async def _usage(session: Session | None) -> Usage | None:
    from sandbox_kernel.errors import SandboxError

    sandbox = None if session is None else session.sandbox
    if sandbox is None:
        return None
    try:
        async with asyncio.timeout(PATIENCE * 0.3):
            return await sandbox.usage()
    except (SandboxError, TimeoutError):
        return None


def _engine_row(outlook: Outlook | None, trouble: Exception | None) -> Row:
    if outlook is None:
        remedy = str(getattr(trouble, "remedy", ""))
        text = str(trouble).removesuffix(remedy).rstrip(" .")
        return Row("engine", "problem", view.one_line(text, 300), remedy or "%sandbox_doctor")
    over = "mTLS, " if outlook.encrypted else ""
    milliseconds = outlook.latency * 1000
    return Row(
        "engine",
        "ok",
        f"ok  {outlook.engine}  ({outlook.source}, {over}{outlook.version}, {milliseconds:.0f} ms)",
    )


def _session_rows(session: Session | None, usage: Usage | None) -> list[Row]:
    sandbox = None if session is None else session.sandbox
    if session is None or sandbox is None:
        return [Row("session", "off", "none; the first %%sandbox cell makes one")]
    up = view.seconds(time.monotonic() - session.since)
    digest = sandbox.image_id[:19]
    spec = sandbox.spec
    lasting = f"durable ({spec.workspace})" if spec.durability == "persistent" else "ends with it"
    limits = sandbox.limits
    memory = cpu = pids = ""
    if usage is not None:
        memory = f"{view.memory(usage.memory)} of "
        cpu = f"{usage.cpu_seconds:.1f} s used, "
        pids = f"{usage.pids} of "
    return [
        Row(
            "session",
            "busy" if session.runs else "ok",
            f"{sandbox.name}  running  image {spec.image} ({digest})  net {spec.network}  up {up}",
        ),
        Row(
            "limits",
            "ok",
            f"mem {memory}{view.memory(limits.memory)}  cpu {cpu}"
            f"{limits.nano_cpus / 1e9:g} at once  pids {pids}{limits.pids}  "
            f"/workspace {lasting}",
        ),
    ]


def _run_rows(runs: Runs, detailed: bool) -> list[Row]:
    known = list(runs)
    shown = known if detailed else [run for run in known if run.running] + [
        run for run in known if not run.running
    ][:_SHOWN]  # fmt: skip
    if not shown:
        return [Row("runs", "off", "none yet")]
    return [_run_row(run) for run in shown]


def _run_row(run: Run) -> Row:
    command = view.command_text(run.request.shown, 40)
    name = view.one_line(run.name, 20)
    if run.running:
        text = f"{run.id} {name}  running  {command}  {view.seconds(run.duration)}"
        return Row("runs", "busy", f"{text}  net {run.network}")
    if run.result is None:
        error = "" if run.error is None else type(run.error).__name__
        return Row("runs", "problem", f"{run.id} {name}  {error}  {command}")
    state = "ok" if run.result.ok else "problem"
    ending = view.ending(run.result)[1]
    return Row("runs", state, f"{run.id} {name}  {ending}  {command}  {view.seconds(run.duration)}")


def _image_rows(outlook: Outlook | None) -> list[Row]:
    if outlook is None:
        return []
    if outlook.image_id is None:
        return [Row("image", "problem", f"{outlook.image} missing", "%sandbox_build")]
    size = view.memory(outlook.image_size or 0)
    return [Row("image", "ok", f"ready  {outlook.image} ({outlook.image_id[:19]}, {size})")]


def _data(
    outlook: Outlook | None,
    trouble: Exception | None,
    session: Session | None,
    usage: Usage | None,
    runs: Runs,
) -> dict[str, Any]:
    sandbox = None if session is None else session.sandbox
    return {
        "shape": "A",
        "engine": None if outlook is None else dataclasses.asdict(outlook),
        "error": None if trouble is None else str(trouble),
        "session": None
        if sandbox is None
        else {
            "name": sandbox.name,
            "image": sandbox.spec.image,
            "image_id": sandbox.image_id,
            "network": sandbox.spec.network,
            "memory_limit": sandbox.limits.memory,
            "pids_limit": sandbox.limits.pids,
            "usage": None if usage is None else dataclasses.asdict(usage),
        },
        "runs": [
            {
                "id": run.id,
                "name": run.name,
                "running": run.running,
                "seconds": round(run.duration, 3),
                "network": run.network,
                "reason": None if run.result is None else run.result.reason,
                "returncode": None if run.result is None else run.result.returncode,
            }
            for run in runs
        ],
    }
