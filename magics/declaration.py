"""`magic`: declares a method as a magic, in the one way in which all of ours are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from IPython.core.magic import (
    cell_magic,
    line_cell_magic,
    line_magic,
    needs_local_scope,
    no_var_expand,
)
from sandbox_magics.flags import Flags

__all__ = ["magic"]

F = TypeVar("F", bound=Callable[..., Any])

_KINDS: dict[str, Any] = {"line": line_magic, "cell": cell_magic, "both": line_cell_magic}


def magic(
    kind: Literal["line", "cell", "both"], flags: Flags, *, scope: bool = False
) -> Callable[[F], F]:
    """Make a method of `Magics` a magic of its own name.

    IPython expands nothing in its line: what looks like a variable there may be the program's.

    Parameters
    ----------
    kind
        Whether it stands in a line, at the top of a cell, or both.
    flags
        What it shows as its help.
    scope
        Whether it gets the variables of the function in which it is used, as ``local_ns``.
    """

    def declare(function: F) -> F:
        declared: F = _KINDS[kind](flags.published(function))
        declared = no_var_expand(declared)
        return needs_local_scope(declared) if scope else declared

    return declare
