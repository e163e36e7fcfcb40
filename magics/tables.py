"""tables.py FORMAT PATH - prints the first rows of a table as JSON; runs inside of a sandbox.

Contract. This file is a program. It runs as the user of the code, as ``python3 -I -c TEXT``, on
Python 3.8 or later. FORMAT is csv or parquet; the latter needs pandas in the image. It prints
one JSON object: ``columns``, ``rows`` (texts), ``more`` (whether there are more rows), or
``error``. Rows, columns and texts are bounded, and the host bounds and checks them again: it
believes nothing of what is printed here.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys

ROWS = 10
COLUMNS = 20
TEXT = 100


def first_csv(path: str) -> dict:  # type: ignore[type-arg]
    """Return the first rows of a CSV file; the first line names the columns."""
    csv.field_size_limit(1 << 20)
    with open(path, newline="", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        reader = csv.reader(file)
        rows = list(itertools.islice(reader, ROWS + 2))
    return {
        "columns": rows[0] if rows else [],
        "rows": rows[1 : ROWS + 1],
        "more": len(rows) > ROWS + 1,
    }


def first_parquet(path: str) -> dict:  # type: ignore[type-arg]
    """Return the first rows of a Parquet file."""
    import pandas  # type: ignore[import-untyped, import-not-found, unused-ignore]

    frame = pandas.read_parquet(path)
    head = frame.head(ROWS)
    return {
        "columns": [str(name) for name in head.columns],
        "rows": [[str(value) for value in row] for row in head.itertuples(index=False)],
        "more": len(frame) > ROWS,
    }


def bounded(table: dict) -> dict:  # type: ignore[type-arg]
    """Return a table without columns and characters beyond the bounds."""

    def short(row: list) -> list:  # type: ignore[type-arg]
        return [str(text)[:TEXT] for text in row[:COLUMNS]]

    return {
        "columns": short(table["columns"]),
        "rows": [short(row) for row in table["rows"]],
        "more": table["more"],
    }


def main() -> None:
    """Print the table, or why there is none."""
    form, path = sys.argv[1:]
    try:
        table = bounded(first_csv(path) if form == "csv" else first_parquet(path))
    except Exception as error:
        table = {"error": f"{type(error).__name__}: {error}"[:200]}
    print(json.dumps(table))


if __name__ == "__main__":
    main()
