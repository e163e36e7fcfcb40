"""The command ``jupyter sandbox``: its subcommands, and nothing that is slow to import.

Each subcommand lives in a module of its own that is imported when it is called.
"""

from __future__ import annotations

import sys
from typing import Any

from jupyter_core.application import JupyterApp

from sandbox_kernel import __version__

_COMMANDS = {
    "status": ("status.StatusApp", "Say whether sandboxes can run here, and what to do if not."),
    "build": ("build.BuildApp", "Build the image that sandboxes run from."),
    "install": ("install.InstallApp", "Install the kernel 'Python 3 (sandbox)' for Jupyter."),
    "quickstart": ("quickstart.QuickstartApp", "Build, install, and run a notebook in a sandbox."),
}


_NO_OPTIONS: dict[Any, Any] = {}
_SUBCOMMANDS: dict[str, Any] = {
    name: (f"sandbox_kernel.app.{path}", text) for name, (path, text) in _COMMANDS.items()
}


_EXAMPLES = """\
jupyter sandbox status                 # can sandboxes run here?
jupyter sandbox build                  # build the image
jupyter sandbox install                # add "Python 3 (sandbox)" to Jupyter
jupyter sandbox quickstart             # all of it, and a first notebook
jupyter sandbox COMMAND --help         # options and examples of one command
"""


class SandboxApp(JupyterApp):
    """Entry of the command; the work is done by the subcommands."""

    name = "jupyter-sandbox"
    version = __version__
    description = "Run notebook code in hardened containers on a Docker engine."
    examples = _EXAMPLES

    aliases = _NO_OPTIONS
    flags = _NO_OPTIONS
    subcommands = _SUBCOMMANDS

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
            print(f"jupyter sandbox: there is no command {unknown!r}.", file=sys.stderr)
            print(f"Commands: {', '.join(_COMMANDS)}.", file=sys.stderr)
            self.exit(2)
        self.print_help()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; ends the process with its exit code."""
    app = SandboxApp.instance()
    app.initialize(argv)
    app.start()
