"""What IPython is told of the magics: their names, and what completes their flags."""

from __future__ import annotations

from typing import Any

from sandbox_magics import options
from sandbox_magics.file_magics import FileMagics
from sandbox_magics.flags import Flags
from sandbox_magics.image_magics import ImageMagics
from sandbox_magics.magic import SandboxMagics

__all__ = ["register", "unregister"]

_COMPLETED = {
    "%%sandbox": options.CELL,
    "%sandbox_run": options.RUN,
    "%%sandbox_run": options.RUN,
    "%sandbox_kill": options.KILL,
    "%sandbox_status": options.STATUS,
    "%sandbox_logs": options.LOGS,
    "%sandbox_build": options.BUILD,
    "%%sandbox_build": options.BUILD,
    "%sandbox_get": options.GET,
    "%sandbox_put": options.PUT,
    "%sandbox_ls": options.LIST,
}


def register(shell: Any) -> None:
    """Register the magics with a shell; again, it changes nothing."""
    if _registered(shell) is not None:
        return
    main = SandboxMagics(shell)
    shell.register_magics(main, FileMagics(shell, main), ImageMagics(shell))
    for name, flags in _COMPLETED.items():
        shell.set_hook("complete_command", _completer(flags), str_key=name)


def unregister(shell: Any) -> None:
    """End what they started, and take them away."""
    magics = _registered(shell)
    if magics is None:
        return
    magics.close()
    manager = shell.magics_manager
    for name in ("SandboxMagics", "FileMagics", "ImageMagics"):
        registered = manager.registry.pop(name)
        for kind, methods in registered.magics.items():
            for method in methods:
                manager.magics[kind].pop(method, None)
        shell.configurables.remove(registered)


def _registered(shell: Any) -> SandboxMagics | None:
    magics: SandboxMagics | None = shell.magics_manager.registry.get("SandboxMagics")
    return magics


def _completer(flags: Flags) -> Any:
    def complete(shell: Any, event: Any) -> list[str]:
        words = event.text_until_cursor.split()
        partial = "" if event.text_until_cursor[-1:].isspace() else words.pop()
        return flags.completions(words[1:], partial)

    return complete
