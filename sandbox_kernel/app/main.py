"""The command ``jupyter sandbox``: its subcommands, and nothing that is slow to import.

Each subcommand lives in a module of its own that is imported when it is called.
"""

from __future__ import annotations

from typing import Any

from traitlets.utils.importstring import import_item

from sandbox_kernel.app.group import CommandGroup

_COMMANDS = {
    "status": ("status.StatusApp", "Say whether sandboxes can run here, and what to do if not."),
    "build": ("build.BuildApp", "Build the image that sandboxes run from."),
    "install": ("install.InstallApp", "Install the kernel 'Python 3 (sandbox)' for Jupyter."),
    "firewall": ("firewall.FirewallApp", "Print and prove the rules for sandboxes' networks."),
    "ls": ("ls.LsApp", "List sandboxes."),
    "list": ("ls.LsApp", "The same as ls."),
    "run": ("run.RunApp", "Run a program in a fresh sandbox."),
    "exec": ("exec.ExecApp", "Run a program in a sandbox that runs already."),
    "attach": ("attach.AttachApp", "Open a console on a kernel that runs already."),
    "cp": ("cp.CpApp", "Copy files into and out of sandboxes and workspaces."),
    "logs": ("logs.LogsApp", "Tell what happened to a sandbox, and why it ended."),
    "pause": ("pause.PauseApp", "Freeze sandboxes with their memory."),
    "resume": ("pause.ResumeApp", "Let paused sandboxes go on."),
    "rm": ("rm.RmApp", "End and remove sandboxes."),
    "reap": ("reap.ReapApp", "Clear away what crashes have left."),
    "workspaces": ("workspaces.WorkspacesApp", "List, copy and remove persistent workspaces."),
    "completion": ("completion.CompletionApp", "Print the completion of commands for a shell."),
    "config": ("config.ConfigApp", "Show the settings that hold, and where they come from."),
    "quickstart": ("quickstart.QuickstartApp", "Build, install, and run a notebook in a sandbox."),
}


_SUBCOMMANDS: dict[str, Any] = {
    name: (f"sandbox_kernel.app.{path}", text) for name, (path, text) in _COMMANDS.items()
}


_EXAMPLES = """\
jupyter sandbox status                 # can sandboxes run here?
jupyter sandbox build                  # build the image
jupyter sandbox install                # add "Python 3 (sandbox)" to Jupyter
jupyter sandbox quickstart             # all of it, and a first notebook
jupyter sandbox run -it bash           # a shell in a fresh sandbox
jupyter sandbox ls                     # the sandboxes that are there
jupyter sandbox COMMAND --help         # options and examples of one command
"""


class SandboxApp(CommandGroup):
    """Entry of the command; the work is done by the subcommands."""

    name = "jupyter-sandbox"
    description = "Run notebook code in hardened containers on a Docker engine."
    examples = _EXAMPLES
    subcommands = _SUBCOMMANDS


def command_classes() -> tuple[str, ...]:
    """Return the names of the commands' classes, as configuration files may name them.

    Those of commands within commands are in modules that have to be imported for it.
    """
    found: list[str] = []
    paths: list[str] = [path for path, _ in _SUBCOMMANDS.values()]
    while paths:
        path = paths.pop(0)
        found.append(path.rpartition(".")[2])
        command = import_item(path)
        if issubclass(command, CommandGroup):
            paths += [below for below, _ in command.subcommands.values()]
    return tuple(found)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; ends the process with its exit code."""
    app = SandboxApp.instance()
    app.initialize(argv)
    app.start()
