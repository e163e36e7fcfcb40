"""``{name}`` in the words of ``%sandbox_run``, expanded after the line was split, never by a shell.

So a value is always exactly one word, whatever it holds; only a list that stands alone as
``{files...}`` becomes several. A name that is not known is an error. ``{{`` and ``}}`` are braces,
and ``$`` is never touched.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from IPython.core.error import UsageError
from sandbox_magics.secret import Secret

__all__ = ["expand", "fill"]

_FIELD: Final = re.compile(
    r"""(?P<name>[^\W\d]\w*)
        (?P<path>(?:\.[^\W\d]\w*|\[[^\[\]{}]*\])*)
        (?P<many>\.\.\.|…)?
        (?:!(?P<conversion>[rsa]))?
        (?::(?P<spec>[^{}]*))?""",
    re.VERBOSE,
)
_STEP: Final = re.compile(r"\.(?P<attribute>[^\W\d]\w*)|\[(?P<key>[^\[\]{}]*)\]")
_CONVERSIONS: Final[Mapping[str | None, Callable[[Any], Any]]] = {
    "r": repr,
    "s": str,
    "a": ascii,
    None: lambda value: value,
}
_DOUBLED: Final = re.compile(r"\{\{([^{}]*)\}\}")
_PARTS: Final = re.compile(r"\{\{|\}\}|\{[^{}]*\}|\{|\}")


def expand(words: Sequence[str], variables: Mapping[str, Any]) -> list[str]:
    """Replace each ``{name}`` by the variable's value.

    Possible are ``{name}``, ``{name.attribute}``, ``{name[key]}``, each with ``!r``, ``!s`` or
    ``!a`` and a format after ``:``, and ``{name...}`` alone for each element of a list.

    Parameters
    ----------
    words
        The words of a command.
    variables
        By name.

    Raises
    ------
    NameError
        There is no such variable.
    UsageError
        What stands in braces is no variable, or its value cannot be in a command.

    Examples
    --------
    >>> expand(["echo", "{x}", "{n:03}", "{{}}"], {"x": "it's; rm -rf / $HOME", "n": 7})
    ['echo', "it's; rm -rf / $HOME", '007', '{}']
    >>> expand(["cat", "{files...}"], {"files": ["a", "b c"]})
    ['cat', 'a', 'b c']
    """
    expanded: list[str] = []
    for word in words:
        match = _FIELD.fullmatch(word[1:-1]) if word[:1] + word[-1:] == "{}" else None
        if match is not None and match["many"]:
            expanded += _many(match, word, variables)
        else:
            expanded.append(_PARTS.sub(lambda part: _part(part[0], variables), word))
    return expanded


def fill(text: str, variables: Mapping[str, Any]) -> str:
    r"""Replace each ``{{name}}`` in a script by the variable's value, quoted for a shell.

    ``{{name|raw}}`` is not quoted: what the value holds is then run as a part of the script.

    Raises
    ------
    NameError
        There is no such variable.
    UsageError
        What stands in double braces is no variable, or its value cannot be in a script.

    Examples
    --------
    >>> fill("grep {{word}} *.txt", {"word": "it's; rm -rf /"})
    'grep \'it\'"\'"\'s; rm -rf /\' *.txt'
    """

    def value(found: re.Match[str]) -> str:
        inner = found[1].strip()
        raw = inner.endswith("|raw")
        match = _FIELD.fullmatch(inner.removesuffix("|raw").strip())
        if match is None or match["many"]:
            raise UsageError(f"{found[0][:80]} is not a variable")
        shown = _one(_value(match, found[0], variables), match, found[0])
        return shown if raw else shlex.quote(shown)

    return _DOUBLED.sub(value, text)


def _part(part: str, variables: Mapping[str, Any]) -> str:
    if part in ("{{", "}}"):
        return part[0]
    match = _FIELD.fullmatch(part[1:-1]) if part[:1] + part[-1:] == "{}" else None
    if match is None:
        literal = part.replace("{", "{{").replace("}", "}}")
        raise UsageError(f"{part[:80]} is not a variable. For braces write {literal[:80]}")
    if match["many"]:
        raise UsageError(f"{part} becomes several words, so it must be a word of its own")
    return _one(_value(match, part, variables), match, part)


def _many(match: re.Match[str], part: str, variables: Mapping[str, Any]) -> list[str]:
    values = _value(match, part, variables)
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        kind = type(values).__name__
        raise UsageError(f"{part}: this is {kind}, and a list is needed. For one word: "
                         f"{{{match['name']}{match['path']}}}")  # fmt: skip
    return [_one(value, match, part) for value in values]


def _value(match: re.Match[str], part: str, variables: Mapping[str, Any]) -> Any:
    name = match["name"]
    if name not in variables:
        raise NameError(f"name {name!r} is not defined, and {part} uses it", name=name)
    value = variables[name]
    for step in _STEP.finditer(match["path"]):
        if step["attribute"] is not None:
            value = getattr(value, step["attribute"])
        else:
            key = step["key"]
            # As `str.format` reads it: digits are an index, all else is a text.
            value = value[int(key) if key.isdecimal() else key]
    return value


def _one(value: Any, match: re.Match[str], part: str) -> str:
    if isinstance(value, Secret):
        raise UsageError(
            f"{part} is a Secret, and words of a command can be seen in the sandbox. Hand it over "
            f"with -e {match['name']}"
        )
    if isinstance(value, bytes | bytearray):
        raise UsageError(f"{part}: this is bytes. Hand it over with --in {match['name']}")
    text = format(_CONVERSIONS[match["conversion"]](value), match["spec"] or "")
    if "\0" in text:
        raise UsageError(f"{part}: its value holds a NUL character, which no word can")
    return text
