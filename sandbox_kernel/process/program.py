"""Sending Python programs of ours into a sandbox over the stdin of the exec that runs them.

Nothing of ours is baked into an image, and nothing is written to a file that somebody could
plant or change: the argv holds a fixed loader, which reads the program's text from stdin.
Isolated mode without ``site`` keeps every file that user code can write out of the import
path (measured: otherwise a planted ``json.py`` or ``usercustomize.py`` runs as our program).
What the programs are belongs to the packages that send them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Protocol, TypeVar

from sandbox_kernel.errors import SandboxImageUnsuitableError

MINIMUM_PYTHON = (3, 8)
"""Oldest Python in an image that the programs run on."""

TOO_OLD_EXIT_CODE = 125
"""Exit code of the loader on an older Python."""

_LOADER = f"""\
import os, sys
if sys.version_info < {MINIMUM_PYTHON}:
    sys.exit({TOO_OLD_EXIT_CODE})
def take(count):
    parts = []
    while count:
        part = os.read(0, count)
        if not part:
            os._exit(1)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
exec(compile(take(int(take(8))), "<sandbox-kernel>", "exec"))
"""


class Started(Protocol):
    """What runs in a sandbox and takes input; leaving it ends it."""

    async def write(self, data: bytes, /) -> None:
        """Send input."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> object:
        """Let go of it."""


_Started = TypeVar("_Started", bound=Started)

_PACKAGE = """\
import sys, types
sys.modules.setdefault({name!r}, types.ModuleType({name!r}))
"""

_MODULE = """\
exec(compile({text!r}, "<{name}>", "exec"), sys.modules[{name!r}].__dict__)
"""


def loader_argv(python: str = "python3") -> list[str]:
    """Return the argv that starts any of our programs.

    Parameters
    ----------
    python
        The interpreter, as found in the image.
    """
    return [python, "-I", "-S", "-c", _LOADER]


async def start_program(
    start: Callable[[list[str]], Awaitable[_Started]], program: bytes
) -> _Started:
    """Start the loader and send it a program; when this fails, the loader has been ended.

    Parameters
    ----------
    start
        A way to start an argv in a sandbox.
    program
        As `framed` or `bundled` gives it, with the program's own first input after it.
    """
    started = await start(loader_argv())
    try:
        await started.write(program)
    except BaseException as error:
        await started.__aexit__(type(error), error, error.__traceback__)
        raise
    return started


def unsuitable(
    exit_code: int | None, image: str, needing: str = "A kernel's image"
) -> SandboxImageUnsuitableError | None:
    """Return the error that a loader's exit code stands for, or `None` when it is another.

    Parameters
    ----------
    exit_code
        Of the exec that should have run the loader.
    image
        The image's name, for the text.
    needing
        What needs Python, for the text.
    """
    if exit_code == TOO_OLD_EXIT_CODE:
        found = f"The python3 in {image} is too old"
    elif exit_code in (126, 127):
        found = f"There is no python3 in {image}"
    else:
        return None
    needed = ".".join(map(str, MINIMUM_PYTHON))
    return SandboxImageUnsuitableError(
        f"{found}. {needing} needs python3, version {needed} or later, on its PATH"
    )


def framed(program: str) -> bytes:
    """Return a program's text as the loader expects it on stdin."""
    text = program.encode()
    return b"%08d" % len(text) + text


def bundled(program: str, shown_as: str, modules: Mapping[str, str]) -> bytes:
    """Return a program with modules of ours that it imports, framed for the loader.

    Parameters
    ----------
    program
        The program's text.
    shown_as
        What its tracebacks call it.
    modules
        Texts of the modules by their full names, each after those that it imports.
    """
    names: dict[str, None] = {}
    for module in modules:
        parts = module.split(".")
        names.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
    text = "".join(_PACKAGE.format(name=name) for name in names)
    text += "".join(_MODULE.format(name=name, text=body) for name, body in modules.items())
    return framed(f"{text}exec(compile({program!r}, '<{shown_as}>', 'exec'))\n")
