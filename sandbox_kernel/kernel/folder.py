"""The private folder of a kernel's Unix sockets, which no crash leaves behind for long.

The folder can be entered by its user only. Its owner holds a lock on a file in it for as long
as it lives, so that a folder whose owner was killed is told apart from one in use: each new
folder removes those of dead owners first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from sandbox_kernel.errors import SandboxConflictError

_PREFIX = "sbx-"
_LOCK = "owner.lock"
_LONGEST_PARENT = 40
"""Names of Unix sockets have room for some 100 bytes, the folder's name included."""


class PrivateFolder:
    """A folder for sockets, made at once; `remove` ends it.

    Parameters
    ----------
    parent
        Where to make it; by default the user's runtime folder where its name is short enough,
        else the system's folder for temporary files.
    again
        The path of one whose owner has gone, to take or make again instead of a new one.

    Raises
    ------
    SandboxConflictError
        The owner of the one that is to be taken lives.

    Attributes
    ----------
    path
        The folder.
    """

    def __init__(self, parent: Path | None = None, again: Path | None = None) -> None:
        if again is None:
            base = parent or _usual_parent()
            remove_abandoned(base)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        else:
            again.mkdir(mode=0o700, exist_ok=True)
            state = again.lstat()
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                raise SandboxConflictError(f"The folder {again.name!r} is somebody else's")
            again.chmod(0o700)
            self.path = again
        self._lock: Any = (self.path / _LOCK).open("w")
        try:
            _lock(self._lock)
        except OSError as error:
            self._lock.close()
            raise SandboxConflictError("Another process serves this kernel") from error

    def remove(self) -> None:
        """Remove the folder with everything in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned(base: Path) -> None:
    """Remove this user's folders whose owner has died; never one that is in use."""
    for folder in base.glob(f"{_PREFIX}*"):
        # Another user's folder cannot be opened, and one that is vanishing is none of ours.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                _lock(lock)
                shutil.rmtree(folder, ignore_errors=True)


def _usual_parent() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if 0 < len(runtime) < _LONGEST_PARENT and os.access(runtime, os.W_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())


def _lock(file: Any) -> None:
    """Take the lock, or raise `OSError` when its owner lives."""
    import fcntl  # there is none on Windows, where this module is not used

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
