"""Notebook variables into a run and out of it: as text, bytes and tables, never as pickles."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, Final

from IPython.core.error import UsageError
from sandbox_magics.secret import Secret

__all__ = ["environment", "from_file", "looked_up", "pairs", "to_file", "to_stdin", "variable_of"]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TEXTS: Final = frozenset({".txt", ".md", ".log", ".tex", ".html", ".svg", ".sh", ".py", ".r"})
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


def pairs(words: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """Read words of the form ``A=B``, of which the second part may be left out.

    Raises
    ------
    UsageError
        There is no first part.
    """
    found = []
    for word in words:
        first, _, second = word.partition("=")
        if not first:
            raise UsageError(f"{flag}: write what before the =")
        found.append((first, second))
    return found


def to_file(name: str, value: Any, path: str) -> tuple[str, bytes]:
    """Return a variable as a file: the path, made up where it is empty, and the bytes.

    What it becomes is decided by the suffix: ``.csv`` and ``.parquet`` (data frames), ``.npy``
    (arrays), ``.json``, and for bytes and texts anything. Nothing is ever pickled.

    Raises
    ------
    UsageError
        The variable cannot become such a file.
    """
    import io
    import json

    suffix = PurePosixPath(path or name + _suffix(value)).suffix.lower()
    path = path or name + _suffix(value)
    data: bytes | None = None
    if isinstance(value, Secret):
        raise UsageError(f"--push {name}: hand a Secret over with -e {name}")
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogateescape")
    elif suffix in (".csv", ".parquet"):
        data = table_bytes(value, suffix[1:])
    elif suffix == ".npy" and hasattr(value, "__array__"):
        import numpy as np  # type: ignore[import-not-found, unused-ignore]

        sink = io.BytesIO()
        try:
            np.save(sink, np.asarray(value), allow_pickle=False)
        except ValueError as error:
            raise UsageError(f"--push {name}: {error}") from None
        data = sink.getvalue()
    elif suffix == ".json":
        try:
            data = json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"--push {name}: this cannot be JSON ({error})") from None
    if data is None:
        kind = type(value).__name__
        raise UsageError(
            f"--push {name}: {kind} cannot become {path!r}. Bytes and texts become any file, data "
            "frames .csv and .parquet, arrays .npy, and plain data .json"
        )
    return path, data


def from_file(path: str, data: bytes) -> Any:
    """Return what a file of a sandbox holds, as the suffix of its path says; never a pickle.

    Raises
    ------
    UsageError
        The file is not what its suffix says.
    """
    import io
    import json

    suffix = PurePosixPath(path).suffix.lower()
    try:
        if suffix in (".csv", ".parquet"):
            import pandas as pd  # type: ignore[import-untyped, import-not-found, unused-ignore]

            return getattr(pd, f"read_{suffix[1:]}")(io.BytesIO(data))
        if suffix == ".npy":
            import numpy as np  # type: ignore[import-not-found, unused-ignore]

            return np.load(io.BytesIO(data), allow_pickle=False)
        if suffix == ".json":
            return json.loads(data)
    except ImportError as error:
        raise UsageError(f"--pull {path}: {error}. Here it is bytes only: rename it") from None
    except Exception as error:
        # Whatever a reader makes of bytes that nobody vouches for.
        raise UsageError(f"--pull {path}: it cannot be read ({type(error).__name__})") from None
    return data.decode("utf-8", "replace") if suffix in _TEXTS else data


def _suffix(value: Any) -> str:
    if isinstance(value, str):
        return ".txt"
    if isinstance(value, bytes | bytearray | memoryview):
        return ".bin"
    if hasattr(value, "to_csv") or hasattr(value, "write_csv"):
        return ".csv"
    return ".npy" if hasattr(value, "__array__") else ".json"


def variable_of(path: str) -> str:
    """Return the name of a variable for a file."""
    name = re.sub(r"\W", "_", PurePosixPath(path).stem)
    return f"_{name}" if not name or name[0].isdigit() else name


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
