"""Artifacts: the files that a run leaves in ``/output``, listed, shown and fetched.

What they hold was written by code that is not trusted. Nothing of it is interpreted here but what
a browser does with an image: tables are read inside the sandbox, HTML is shown in a frame that
can do nothing, and everything else is a name and a size.
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from sandbox_magics import view
from sandbox_magics.worker import Worker

if TYPE_CHECKING:
    from sandbox_kernel.process.files import FileEntry
    from sandbox_kernel.sandbox.facade import Sandbox

__all__ = ["FOLDER", "Artifact", "Artifacts", "find"]

FOLDER: Final = "/output"

MOST_FILES: Final = 5
MOST_BYTES: Final = 5 * 1024 * 1024
"""What is shown by itself after a run."""

_KEPT_BYTES: Final = 32 * 1024 * 1024
_LISTED: Final = 20_000
_NAMED: Final = 20
_JSON_BYTES: Final = 100_000
_TABLE_BYTES: Final = 100_000
_TABLE_TIME: Final = 20.0
_ROWS, _COLUMNS, _TEXT = 10, 20, 100

_KINDS: Final = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".svg": "image/svg+xml",
    ".csv": "csv",
    ".parquet": "parquet",
    ".json": "json",
    ".html": "html",
}


@dataclass(frozen=True)
class Artifact:
    """One file that a run left.

    Parameters
    ----------
    name
        Its path below ``/output``.
    size
        In bytes.
    content
        What is in it, where it was fetched with the result.
    preview
        How it is shown, by MIME type; empty where it is only named.
    sandbox
        Where it can be fetched from, as long as that runs.
    """

    name: str
    size: int
    content: bytes | None = field(default=None, repr=False)
    preview: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sandbox: Sandbox | None = field(default=None, repr=False)

    @property
    def bytes(self) -> bytes:
        """What is in it.

        Raises
        ------
        SandboxError
            It went with its sandbox, is larger than 32 MiB, or cannot be read.
        """
        if self.content is not None:
            return self.content
        from sandbox_kernel.errors import SandboxGoneError

        if self.sandbox is None:
            raise SandboxGoneError(
                f"{self.name} went with the sandbox of its run; -a {self.name} keeps what is large"
            )
        path = f"{FOLDER}/{self.name}"
        return Worker.current().run(self.sandbox.files.read(path, limit=_KEPT_BYTES))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a new file of this machine.

        Raises
        ------
        FileExistsError
            There is one.
        """
        target = Path(path)
        with target.open("xb") as file:
            file.write(self.bytes)
        return target

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        named = f"{view.one_line(self.name)} · {view.memory(self.size)}"
        return {"text/plain": named, **(self.preview or {"text/html": _named_html(self)})}


class Artifacts(Mapping[str, Artifact]):
    """The files of a run, by their paths below ``/output``.

    Parameters
    ----------
    files
        Those that can be fetched.
    refused
        What cannot be, with the reason.
    note
        What else is to be said.
    """

    def __init__(
        self, files: Sequence[Artifact] = (), refused: Sequence[str] = (), note: str = ""
    ) -> None:
        self._files = {file.name: file for file in files}
        self.refused = tuple(refused)
        self.note = note

    def __getitem__(self, name: str) -> Artifact:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def shown(self) -> list[Artifact]:
        """Those that have a preview."""
        return [file for file in self._files.values() if file.preview]

    @property
    def lines(self) -> list[str]:
        """What is not shown by itself, for people."""
        plain = [file for file in self._files.values() if not file.preview]
        lines = [f"{view.one_line(f.name)} · {view.memory(f.size)}" for f in plain[:_NAMED]]
        if len(plain) > _NAMED:
            lines.append(f"… and {len(plain) - _NAMED} more")
        lines += [f"refused: {view.one_line(text)}" for text in self.refused[:_NAMED]]
        if len(self.refused) > _NAMED:
            lines.append(f"… and {len(self.refused) - _NAMED} more refused")
        return [*lines, *([self.note] if self.note else [])]

    def __repr__(self) -> str:
        return f"<Artifacts {', '.join(map(view.one_line, self._files)) or 'none'}>"

    def _repr_html_(self) -> str:
        rows = [(file.name, view.memory(file.size)) for file in self._files.values()]
        table = view.table_html(rows[:_NAMED], caption="artifacts") if rows else ""
        notes = [f"refused: {text}" for text in self.refused[:_NAMED]] + [self.note] * bool(
            self.note
        )
        return table + "".join(view.phase_html(view.one_line(note)) for note in notes)


async def find(sandbox: Sandbox, seen: dict[str, tuple[int, float]] | None) -> Artifacts:
    """Return what a run left; runs in the worker's loop.

    Parameters
    ----------
    sandbox
        Where it ran.
    seen
        Size and time by path of what was there already; it is brought up to date. `None` for a
        sandbox that ends with its run, of which everything is new.
    """
    from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError

    try:
        entries = await sandbox.files.list(FOLDER, recursive=True, limit=_LISTED)
    except SandboxSpecRejectedError:
        note = f"more than {_LISTED} files in {FOLDER}: not listed; %sandbox_ls and -a find them"
        return Artifacts(note=note)
    except SandboxError as error:
        return Artifacts(note=f"the artifacts could not be listed: {error}")
    fresh = [entry for entry in entries if _is_new(entry, seen)]
    refused = [
        f"{_below(entry)}: {_why(entry)}" for entry in fresh if _why(entry)
    ]  # fmt: skip
    files = [entry for entry in fresh if entry.kind == "file" and not entry.refused]
    made = []
    room, kept, shown = MOST_BYTES, _KEPT_BYTES, 0
    for entry in files:
        content, preview = None, {}
        wanted = shown < MOST_FILES and entry.size <= room and _kind(entry) is not None
        # Of a sandbox that goes, what is not fetched now is gone.
        if wanted or (seen is None and entry.size <= kept):
            content = await _read(sandbox, entry)
        if wanted and content is not None:
            preview = await _preview(sandbox, entry, content)
            shown += bool(preview)
            room -= entry.size
        if content is not None:
            kept -= len(content)
        lasting = None if seen is None else sandbox
        made.append(Artifact(_below(entry), entry.size, content, preview, lasting))
    return Artifacts(made, refused)


def _is_new(entry: FileEntry, seen: dict[str, tuple[int, float]] | None) -> bool:
    if entry.kind == "folder":
        return False
    state = (entry.size, entry.mtime)
    if seen is None:
        return True
    before = seen.get(entry.path)
    seen[entry.path] = state
    return before != state


def _below(entry: FileEntry) -> str:
    return entry.path.removeprefix(f"{FOLDER}/")


def _kind(entry: FileEntry) -> str | None:
    return _KINDS.get(PurePosixPath(entry.name).suffix.lower())


def _why(entry: FileEntry) -> str:
    if entry.kind == "link":
        return "it is a symbolic link"
    if entry.kind == "other":
        return "it is a FIFO, a socket or a device"
    return "its name is not a safe one" if entry.refused else ""


async def _read(sandbox: Sandbox, entry: FileEntry) -> bytes | None:
    from sandbox_kernel.errors import SandboxError

    try:
        return await sandbox.files.read(entry.path, limit=max(entry.size, 1))
    except SandboxError:
        # It changed or went meanwhile; it is named all the same.
        return None


async def _preview(sandbox: Sandbox, entry: FileEntry, content: bytes) -> dict[str, Any]:
    kind, name = _kind(entry), _below(entry)
    if kind in ("image/png", "image/jpeg") and _is_image(content):
        return {kind: base64.b64encode(content).decode()}
    if kind == "image/svg+xml":
        # As an image a browser runs no script of it and loads nothing.
        data = base64.b64encode(content).decode()
        alt = html.escape(view.one_line(name), quote=True)
        return {"text/html": f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">'}
    if kind == "html":
        return {"text/html": _frame(content.decode("utf-8", "replace"), name)}
    if kind == "json" and len(content) <= _JSON_BYTES:
        try:
            return {"application/json": json.loads(content), "text/html": _named(name, entry.size)}
        except (ValueError, RecursionError):
            return {}
    if kind in ("csv", "parquet"):
        return await _table(sandbox, entry, kind)
    return {}


def _is_image(content: bytes) -> bool:
    return content.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"))


def _frame(text: str, name: str) -> str:
    """Return HTML of a sandbox in a frame without scripts, forms, origin or connections."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    inner = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{text}'
    title = html.escape(view.one_line(name), quote=True)
    return (
        f'<iframe sandbox="" title="{title}" srcdoc="{html.escape(inner, quote=True)}" '
        'style="width:100%;height:400px;border:1px solid #8888;background:white"></iframe>'
    )


async def _table(sandbox: Sandbox, entry: FileEntry, form: str) -> dict[str, Any]:
    from importlib import resources

    from sandbox_kernel.errors import SandboxError

    program = resources.files(__package__).joinpath("tables.py").read_text(encoding="utf-8")
    try:
        told = await sandbox.run(
            ["python3", "-I", "-c", program, form, entry.path],
            timeout=min(_TABLE_TIME, sandbox.timeouts.most),
            cwd="/",
            capture_limit=2 * _TABLE_BYTES,
        )
        table = json.loads(told.stdout)
        columns, rows = _texts(table["columns"]), [_texts(row) for row in table["rows"][:_ROWS]]
    except (SandboxError, ValueError, RecursionError, KeyError, TypeError):
        return {}
    more = " (first rows)" if table.get("more") is True else ""
    caption = f"{_below(entry)} · {view.memory(entry.size)}{more}"
    return {"text/html": view.table_html(rows, columns or ("",), caption)}


def _texts(row: Any) -> list[str]:
    if not isinstance(row, list) or not all(isinstance(text, str) for text in row):
        raise ValueError("not a row of texts")
    return [text[:_TEXT] for text in row[:_COLUMNS]]


def _named(name: str, size: int) -> str:
    return view.phase_html(f"{view.one_line(name)} · {view.memory(size)}")


def _named_html(artifact: Artifact) -> str:
    return _named(artifact.name, artifact.size)
