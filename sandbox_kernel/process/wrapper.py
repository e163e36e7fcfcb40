"""How ``wrapper.sh`` is called, and what its calls that fail mean (contract W1, W3, W24).

It is called below the engine's init, which every sandbox has. A container without one makes that
fail, before anything ran, and is remembered; there the wrapper does without.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Final
from weakref import WeakKeyDictionary

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.faults import without_host_paths
from sandbox_kernel.errors import SandboxError, SandboxImageUnsuitableError
from sandbox_kernel.process.result import CommandStartError
from sandbox_kernel.process.stop import Kind

__all__ = ["NoInitError", "failure", "remember", "wrapper_argv"]

_INIT: Final = "/sbin/docker-init"
_FAILED: Final = (126, 127)
_without: Final[WeakKeyDictionary[Engine, set[str]]] = WeakKeyDictionary()


class NoInitError(CommandStartError):
    """The container has no init of the engine; the call is to be made again, without one."""


@functools.cache
def _text() -> str:
    return resources.files(__package__).joinpath("wrapper.sh").read_text(encoding="utf-8")


def wrapper_argv(engine: Engine, container_id: str, kind: Kind) -> list[str]:
    """Return the argv of the exec, which is the same for all commands."""
    if container_id in _without.get(engine, ()):
        return ["sh", "-c", _text(), "wrapper", kind, _text()]
    return [_INIT, "-s", "--", "sh", "-c", _text(), "wrapper", kind]


def remember(engine: Engine, container_id: str) -> None:
    """Remember that a container has no init."""
    _without.setdefault(engine, set()).add(container_id)


def failure(code: int, said: str) -> SandboxError:
    """Tell what it means that the call ended with a code before the wrapper's first report.

    Parameters
    ----------
    code
        What the engine recorded.
    said
        What was said until then, by the engine, its init or the shell.
    """
    if code in _FAILED:
        if f'exec: "{_INIT}"' in said:
            return NoInitError("The container has no init")
        if "exec sh failed" in said or ('exec: "sh"' in said and "not found" in said):
            return SandboxImageUnsuitableError(
                "The image has no program sh, without which no command can be run"
            )
    said = without_host_paths(said)
    return CommandStartError(f"The command could not be started: {said or f'code {code}'}")
