"""Where a caller in Python has its sandboxes: on which engine, and in which loop that is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from sandbox_kernel.config import EngineSettings, engine_settings
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import check_engine
from sandbox_kernel.sandbox.home import CallersLoop, Home
from sandbox_kernel.sandbox.order import Order, settle

__all__ = ["at_engine", "engine_place", "settled_at"]

T = TypeVar("T")


def settled_at(
    asked: Mapping[str, object], engine: str | EngineSettings | Engine | None
) -> tuple[Order, Endpoint | Engine]:
    """Settle what a caller in Python asks for, on the engine that it names.

    Parameters
    ----------
    asked
        Settings and fields of `SandboxSpec` by name.
    engine
        As given to `Sandbox.create`.

    Raises
    ------
    SandboxSpecRejectedError
        What was asked for cannot be had, or not there.
    SandboxUnavailableError
        There is no engine.
    """
    _check(engine)
    if isinstance(engine, Engine):
        order = settle(asked, door="python")
        check_engine(order.engine.allowed, engine.endpoint.url, "the caller")
        return order, engine
    order = settle(asked, door="python", engine=engine)
    return order, order.endpoint()


def engine_place(engine: str | EngineSettings | Engine | None) -> Endpoint | Engine:
    """Return the engine that a caller names, whatever holds for new sandboxes.

    Raises
    ------
    SandboxSpecRejectedError
        It is none, or not one that may be used.
    SandboxUnavailableError
        There is no engine.
    """
    _check(engine)
    asked: dict[str, object] = {}
    if isinstance(engine, str):
        asked["host"] = engine
    elif isinstance(engine, EngineSettings) and engine.allow_insecure_engine:
        asked["allow_insecure_engine"] = True
    settings = engine_settings(asked, door="python")
    if isinstance(engine, Engine):
        check_engine(settings.allowed, engine.endpoint.url, "the caller")
        return engine
    if isinstance(engine, EngineSettings):
        settings = dataclasses.replace(engine, allowed=settings.allowed)
    return resolve_endpoint(settings)


def _check(engine: object) -> None:
    if engine is not None and not isinstance(engine, str | EngineSettings | Engine):
        raise SandboxSpecRejectedError(
            "engine",
            None,
            f"this is {type(engine).__name__}",
            "Give an address, EngineSettings or an open Engine.",
        )


async def at_engine(place: Endpoint | Engine, work: Callable[[Engine], Awaitable[T]]) -> T:
    """Do something with an engine: in its own loop if it is open, else in the engine thread's."""
    thread = EngineThread.current()
    home: Home = CallersLoop() if isinstance(place, Engine) else thread

    async def do() -> T:
        return await work(place if isinstance(place, Engine) else await thread.engine(place))

    return await home.call(do)
