"""The programs that a kernel runs beside it in its sandbox, as `process.program` sends them."""

from __future__ import annotations

import importlib.resources
from functools import cache

from sandbox_kernel.process.program import bundled, framed, start_program, unsuitable

__all__ = ["launcher_program", "relay_program", "start_program", "unsuitable"]


@cache
def relay_program() -> bytes:
    """Return the relay, preceded by the wire codec that it shares with the host."""
    return bundled(_text("relay.py"), "relay", {"sandbox_kernel.kernel.wire": _text("wire.py")})


@cache
def launcher_program() -> bytes:
    """Return the launcher."""
    return framed(_text("launcher.py"))


def _text(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text("utf-8")
