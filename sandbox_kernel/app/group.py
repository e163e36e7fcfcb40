"""A command that only has subcommands, such as ``jupyter sandbox`` itself."""

from __future__ import annotations

import difflib
import sys
from typing import Any

from jupyter_core.application import JupyterApp

from sandbox_kernel import __version__

_NO_OPTIONS: dict[Any, Any] = {}


class CommandGroup(JupyterApp):
    """Base of commands that hand over to a subcommand."""

    version = __version__
    aliases = _NO_OPTIONS
    flags = _NO_OPTIONS

    def initialize(self, argv: Any = None) -> None:
        """Hand over to the subcommand."""
        self.parse_command_line(argv)

    def start(self) -> None:
        """Run the subcommand, or say which ones there are."""
        if self.subapp is not None:
            self.subapp.start()
            return
        unknown = " ".join(self.extra_args)
        if unknown:
            command = self.name.replace("-", " ")
            meant = difflib.get_close_matches(unknown, list(self.subcommands), n=2)
            hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
            print(f"{command}: there is no command {unknown!r}.{hint}", file=sys.stderr)
            print(f"Commands: {', '.join(self.subcommands)}.", file=sys.stderr)
            self.exit(2)
        self.print_help()
