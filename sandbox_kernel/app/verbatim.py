"""Options whose text is taken as it is: no quotes are taken off, and no ``~`` is replaced."""

from __future__ import annotations

from typing import Any

from traitlets import List, Unicode

__all__ = ["Verbatim", "Verbatims"]


class Verbatim(Unicode[str, str]):
    """A text, as it was written."""

    def from_string(self, s: str) -> str:
        """Return it."""
        return s


class Verbatims(List[str]):
    """Texts, each as it was written; the option is repeated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(Unicode(), **kwargs)

    def from_string_list(self, s_list: list[str]) -> list[str]:
        """Return them."""
        return list(s_list)
