"""IPython magics that run cells in sandboxes: ``%load_ext sandbox_magics``.

Loading the extension starts nothing and connects to nothing. The public names are resolved on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "SandboxImageMissing",
    "SandboxNetworkDenied",
    "SandboxResult",
    "SandboxRunError",
    "SandboxTimeoutError",
    "SandboxUnavailable",
    "SandboxUnknownOutcome",
    "Secret",
    "load_ipython_extension",
    "unload_ipython_extension",
]

if TYPE_CHECKING:
    from sandbox_magics.errors import (
        SandboxImageMissing,
        SandboxNetworkDenied,
        SandboxRunError,
        SandboxTimeoutError,
        SandboxUnavailable,
        SandboxUnknownOutcome,
    )
    from sandbox_magics.result import SandboxResult
    from sandbox_magics.secret import Secret

_MODULES = {"SandboxResult": "result", "Secret": "secret"}


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics; called by ``%load_ext``."""
    from sandbox_magics.registration import register

    register(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """End everything that the magics started, and remove them; called by ``%unload_ext``."""
    from sandbox_magics.registration import unregister

    unregister(ipython)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
