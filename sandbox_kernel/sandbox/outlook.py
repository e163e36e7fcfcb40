"""`look`: can a sandbox be made, and where; answered within a bound, nothing is made."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from sandbox_kernel.engine.images import image_present
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxError, SandboxUnavailableError
from sandbox_kernel.sandbox.order import Order

__all__ = ["Outlook", "look"]

PATIENCE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of the engine and the image of an order.

    Parameters
    ----------
    engine
        The engine's address.
    source
        Which rule chose it.
    encrypted
        Whether the connection is, with both sides proved.
    version
        The engine's version.
    latency
        Seconds that a question took.
    image
        The image of the order.
    image_id, image_size
        Its digest and its bytes; `None` when it is not on the engine.
    """

    engine: str
    source: str
    encrypted: bool
    version: str
    latency: float
    image: str
    image_id: str | None
    image_size: int | None


async def look(order: Order, timeout: float = PATIENCE) -> Outlook:
    """Look at the engine and the image of an order.

    Raises
    ------
    SandboxUnavailableError
        There is no usable engine, or it does not answer in time.
    SandboxError
        The engine has something else to say.
    """
    endpoint = order.endpoint()
    thread = EngineThread.current()

    async def ask() -> Outlook:
        engine = await thread.engine(endpoint)
        began = time.monotonic()
        version = await engine.version()
        latency = time.monotonic() - began
        image = await image_present(engine, order.spec.image)
        return Outlook(
            engine=endpoint.url,
            source=endpoint.source,
            encrypted=endpoint.tls is not None,
            version=str(version.get("Version") or ""),
            latency=latency,
            image=order.spec.image,
            image_id=None if image is None else image.id,
            image_size=None if image is None else image.size,
        )

    try:
        async with asyncio.timeout(timeout):
            return await thread.call(ask)
    except TimeoutError as error:
        if isinstance(error, SandboxError):
            raise
        raise SandboxUnavailableError(
            "silent",
            f"The Docker engine {endpoint.url} gave no answer within {timeout:g} s",
            "Look whether it is running.",
        ) from error
