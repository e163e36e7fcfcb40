"""`prepared`: an image that commands have set up as root, for as long as it is needed (C3).

The commands run in a container of their own, which has a sandbox's filter of system calls, its
limits and its network, and of root's capabilities only those that the installation of packages
needs. What it holds in the end becomes an image, and the container goes. Code of the user never
runs where root ran, and root never runs where code of the user did.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import ensure_image, remove_image
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxError,
    SandboxExecTimeoutError,
    SandboxGoneError,
    SandboxStartError,
)
from sandbox_kernel.sandbox.container import CODE_USER
from sandbox_kernel.sandbox.labels import PREFIX
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.order import Order
from sandbox_kernel.sandbox.owner import current_owner

__all__ = ["prepared"]

log = logging.getLogger(__name__)

_ROOT: Final = "0:0"
_LAST_LINES: Final = 20
_LONGEST_LINE: Final = 500
_REMOVE_TRIES: Final = 20
_REMOVE_POLL: Final = 0.25
_ENVIRONMENT: Final = {"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}

# The programs of root are not on the path of an image that is made for others.
_START: Final = 'PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" exec sh -eu -c "$1"'

SETUP_LABEL: Final = f"{PREFIX}setup"
"""Label of the images that are made here, by which one that a crash has left can be found."""

Hear = Callable[[str], None]


@contextlib.asynccontextmanager
async def prepared(
    order: Order,
    commands: Sequence[str],
    *,
    owner: str | None = None,
    timeout: float,
    hear: Hear = lambda line: None,
) -> AsyncIterator[Order]:
    """Give an order whose image has been set up; the image is removed at the end.

    Parameters
    ----------
    order
        The sandbox that is wanted. The setup has its image, limits and network.
    commands
        Command lines for ``sh -eu``, run one after the other as root.
    owner
        Whose it is; by default this process's user.
    timeout
        Seconds for all of them.
    hear
        Told each line that they write, in the engine's loop.

    Raises
    ------
    SandboxStartError
        A command failed; the text ends with the last lines that it wrote.
    SandboxExecTimeoutError
        They were not done in time.
    SandboxError
        As when the sandbox itself is made.
    """
    endpoint = order.endpoint()
    thread = EngineThread.current()
    owner = current_owner() if owner is None else owner

    async def make() -> str:
        engine = await thread.engine(endpoint)
        await ensure_image(engine, order.spec.image, order.pull_policy)
        return await _make(engine, order, commands, owner, timeout, hear)

    async def remove(image: str) -> None:
        await _remove(await thread.engine(endpoint), image)

    image = await thread.call(make, discard=remove)
    try:
        yield dataclasses.replace(order, spec=dataclasses.replace(order.spec, image=image))
    finally:
        await thread.call(remove, image)


async def _make(
    engine: Engine,
    order: Order,
    commands: Sequence[str],
    owner: str,
    timeout: float,
    hear: Hear,
) -> str:
    """Run the commands and return the image of what they left; runs in the engine's loop."""
    spec = dataclasses.replace(order.spec, durability="ephemeral", workspace=None)
    container = await LiveSandbox.for_setup(engine, spec, owner=owner, quota=order.quota)
    try:
        try:
            async with asyncio.timeout(timeout):
                for number, command in enumerate(commands, 1):
                    await _run(engine, container.id, command, number, hear)
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxExecTimeoutError(
                f"The setup was not done within {timeout:g} s. Nothing of it was kept"
            ) from error
        labels = {SETUP_LABEL: container.short_id}
        committing = asyncio.ensure_future(
            engine.commit_container(container.id, user=CODE_USER, labels=labels)
        )
        try:
            return await asyncio.shield(committing)
        except asyncio.CancelledError:
            # The engine makes it all the same, and nobody else knows its digest.
            with contextlib.suppress(SandboxError):
                await _remove(engine, await committing)
            raise
    finally:
        await container.destroy()


async def _run(engine: Engine, container: str, command: str, number: int, hear: Hear) -> None:
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    rest = ""
    stream = await engine.exec(
        container,
        ["sh", "-c", _START, "setup", command],
        user=_ROOT,
        env=_ENVIRONMENT,
        stdin=False,
    )
    async with stream:
        while (chunk := await stream.read()) is not None:
            *whole, rest = (rest + chunk.data.decode("utf-8", "replace")).split("\n")
            rest = rest[-_LONGEST_LINE:]
            for line in whole:
                lines.append(line[:_LONGEST_LINE])
                hear(line[:_LONGEST_LINE])
        state = await engine.inspect_exec(stream.id)
    if state.exit_code == 0:
        return
    if rest:
        lines.append(rest)
    said = "".join(f"\n  {line}" for line in lines)
    raise SandboxStartError(
        f"Setup step {number} ended with code {state.exit_code}; nothing was run"
        + (f". Its last lines:{said}" if said else "")
    )


async def _remove(engine: Engine, image: str) -> None:
    for attempt in range(_REMOVE_TRIES):
        try:
            await remove_image(engine, image)
        except SandboxConflictError:
            # The engine removes the containers of sandboxes by itself, a moment later.
            await asyncio.sleep(_REMOVE_POLL)
        except SandboxGoneError:
            return
        except SandboxError as error:
            log.warning("the image %s of a setup was not removed: %s", image[:19], error)
            return
        else:
            log.debug("the image of a setup was removed at attempt %d", attempt + 1)
            return
    log.warning("the image %s of a setup is still in use and stays", image[:19])
