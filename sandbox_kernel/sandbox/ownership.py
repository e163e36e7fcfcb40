"""Who owns a workspace: the code's uid has to be able to write to it (B6; TEN-10).

A new volume gets the owner that ``/workspace`` has in the image, and an image without that folder
gives one that root owns. Then, before any code has run, a container that can do nothing else
changes the owner of the volume's own folder, which has to be empty and root's. Nothing below it
is ever touched by root: once code has run there, what lies there may be a link to anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final

from sandbox_kernel.errors import SandboxError, SandboxStartError
from sandbox_kernel.sandbox import labels as names
from sandbox_kernel.sandbox.attest import attest
from sandbox_kernel.sandbox.container import CODE_USER, WORKSPACE
from sandbox_kernel.sandbox.lease import PlaceState
from sandbox_kernel.sandbox.plan import Plan

if TYPE_CHECKING:
    from sandbox_kernel.sandbox.running import RunningSandbox

log = logging.getLogger(__name__)

_UID: Final = int(CODE_USER.partition(":")[0])
_TIMEOUT: Final = 20.0
_GIVEN: Final = b"given\n"

# Prints "given" when it did. Neither a link in the folder's place nor one in it is followed.
_GIVE: Final = """
set -u
[ -d "$1" ] && [ ! -h "$1" ] && [ -O "$1" ] || exit 1
for entry in "$1"/* "$1"/.[!.]* "$1"/..?*; do
    if [ -e "$entry" ] || [ -h "$entry" ]; then exit 2; fi
done
chown -h "$2" "$1" && echo given
"""
_CAN_WRITE: Final = '[ -w "$1" ] && [ -x "$1" ]'


def can_write(place: PlaceState) -> bool | None:
    """Say from its owner and mode whether the code can write to the workspace.

    Returns
    -------
    bool or None
        `None` where that cannot be told from them.
    """
    if len(place.mode) < 10 or place.uid is None:
        return None
    owners, others = place.mode[1:4], place.mode[7:10]
    if place.uid == _UID:
        return owners[1:] in {"wx", "ws"}
    return others[1] == "w" and others[2] in "xt"


async def make_writable(sandbox: RunningSandbox, plan: Plan, place: PlaceState) -> None:
    """See to it that the code can write to the workspace; call it before any code has run.

    Parameters
    ----------
    sandbox, plan
        The sandbox, and what it was made from.
    place
        Owner and mode of the workspace as the lease told them.

    Raises
    ------
    SandboxStartError
        It cannot, with its owner, its mode and what to do.
    """
    able = can_write(place)
    if able is None:
        able = await _try(sandbox)
    if able:
        return
    if place.uid in {0, None} and await _give(sandbox, plan) and await _try(sandbox):
        log.info("sandbox %s: the workspace was given to uid %d", sandbox.short_id, _UID)
        return
    owner = "an unknown uid" if place.uid is None else f"uid {place.uid}"
    mode = f" with mode {place.mode}" if place.mode else ""
    if plan.spec.workspace is None:
        remedy = f"Build the image with a {WORKSPACE} that uid {_UID} owns"
    else:
        remedy = (
            f"If it may be changed, let root do it on the engine's machine (docker run --rm -v "
            f"{sandbox.volume}:/w busybox chown {_UID}:{_UID} /w), or use another key"
        )
    raise SandboxStartError(
        f"The code of a sandbox runs as uid {_UID} and cannot write to {WORKSPACE}, which belongs "
        f"to {owner}{mode}. {remedy}"
    )


async def _try(sandbox: RunningSandbox) -> bool:
    argv = ["sh", "-c", _CAN_WRITE, "sh", WORKSPACE]
    code, _ = await sandbox.run_quietly(argv, CODE_USER)
    return code == 0


async def _give(sandbox: RunningSandbox, plan: Plan) -> bool:
    """Run the container that changes the owner; say whether it did."""
    engine = plan.engine
    body = _body(sandbox, plan)
    created = await engine.create_container(f"{plan.spec.prefix}{secrets.token_hex(6)}", body)
    output = b""
    try:
        async with asyncio.timeout(_TIMEOUT):
            attest(body, await engine.inspect_container(created.id), created.warnings)
            async with await engine.attach_container(created.id) as stream:
                await engine.start_container(created.id)
                while (chunk := await stream.read()) is not None and len(output) < 4096:
                    output += chunk.data
    except TimeoutError as error:
        if isinstance(error, SandboxError):
            raise
        return False
    finally:
        await asyncio.shield(engine.remove_container(created.id))
    return output == _GIVEN


def _body(sandbox: RunningSandbox, plan: Plan) -> dict[str, Any]:
    """Return the request: a sandbox's, run by a root that can change owners and nothing else."""
    labels = {
        **dict.fromkeys(plan.labels, ""),
        **{n: t for n, t in plan.labels.items() if n not in names.CORE + names.OPTIONAL},
        names.VERSION: plan.labels[names.VERSION],
        # A killed creator leaves it behind; whoever reaps then knows when it was to be gone.
        names.LIFETIME: str(round(_TIMEOUT * 2)),
    }
    body = plan.body(labels)
    mount = {
        "Type": "volume",
        "Source": sandbox.volume,
        "Target": WORKSPACE,
        "ReadOnly": False,
        "VolumeOptions": {"NoCopy": True, "Labels": {}},
    }
    body.update(
        User="0:0",
        Cmd=["sh", "-c", _GIVE, "give", WORKSPACE, CODE_USER],
        StdinOnce=True,
    )
    body["HostConfig"] = {
        **body["HostConfig"],
        "CapAdd": ["CHOWN"],
        "Mounts": [mount],
        "NetworkMode": "none",
        "AutoRemove": False,
        "DeviceRequests": None,
    }
    return body
