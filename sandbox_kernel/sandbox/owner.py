"""Whose a sandbox is, when nobody says (label ``owner``; A2)."""

from __future__ import annotations

import getpass
import os


def current_owner() -> str:
    """Return the hub's word where there is a hub, else the user of this process."""
    hub = os.environ.get("JUPYTERHUB_USER")
    if hub:
        return hub
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"
