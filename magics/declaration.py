"""`magic`: declares a method as a magic, in the one way in which all of ours are."""

from __future__ import annotations

import functools
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
        @functools.wraps(function)
        def presenting(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                raise _presented(error)  # noqa: B904 - it is the very same

        declared: F = _KINDS[kind](flags.published(presenting))
        declared = no_var_expand(declared)
        return needs_local_scope(declared) if scope else declared

    return declare


def _presented(error: Exception) -> Exception:
    """Have an error of ours, or of a name that is missing, shown by its words."""
    # Not at the top: loading the extension must stay cheap.
    from sandbox_magics.errors import presented

    from sandbox_kernel.errors import SandboxError, SandboxImageMissingError

    if isinstance(error, SandboxImageMissingError) and not getattr(error, "__notes__", ()):
        error.add_note("From a notebook: %sandbox_build")
    if isinstance(error, SandboxError | NameError):
        presented(error)
    return error
