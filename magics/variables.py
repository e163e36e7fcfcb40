"""Notebook variables into a run and out of it: as text, bytes and tables, never as pickles."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from IPython.core.error import UsageError
from sandbox_magics.secret import Secret

__all__ = ["environment", "looked_up", "to_stdin"]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLAIN = (str, int, float, bool, Decimal, os.PathLike)


def looked_up(name: str, variables: Mapping[str, Any], flag: str) -> Any:
    """Return a variable.

    Raises
    ------
    NameError
        There is none of this name.
    """
    try:
        return variables[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined, and {flag} uses it", name=name) from None


def environment(
    words: Sequence[str], variables: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Read the values of ``-e``: ``NAME=VALUE``, or ``NAME`` for the notebook's variable.

    Returns
    -------
    tuple
        Values by name, and those of them that are secrets.

    Raises
    ------
    NameError
        There is no such variable.
    UsageError
        A name or a value cannot be one; values are not repeated.
    """
    values: dict[str, str] = {}
    secrets: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise UsageError("--env: this is not the name of a variable; write NAME or NAME=VALUE")
        if not equals:
            given = looked_up(name, variables, "--env")
            if isinstance(given, Secret):
                value = given.reveal()
                secrets.append(value)
            elif isinstance(given, _PLAIN):
                value = os.fspath(given) if isinstance(given, os.PathLike) else str(given)
            else:
                kind = type(given).__name__
                raise UsageError(
                    f"--env {name}: this is {kind}, and a variable of the environment is a text. "
                    f"Hand it over with --in {name} or --push {name}"
                )
        if "\0" in value:
            raise UsageError(f"--env {name}: its value holds a NUL character")
        values[name] = value
    return values, tuple(secrets)


def to_stdin(name: str, value: Any, form: str) -> bytes:
    """Return a variable as the input of a program.

    Parameters
    ----------
    name
        What an error calls it.
    value
        Bytes, a text, or a data frame (pandas, polars).
    form
        Of a data frame: ``csv`` or ``parquet``.

    Raises
    ------
    UsageError
        It is none of them.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, Secret):
        raise UsageError(f"--in {name}: hand a Secret over with -e {name}")
    if (table := table_bytes(value, form)) is not None:
        return table
    kind = type(value).__name__
    raise UsageError(f"--in {name}: this is {kind}; bytes, a text or a data frame is needed")


def table_bytes(value: Any, form: str) -> bytes | None:
    """Return a data frame as CSV or Parquet, without its index; `None` when it is none."""
    import io

    sink = io.BytesIO()
    pandas, polars = getattr(value, f"to_{form}", None), getattr(value, f"write_{form}", None)
    if callable(pandas):
        pandas(sink, index=False)
    elif callable(polars):
        polars(sink)
    else:
        return None
    return sink.getvalue()
