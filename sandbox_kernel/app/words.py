"""How a command line is taken apart: options, and the words that are none.

Options may stand before, between and after words, ``--`` ends them, and letters can be written
together (``-it``), as everywhere. Where the words are a program's own command line, the first of
them ends the options too. Every option is known beforehand, so that nothing is ever guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sandbox_kernel.policy.document import closest

__all__ = ["WrongWordsError", "split"]


class WrongWordsError(Exception):
    """A command line that cannot be read; the text is for the person who wrote it."""


def split(
    argv: Sequence[str], valued: Collection[str], flags: Collection[str], *, first_word_ends: bool
) -> tuple[list[str], list[str]]:
    """Return the options of a command line, each in one piece, and its words.

    Parameters
    ----------
    argv
        The command line.
    valued, flags
        Names, without dashes, of the options that take a value and of those that take none.
    first_word_ends
        Whether everything from the first word on is words.

    Raises
    ------
    WrongWordsError
        There is no such option, or a value lacks or is too much.

    Examples
    --------
    >>> split(["-it", "-e", "A=1", "sh", "-c", "ls"], {"e"}, {"i", "t"}, first_word_ends=True)
    (['-i', '-t', '-e=A=1'], ['sh', '-c', 'ls'])
    """
    options: list[str] = []
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return options, words + rest
        if word == "-" or not word.startswith("-"):
            words.append(word)
            if first_word_ends:
                return options, words + rest
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name in flags:
                if equals:
                    raise WrongWordsError(f"--{name} takes no value")
                options.append(word)
            elif name in valued:
                options.append(f"--{name}={value if equals else _value(f'--{name}', rest)}")
            else:
                raise _unknown(f"--{name}", valued, flags)
        else:
            options += _letters(word, rest, valued, flags)
    return options, words


def _letters(
    word: str, rest: list[str], valued: Collection[str], flags: Collection[str]
) -> list[str]:
    options = []
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter in flags:
            options.append(f"-{letter}")
        elif letter in valued:
            value = letters.removeprefix("=") if letters else _value(f"-{letter}", rest)
            return [*options, f"-{letter}={value}"]
        else:
            raise _unknown(f"-{letter}", valued, flags)
    return options


def _value(option: str, rest: list[str]) -> str:
    if not rest:
        raise WrongWordsError(f"{option} needs a value")
    return rest.pop(0)


def _unknown(option: str, valued: Collection[str], flags: Collection[str]) -> WrongWordsError:
    names = sorted(n for n in {*valued, *flags} if "." not in n)
    known = tuple(f"{'-' if len(n) == 1 else '--'}{n}" for n in names)
    return WrongWordsError(f"there is no option {option}. {closest(option, known)}")
