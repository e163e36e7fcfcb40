"""The shell programs of this package that run inside a sandbox, as argument vectors."""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def program_text(name: str) -> str:
    """Return the text of one of the ``.sh`` files beside this module."""
    return resources.files(__package__).joinpath(f"{name}.sh").read_text(encoding="utf-8")


def workspace_program(verb: str, place: str, *words: str) -> list[str]:
    """Return the command that does something to a workspace; `workspace.sh` says what."""
    return ["sh", "-c", program_text("workspace"), "workspace", verb, place, *words]
