"""`Secret`: a value that may be handed to a sandbox and is shown nowhere."""

from __future__ import annotations

from typing import Final, NoReturn

__all__ = ["MASK", "Secret"]

MASK: Final = "***"
"""What stands for a secret wherever it would show."""

_SHORTEST: Final = 4


class Secret:
    """A value for ``-e NAME`` that output, results and the status show as ``***``.

    Parameters
    ----------
    value
        The value, of 4 characters or more: a shorter one could not be told from other text.

    Examples
    --------
    >>> TOKEN = Secret("correct horse")
    >>> TOKEN
    Secret('***')
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        if not isinstance(value, str):
            raise TypeError(f"a secret is a text, and this is {type(value).__name__}")
        if len(value) < _SHORTEST:
            raise ValueError(f"a secret has {_SHORTEST} characters or more")
        self._value = value

    def reveal(self) -> str:
        """Return the value itself."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> NoReturn:
        # A notebook's variables are pickled by more programs than their author knows.
        raise TypeError("a secret cannot be pickled")
