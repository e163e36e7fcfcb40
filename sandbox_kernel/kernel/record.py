"""What another process needs to serve a kernel whose own one has gone, and where it is kept (K6).

It holds the key that signs the kernel's messages. So it is kept where connection files are, in a
file that its user alone can read, and never on the engine. The owner of a kernel holds a lock on
its file for as long as it lives: a free one says that nobody serves the kernel any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_runtime_dir

from sandbox_kernel.errors import SandboxConflictError
from sandbox_kernel.kernel.process import ProcessOrigin
from sandbox_kernel.process.stop import Identity

__all__ = ["KernelRecord", "RecordFile", "records"]

_FOLDER = "sandbox-kernels"
_LONGEST_STAY = 30 * 86400.0
"""Seconds after which the record of a kernel that outlived its owner is removed in any case."""


@dataclass(frozen=True)
class KernelRecord:
    """One kernel.

    Parameters
    ----------
    kernel_id, kernel_name
        As Jupyter calls it, and the kernelspec that it is of.
    connection_info
        What clients need, the key included.
    connection_file
        Where they find it.
    sandbox
        The id of its container.
    holder
        What its owner is for the sandbox.
    origin
        Its process.
    outlives
        Seconds for which it may outlive its owner; 0 where it ends with it.
    session, folder
        The notebook that it was started for, if any, and the folder.
    """

    kernel_id: str
    kernel_name: str
    connection_info: Mapping[str, Any] = field(repr=False)
    connection_file: str
    sandbox: str
    holder: str
    origin: ProcessOrigin
    outlives: float
    session: str = ""
    folder: str = "."

    def told(self) -> dict[str, Any]:
        """Return it as a mapping that can be written as JSON."""
        info = {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in self.connection_info.items()
        }
        return {**dataclasses.asdict(self), "connection_info": info}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> KernelRecord:
        """Read what `told` gave.

        Raises
        ------
        SandboxConflictError
            It is something else.
        """
        try:
            origin = told["origin"]
            info = dict(told["connection_info"])
            key = info["key"]
            info["key"] = key.encode() if isinstance(key, str) else bytes(key)
            return cls(
                **{
                    **told,
                    "connection_info": info,
                    "origin": ProcessOrigin(origin["exec_id"], Identity(**origin["identity"])),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SandboxConflictError(
                "What is known of the kernel cannot be read by this version of sandbox-kernel, so "
                "that it cannot be attached to"
            ) from error


class RecordFile:
    """The file of one kernel that this process serves.

    Parameters
    ----------
    record
        What to keep. It takes the place of what was kept of the same kernel.
    """

    def __init__(self, record: KernelRecord) -> None:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear(folder)
        name = hashlib.sha256(record.kernel_id.encode("utf-8", "replace")).hexdigest()[:32]
        self.path = folder / f"{name}.json"
        # Private from its beginning, and whole as soon as it has its name.
        descriptor, made = tempfile.mkstemp(prefix=".", dir=folder)
        self._file: Any = os.fdopen(descriptor, "w", encoding="utf-8")
        try:
            _lock(self._file)
            json.dump(record.told(), self._file)
            self._file.flush()
            Path(made).replace(self.path)
        except BaseException:
            Path(made).unlink(missing_ok=True)
            self._file.close()
            raise

    def remove(self) -> None:
        """Remove it: the kernel has ended. Idempotent."""
        if not self._file.closed:
            self.path.unlink(missing_ok=True)
            self._file.close()

    def leave(self) -> None:
        """Let go of it: somebody else may serve the kernel. Idempotent."""
        self._file.close()


def records() -> list[tuple[KernelRecord, bool]]:
    """Return what is kept of this user's kernels, each with whether its owner lives."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        # One that vanishes just now, or that another version has written, is none.
        ignored = contextlib.suppress(OSError, ValueError, SandboxConflictError)
        with ignored, path.open("r+") as file:
            found.append((KernelRecord.of(json.load(file)), not _is_free(file)))
    return found


def _folder() -> Path:
    return Path(jupyter_runtime_dir()) / _FOLDER


def _clear(folder: Path) -> None:
    """Remove what is left of kernels that have ended with their owners."""
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError), path.open("r+") as file:
            if not _is_free(file):
                continue
            try:
                stays = json.load(file)["outlives"] > 0
            except (ValueError, KeyError, TypeError):
                stays = False
            if not stays or time.time() - path.stat().st_mtime > _LONGEST_STAY:
                path.unlink(missing_ok=True)


def _lock(file: Any) -> None:
    # There is none on Windows, where a kernel cannot be taken over.
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_free(file: Any) -> bool:
    """Whether nobody holds the lock; it is not kept."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
