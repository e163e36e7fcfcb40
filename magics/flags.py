"""Flags of the magics: how they are written, read, described and completed; nothing is run here.

Flags end at ``--`` or at the first word that is not one, so that a program's own options reach
it untouched (``%sandbox_run pytest -q``). Until there every word with a dash must be a flag of
ours: a mistyped one is an error, never a program. Words are split as a POSIX shell does it, and
nothing in them is expanded.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, kwds, magic_arguments

__all__ = ["Flag", "Flags", "Parsed", "duration", "number", "parse_words", "size", "split"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_VARIABLE: Final = re.compile(r"[^\W\d]\w*")
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", re.ASCII)
_SECONDS: Final = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_NUMBER: Final = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)


# -- values -------------------------------------------------------------------------------------


def text(value: str) -> str:
    """Take any value."""
    return value


def variable(value: str) -> str:
    """Take the name of a notebook's variable."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError("this is not the name of a variable")
    return value


def duration(value: str) -> float:
    """Read a time, in seconds or with ``ms``, ``s``, ``m`` or ``h``.

    Raises
    ------
    ValueError
        It is not one; the text is the reason.

    Examples
    --------
    >>> duration("1.5m")
    90.0
    """
    match = _DURATION.fullmatch(value)
    if match is None:
        raise ValueError("this is not a time; write seconds, or e.g. 500ms, 90s, 5m or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def size(value: str) -> int:
    """Read an amount of memory, in bytes or with K, M, G or T.

    Raises
    ------
    ValueError
        It is not one; the text is the reason.
    """
    # Not at the top: loading the extension must stay cheap.
    from sandbox_kernel.amounts import parse_memory
    from sandbox_kernel.errors import SandboxSpecRejectedError

    try:
        return parse_memory(value)
    except SandboxSpecRejectedError as error:
        raise ValueError(f"{error.reason}; write bytes, or e.g. 512M or 2G") from None


def number(value: str) -> float:
    """Read a number that is not negative.

    Raises
    ------
    ValueError
        It is not one; the text is the reason.
    """
    if not _NUMBER.fullmatch(value):
        raise ValueError("this is not a number")
    return float(value)


def count(value: str) -> int:
    """Read a whole number that is not negative.

    Raises
    ------
    ValueError
        It is not one; the text is the reason.
    """
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise ValueError("this is not a whole number")
    return int(value)


def one_of(*known: str) -> Callable[[str], str]:
    """Return a reader of one of a few words."""

    def read(value: str) -> str:
        if value not in known:
            raise ValueError(f"this must be one of {', '.join(known)}")
        return value

    return read


# -- flags --------------------------------------------------------------------------------------


_ONE_USER = "code always runs as the unprivileged user; what only root can do is for --setup"
_NO_FOLDER = "no folder of the machine is mounted; use --push, --pull, %sandbox_put or %sandbox_get"
_NO_PORT = "nothing in a sandbox can be reached from outside"
_OF_DOCKER: Final = {
    "--user": _ONE_USER,
    "-u": _ONE_USER,
    "--privileged": _ONE_USER,
    "--volume": _NO_FOLDER,
    "-v": _NO_FOLDER,
    "--mount": _NO_FOLDER,
    "--publish": _NO_PORT,
    "-p": _NO_PORT,
    "--rm": "a fresh sandbox is always removed",
}
"""What people know from ``docker run`` and look for here."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Parameters
    ----------
    names
        How it is written, the long form first.
    help
        One sentence for people.
    value
        What stands for its value in the help; empty for a flag that has none.
    read
        Turns the word into the value; a `ValueError` says what is wrong with it.
    repeat
        Whether it may be given several times; its value is then a tuple.
    """

    names: tuple[str, ...]
    help: str
    value: str = ""
    read: Callable[[str], Any] = text
    repeat: bool = False

    @property
    def key(self) -> str:
        """What its value is found by."""
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def shown(self) -> str:
        """How it is written, with its value."""
        return " ".join(filter(None, (", ".join(self.names), self.value)))


class Parsed(Mapping[str, Any]):
    """The values of the flags, and the words after them.

    A flag that was not given is `None`, ``False`` when it takes no value, and an empty tuple
    when it may be repeated.

    Parameters
    ----------
    values
        By the key of the flag.
    rest
        The words from the first one that is no flag.
    """

    def __init__(self, values: Mapping[str, Any], rest: Sequence[str]) -> None:
        self._values = dict(values)
        self.rest = tuple(rest)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Flags:
    """The flags of one magic.

    Parameters
    ----------
    flags
        In the order in which the help shows them.
    usage
        The line of the help that shows the magic; it begins with the escape characters.
    rest
        What the words after the flags are, for the help; empty where there may be none.
    anywhere
        Whether flags may also stand after other words: for a magic whose words are not a program
        with options of its own.
    examples
        Lines to paste.
    """

    def __init__(
        self,
        flags: Iterable[Flag],
        *,
        usage: str,
        rest: str = "",
        anywhere: bool = False,
        examples: Sequence[str] = (),
    ) -> None:
        self.flags = tuple(flags)
        self.usage = usage
        self.rest = rest
        self.anywhere = anywhere
        self.examples = tuple(examples)
        self._named = {name: flag for flag in self.flags for name in flag.names}

    def parse(self, line: str) -> Parsed:
        """Read the line of a magic.

        Raises
        ------
        UsageError
            A word is not a flag, or has a wrong value; the text names it and what to do.
        """
        return self.parse_words(split(line))

    def parse_words(self, words: Sequence[str]) -> Parsed:
        """Read a line that has been split already; otherwise like `parse`."""
        values: dict[str, Any] = {
            flag.key: () if flag.repeat else None if flag.value else False for flag in self.flags
        }
        rest: list[str] = []
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--":
                rest += words[at:]
                break
            if word == "-" or not word.startswith("-"):
                rest.append(word)
                if self.anywhere:
                    continue
                rest += words[at:]
                break
            flag, name, given = self._flag(word)
            if not flag.value:
                if given is not None:
                    raise UsageError(f"{name} takes no value")
                values[flag.key] = True
                continue
            if given is None:
                if at == len(words):
                    raise UsageError(f"{name} needs a value: {name} {flag.value}")
                given = words[at]
                at += 1
            value = _read(flag, name, given)
            if flag.repeat:
                values[flag.key] += (value,)
            elif values[flag.key] is not None:
                raise UsageError(f"{name} is given twice")
            else:
                values[flag.key] = value
        if rest and not self.rest:
            raise UsageError(f"{_shown(rest[0])} is not understood: {self.usage}")
        return Parsed(values, rest)

    def _flag(self, word: str) -> tuple[Flag, str, str | None]:
        """Find the flag of a word; return it, its name as written, and its value if attached."""
        name, equals, given = word.partition("=")
        if name in self._named:
            return self._named[name], name, given if equals else None
        short = word[:2]
        if not word.startswith("--") and short in self._named and self._named[short].value:
            return self._named[short], short, word[2:]
        self._unknown(name)

    def _unknown(self, name: str) -> NoReturn:
        if self.rest and name in _OF_DOCKER:
            raise UsageError(f"there is no flag {name}: {_OF_DOCKER[name]}")
        near = difflib.get_close_matches(name, self._named, n=2, cutoff=0.6)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        program = " A program's own options come after its name, or after --." if self.rest else ""
        raise UsageError(f"there is no flag {_shown(name)}.{meant}{program}")

    def published(self, function: _Function) -> _Function:
        """Describe the flags to IPython, so that ``%magic?`` shows them; a decorator.

        The parser that this makes is never used: it would drop a shell's quotes and claim the
        options of programs.
        """
        epilog = "\n".join(["", "examples::", "", *(f"  {example}" for example in self.examples)])
        for flag in reversed(self.flags):
            words: dict[str, Any] = {"help": flag.help.replace("%", "%%"), "dest": flag.key}
            if flag.value:
                words["metavar"] = flag.value
                words["action"] = "append" if flag.repeat else "store"
            else:
                words["action"] = "store_true"
            function = argument(*flag.names, **words)(function)  # type: ignore[no-untyped-call]
        # The help begins with an escape character already.
        usage = self.usage.removeprefix("%")
        words = {"usage": usage, "epilog": epilog if self.examples else None}
        function = kwds(**words)(function)  # type: ignore[no-untyped-call]
        return magic_arguments()(function)  # type: ignore[no-untyped-call, no-any-return]

    def completions(self, words: Sequence[str], partial: str) -> list[str]:
        """Return what may stand at the end of a line.

        Parameters
        ----------
        words
            The complete words before, without the magic's name.
        partial
            What has been written of the last word.
        """
        if not partial.startswith("-") or not self._flags_follow(words):
            return []
        return [name for name in self._named if name.startswith(partial) and name.startswith("--")]

    def _flags_follow(self, words: Sequence[str]) -> bool:
        """Say whether the next word can be a flag: not a value, and not the program's own."""
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--" or (not word.startswith("-") and not self.anywhere):
                return False
            flag = self._named.get(word)
            if flag is not None and flag.value:
                if at == len(words):
                    return False
                at += 1
        return True


def split(line: str) -> list[str]:
    """Split a line into words as a POSIX shell does; nothing is expanded, ``#`` is no comment.

    Raises
    ------
    UsageError
        A quote is not closed.
    """
    try:
        return shlex.split(line, comments=False, posix=True)
    except ValueError as error:
        raise UsageError(f"the line cannot be split into words: {str(error).lower()}") from None


def parse_words(cell: str) -> list[str]:
    """Return the words of a cell that has one on each line; blank lines are left out."""
    return [word for line in cell.splitlines() if (word := line.strip())]


def _read(flag: Flag, name: str, given: str) -> Any:
    try:
        return flag.read(given)
    except ValueError as error:
        raise UsageError(f"{name} {_shown(given)}: {error}") from None


def _shown(word: str) -> str:
    """Return a word for an error, without what could change a terminal."""
    return shlex.quote("".join(c if c.isprintable() else "?" for c in word[:80]))
