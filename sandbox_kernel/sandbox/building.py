"""`build`: an image from somebody's own Dockerfile, by an engine that policy allows (E6)."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from sandbox_kernel.config import Door, load_policy_in_force
from sandbox_kernel.engine.images import ImageInfo, ProgressCallback, build_image
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.sandbox.order import Order, settle

__all__ = ["build", "settle_build"]


def settle_build(tag: str, *, door: Door) -> Order:
    """Have configuration and policy judge the building of an image.

    What a Dockerfile puts into an image nobody has allowed, under whatever name: where a policy
    lists the images that may be used, none can be built.

    Raises
    ------
    SandboxSpecRejectedError
        The policy does not allow it.
    """
    for document in load_policy_in_force().documents:
        if document.images is not None:
            _refuse(
                "image",
                tag,
                f"the policy in {document.source} lists the images that may be used, and one that "
                "is built here could hold anything",
                "Ask whoever administers the policy for the image.",
            )
    # The base image is pulled when it is not there.
    return settle({"image": tag, "pull_policy": "missing"}, door=door)


async def build(
    order: Order,
    context: Path | bytes,
    *,
    dockerfile: str = "Dockerfile",
    network: bool = False,
    pull: bool = False,
    no_cache: bool = False,
    progress: ProgressCallback | None = None,
) -> ImageInfo:
    """Build the image of an order; runs in any loop.

    Parameters
    ----------
    order
        From `settle_build`.
    context
        The folder to build from, or the text of a Dockerfile that needs none.
    dockerfile
        Its path within the folder.
    network
        Whether the commands of the build get the engine's default network, and else none.
    pull
        Whether to look for a newer base image.
    no_cache
        Whether to run every step again.
    progress
        Told, in the engine's loop, what the build says.

    Raises
    ------
    SandboxSpecRejectedError
        There is no such Dockerfile.
    SandboxBuildError
        A step failed; the text ends with the last lines of the output.
    """
    if isinstance(context, Path) and not (context / dockerfile).is_file():
        _refuse("dockerfile", dockerfile, f"there is no such file in {context.name!r}", "Name it.")
    endpoint = order.endpoint()
    thread = EngineThread.current()

    async def work() -> ImageInfo:
        return await build_image(
            await thread.engine(endpoint),
            context if isinstance(context, Path) else None,
            tag=order.spec.image,
            dockerfile=dockerfile,
            extra_files=None if isinstance(context, Path) else {dockerfile: context},
            network=None if network else "none",
            pull=pull,
            no_cache=no_cache,
            progress=progress,
        )

    return await thread.call(work)


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
