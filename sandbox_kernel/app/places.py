"""Where ``cp`` copies from and to, as a person writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Place", "read_place"]

_WORKSPACE = "workspace:"


@dataclass(frozen=True, slots=True)
class Place:
    """A place for files.

    Parameters
    ----------
    kind
        ``here`` is this machine, ``stream`` the standard input or output.
    name
        The sandbox, or the key of the workspace.
    path
        The path in it.
    """

    kind: Literal["here", "stream", "sandbox", "workspace"]
    name: str
    path: str

    @property
    def is_remote(self) -> bool:
        """Whether it is in a sandbox or a workspace."""
        return self.kind in {"sandbox", "workspace"}


def read_place(text: str) -> Place:
    """Read a place.

    As for ``docker cp``, what has a colon before any slash is in a sandbox; a path of this machine
    like that is written as ``./a:b``. The key of a workspace may hold anything.

    Examples
    --------
    >>> read_place("3f2a:out/a.csv").path
    'out/a.csv'
    >>> read_place("workspace:lab/one:a.csv")
    Place(kind='workspace', name='lab/one', path='a.csv')
    >>> read_place("./3f2a:b").kind
    'here'
    """
    if text == "-":
        return Place("stream", "", "")
    if text.startswith(_WORKSPACE):
        key, colon, path = text.removeprefix(_WORKSPACE).rpartition(":")
        if colon and key:
            return Place("workspace", key, path)
    name, colon, path = text.partition(":")
    if colon and name and "/" not in name and not name.startswith("."):
        return Place("sandbox", name, path)
    return Place("here", "", text)
