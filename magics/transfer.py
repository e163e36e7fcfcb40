"""Files between a sandbox, the notebook's folder and the notebook's variables.

Out of a sandbox nothing goes but into the notebook's folder, on request, and over nothing that is
there; what comes out is judged on the way by the layers below.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from IPython.core.error import UsageError
from sandbox_magics import view
from sandbox_magics.sandboxes import Session
from sandbox_magics.variables import from_file, looked_up, pairs, to_file, variable_of

if TYPE_CHECKING:
    from sandbox_kernel.process.files import FileEntry, Transfer
    from sandbox_kernel.sandbox.facade import Sandbox

__all__ = ["Listing", "Pulling", "get", "listed", "pulling", "pushing", "put"]

_PULL_LIMIT: Final = 256 * 1024 * 1024
_LISTED: Final = 10_000
_SHOWN: Final = 200


class _Silent:
    """Whom nobody listens to."""

    def phase(self, text: str) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""


# -- variables ----------------------------------------------------------------------------------


def pushing(
    words: Sequence[str], variables: Mapping[str, Any]
) -> Callable[[Sandbox], Awaitable[None]] | None:
    """Return what puts variables into files; they are read now.

    Raises
    ------
    NameError, UsageError
        There is no such variable, or it cannot become such a file.
    """
    files = [
        to_file(name, looked_up(name, variables, "--push"), path)
        for name, path in pairs(words, "--push")
    ]
    if not files:
        return None

    async def push(sandbox: Sandbox) -> None:
        for path, data in files:
            await sandbox.files.put(data, path)

    return push


class Pulling:
    """Gets files into variables; an instance is called in the worker's loop.

    Parameters
    ----------
    wanted
        Paths, and the names of variables.
    """

    def __init__(self, wanted: Sequence[tuple[str, str]]) -> None:
        self._wanted = tuple(wanted)
        self._fetched: dict[str, tuple[str, bytes]] = {}

    async def __call__(self, sandbox: Sandbox) -> None:
        """Fetch the files."""
        for path, name in self._wanted:
            self._fetched[name] = path, await sandbox.files.read(path, limit=_PULL_LIMIT)

    def variables(self) -> dict[str, Any]:
        """Return what became of the files; not in the loop, since reading them takes time."""
        return {name: from_file(path, data) for name, (path, data) in self._fetched.items()}


def pulling(words: Sequence[str]) -> Pulling | None:
    """Return what gets files into variables.

    Raises
    ------
    UsageError
        A variable's name is none.
    """
    wanted = [(path, name or variable_of(path)) for path, name in pairs(words, "--pull")]
    for _, name in wanted:
        if not name.isidentifier():
            raise UsageError(f"--pull: {view.one_line(name)} is not the name of a variable")
    return Pulling(wanted) if wanted else None


# -- files --------------------------------------------------------------------------------------


async def get(session: Session, words: Sequence[str], force: bool) -> str:
    """Get a file or folder into the notebook's folder, and say what came."""
    sandbox = running(session)
    target = words[1] if len(words) > 1 else "./"
    _check_below_here(target)
    return _told(await sandbox.files.get(words[0], target, overwrite=force))


async def put(session: Session, words: Sequence[str], force: bool) -> str:
    """Put a file or folder into the session's sandbox, and say what went."""
    sandbox = await session.get(_Silent())
    target = words[1] if len(words) > 1 else ""
    return _told(await sandbox.files.put(words[0], target, overwrite=force))


async def listed(session: Session, path: str, recursive: bool) -> Listing:
    """List a folder of the session's sandbox."""
    entries = await running(session).files.list(path, recursive=recursive, limit=_LISTED)
    return Listing(tuple(entries))


def running(session: Session) -> Sandbox:
    """Return the session's sandbox.

    Raises
    ------
    UsageError
        There is none.
    """
    sandbox = session.sandbox
    if sandbox is None:
        raise UsageError("there is no session yet: run a %%sandbox cell, or use %sandbox_put")
    return sandbox


def _check_below_here(target: str) -> None:
    here = Path.cwd().resolve()
    # A folder on the way may be a link that leads elsewhere.
    if not (here / target).resolve().is_relative_to(here):
        raise UsageError(f"{view.one_line(target)} is not in the notebook's folder")


def _told(transfer: Transfer) -> str:
    files = view.plural(transfer.files, "file")
    lines = [f"{view.one_line(transfer.path)}: {files}, {view.memory(transfer.size)}"]
    lines += [f"  left out: {skipped}" for skipped in transfer.skipped[:20]]
    if len(transfer.skipped) > 20:
        lines.append(f"  … and {len(transfer.skipped) - 20} more")
    lines += [f"  changed meanwhile: {view.one_line(name)}" for name in transfer.changed[:20]]
    return "\n".join(lines)


@dataclass(frozen=True)
class Listing:
    """The entries of a folder of a sandbox; iterating over it gives each.

    Parameters
    ----------
    entries
        In order.
    """

    entries: tuple[FileEntry, ...]

    def __iter__(self) -> Any:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _rows(self) -> list[tuple[str, str, str]]:
        rows = [
            (
                view.one_line(entry.path) + {"folder": "/", "link": "@", "other": "?"}.get(
                    entry.kind, ""
                ),
                view.memory(entry.size) if entry.kind == "file" else entry.kind,
                f"{datetime.fromtimestamp(entry.mtime).astimezone():%Y-%m-%d %H:%M}",
            )
            for entry in self.entries[:_SHOWN]
        ]  # fmt: skip
        if len(self.entries) > _SHOWN:
            rows.append((f"… and {len(self.entries) - _SHOWN} more", "", ""))
        return rows

    def __repr__(self) -> str:
        rows = self._rows()
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{n:<{width}}  {s:>8}  {t}".rstrip() for n, s, t in rows) or "(empty)"

    def _repr_html_(self) -> str:
        return view.table_html(self._rows(), ("name", "size", "changed"))
