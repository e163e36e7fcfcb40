"""Which workspace a kernel gets (K5).

The setting says how to come by a key: that of the notebook, of the person, or one with a name. The
owner is part of a workspace's name anyway, so that the keys here only have to keep apart what
belongs to one person. A name is a key as it stands, the same one as in Python and in the magics.
Those of notebooks begin with a word and a colon, so that one who means it can name them, too: the
workspace of a notebook that was renamed is found, cloned and removed under its former path.
"""

from __future__ import annotations

import os
from typing import Any

from sandbox_kernel.errors import SandboxSpecRejectedError

__all__ = ["EPHEMERAL", "NOTEBOOK", "USER", "workspace_of"]

EPHEMERAL = "ephemeral"
NOTEBOOK = "notebook"
USER = "user"


def workspace_of(setting: str, session: str) -> dict[str, Any]:
    """Return the fields of a spec that a kernel's workspace comes to.

    Parameters
    ----------
    setting
        ``ephemeral``, ``notebook``, ``user``, or a name.
    session
        ``JPY_SESSION_NAME``: the notebook's full path, as a Jupyter server tells it.

    Raises
    ------
    SandboxSpecRejectedError
        The notebook's workspace is wanted, and which notebook it is cannot be known.
    """
    if setting == EPHEMERAL:
        return {}
    if setting == NOTEBOOK:
        if not session:
            raise SandboxSpecRejectedError(
                "workspace",
                setting,
                "whoever starts this kernel does not say for which notebook (JPY_SESSION_NAME), so "
                "that what it keeps would not be found again",
                "Use 'ephemeral', 'user' or a name here, or start it from a Jupyter server.",
            )
        key = f"{NOTEBOOK}:{os.path.normpath(session)}"
    else:
        key = f"{USER}:" if setting == USER else setting
    return {"durability": "persistent", "workspace": key}
