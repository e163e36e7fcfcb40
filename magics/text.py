r"""From the bytes of a program to text that can be shown: decoding, masking, cleaning.

Each class takes its input piece by piece, however the pieces were cut, and gives the rest at the
end. What can change a terminal is taken out; what a notebook shows rightly (colours, ``\\r``)
stays. Captured output is not cleaned, only what is shown.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Final

from sandbox_magics.secret import MASK

__all__ = ["Cleaner", "Decoder", "Masker", "clean"]

_LONGEST_ESCAPE: Final = 80
_SUSPICIOUS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SEQUENCE: Final = re.compile(
    r"""
    (?P<sgr>(?:\x1b\[|\x9b)[0-9;:]{0,64}m)                 # colours
    |(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]             # any other control sequence
    |(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])               # a string: title, clipboard, link …
        [^\n\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?
    |\x1b[ -/]{0,8}[0-~]?                                  # reset, character sets …
    |(?P<line>\r\n)
    |(?P<back>\r)
    |[\x00-\x08\x0b-\x1f\x7f-\x9f]
    """,
    re.VERBOSE,
)
# What may become one of those with what follows: it waits, up to a bound.
_UNFINISHED: Final = re.compile(
    r"""(?:
    (?:\x1b\[|\x9b)[0-?]*[ -/]*
    |(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\n\x07\x1b\x9c]*\x1b?
    |\x1b[ -/]*
    |\r
    )\Z""",
    re.VERBOSE,
)


class Decoder:
    """Bytes to text in UTF-8; what is no UTF-8 becomes U+FFFD, and nothing after it is lost."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Return the text that is complete."""
        return self._decoder.decode(data)

    def rest(self) -> str:
        """Return what waited for more, at the end."""
        return self._decoder.decode(b"", final=True)


class Masker:
    """Replaces secrets in bytes by ``***``, also where a piece ends within one.

    Parameters
    ----------
    secrets
        What to replace. With none, everything passes as it is.
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        # A secret that holds another one is replaced as a whole.
        self._secrets = sorted({s for s in secrets if s}, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(re.escape(s) for s in self._secrets))
        self._longest = len(self._secrets[0]) if self._secrets else 0
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be no part of a secret any more."""
        if not self._secrets:
            return data
        data = self._held + data
        done = bytearray()
        at = 0
        for match in self._pattern.finditer(data):
            # A longer secret may begin here whose end has not come yet.
            if self._begins_longer(data, match):
                break
            done += data[at : match.start()] + MASK.encode()
            at = match.end()
        keep = self._tail(data, at)
        done += data[at : len(data) - keep]
        self._held = data[len(data) - keep :] if keep else b""
        return bytes(done)

    def rest(self) -> bytes:
        """Return what waited, at the end."""
        held, self._held = self._held, b""
        return self._pattern.sub(MASK.encode(), held) if self._secrets else held

    def _begins_longer(self, data: bytes, match: re.Match[bytes]) -> bool:
        if len(data) - match.start() >= self._longest:
            return False
        tail = data[match.start() :]
        return any(len(s) > len(tail) and s.startswith(tail) for s in self._secrets)

    def _tail(self, data: bytes, at: int) -> int:
        """Return how many bytes at the end may be the beginning of a secret."""
        for length in range(min(self._longest - 1, len(data) - at), 0, -1):
            tail = data[-length:]
            if any(s.startswith(tail) for s in self._secrets if len(s) > length):
                return length
        return 0


class Cleaner:
    r"""Takes out of text what can change a terminal, and keeps what a notebook shows.

    Kept are line ends, tabs, ``\\r`` (progress bars) and colours. ``\\r\\n`` becomes a line end. A
    string for the terminal (title, clipboard, link) ends at the end of its line at the latest, so
    that nobody hides the rest of the output in one.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that is complete."""
        if self._held:
            text, self._held = self._held + text, ""
        if _SUSPICIOUS.search(text) is None:
            return text
        # Only near the end: what begins further back is too long to wait for, and a search of all
        # of it could be made slow on purpose.
        unfinished = _UNFINISHED.search(text, max(len(text) - _LONGEST_ESCAPE, 0))
        if unfinished is not None:
            self._held = text[unfinished.start() :]
            text = text[: unfinished.start()]
        return _SEQUENCE.sub(_kept, text)

    def rest(self) -> str:
        """Return what waited for more, at the end."""
        held, self._held = self._held, ""
        return _SEQUENCE.sub(_kept, held)


def clean(text: str) -> str:
    r"""Clean a whole text; see `Cleaner`.

    Examples
    --------
    >>> clean("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07\\x00plain")
    '\\x1b[31mred\\x1b[0m plain'
    """
    return _SEQUENCE.sub(_kept, text) if _SUSPICIOUS.search(text) else text


def _kept(match: re.Match[str]) -> str:
    if match["sgr"] is not None:
        return match[0].replace("\x9b", "\x1b[")
    if match["line"] is not None:
        return "\n"
    return match["back"] or ""
