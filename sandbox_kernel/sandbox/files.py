"""`SandboxFiles`: the files of a sandbox, from any event loop (F1, F2, F3).

Nothing is done here but hop: every method is the one of `process.files.Files`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from sandbox_kernel.process.files import Files
from sandbox_kernel.sandbox.home import Hop

__all__ = ["SandboxFiles"]

P = ParamSpec("P")
T = TypeVar("T")


def _hopping(
    method: Callable[Concatenate[Files, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SandboxFiles, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def hop(self: SandboxFiles, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._hop(functools.partial(method, self._files, *args, **kwargs))

    return hop


class SandboxFiles:
    r"""The files of one sandbox, in and out; it is `Sandbox.files`.

    Paths in the sandbox are relative to ``/workspace``, or absolute below ``/workspace``,
    ``/output``, ``/tmp`` or the home. What is put there belongs to the sandbox's user; what comes
    out is judged on the way, and is there as a whole or not at all.

    Examples
    --------
    >>> transfer = await sandbox.files.put(b"x,y\n1,2\n", "inputs/points.csv")
    >>> [entry.name for entry in await sandbox.files.list("inputs")]
    ['points.csv']
    >>> await sandbox.files.read("inputs/points.csv")
    b'x,y\n1,2\n'
    """

    def __init__(self, files: Files, hop: Hop) -> None:
        self._files = files
        self._hop = hop

    put = _hopping(Files.put)
    get = _hopping(Files.get)
    read = _hopping(Files.read)
    collect = _hopping(Files.collect)
    list = _hopping(Files.list)
    remove = _hopping(Files.remove)
    make_directory = _hopping(Files.make_directory)
