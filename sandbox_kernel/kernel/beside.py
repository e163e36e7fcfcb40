"""The one line that tells a person why a file beside the notebook is not there (K9).

Code that reads ``data.csv`` fails in a sandbox that holds nothing of this machine, and the
traceback does not say why. So the kernel's first error about a missing file is compared with the
notebook's folder, on this side, and clients get a line of ours after it. What the kernel sends is
bounded, read with care and trusted in nothing. The code itself is told nothing, yet code that means
to could read in its own frontend what is shown there: so there is one such line in a
kernel's life, about a plain name directly in that folder, and a few looks at most.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_kernel.kernel.ledger import frames
from sandbox_kernel.kernel.obituary import LARGEST_HEADER, parent_header, stream_message

__all__ = ["Beside"]

_DELIMITER = b"<IDS|MSG>"
_MOST_LOOKS = 16
_NAME = re.compile(r"""['"](?:\./)?([^/\\'".][^/\\'"]{0,254})['"]\s*$""")
_TEXT = (
    "{name!r} lies beside the notebook, on the server: a sandbox sees nothing of that folder. "
    'Give the kernel files = "snapshot", or copy the file: see docs/workspaces.md.\n'
)


class Beside:
    """Looks for files that code misses, in the notebook's folder.

    Parameters
    ----------
    folder
        The notebook's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.connection: Mapping[str, Any] = {}
        self._folder = Path(folder)
        self._looks = 0
        self._said: tuple[str, bytes] | None = None

    def after(self, parts: Sequence[bytes]) -> bytes:
        """Return what follows a message of the kernel's on its way to a client; mostly nothing.

        Parameters
        ----------
        parts
            The parts of the message, with its content last. Each of several clients gets it.
        """
        cell = parent_header(parts)
        if self._said is not None:
            return self._said[1] if self._said[0] == cell.get("msg_id") else b""
        if self._looks >= _MOST_LOOKS or not cell:
            return b""
        name = _missing(parts)
        if name is None:
            return b""
        self._looks += 1
        try:
            found = stat.S_ISREG((self._folder / name).lstat().st_mode)
        except (OSError, ValueError):
            return b""
        if not found:
            return b""
        message = stream_message(_TEXT.format(name=name), self.connection, cell)
        self._said = (cell["msg_id"], frames(message))
        return self._said[1]


def _missing(parts: Sequence[bytes]) -> str | None:
    """Return the name of the file that an error of the kernel's misses, if it is one of these."""
    try:
        raw = parts[list(parts).index(_DELIMITER) + 2]
        header: Any = json.loads(raw) if len(raw) <= LARGEST_HEADER else None
        content = json.loads(parts[-1])
        if header["msg_type"] != "error" or content["ename"] != "FileNotFoundError":
            return None
        found = _NAME.search(content["evalue"][-600:])
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return found[1] if found is not None and found[1].isprintable() else None
