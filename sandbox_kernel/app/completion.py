"""``jupyter sandbox completion``: a script that completes commands in a shell."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from traitlets.utils.importstring import import_item

from sandbox_kernel.app.command import SandboxCommand

_SHELLS = ("bash", "zsh")
_FOR_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_PLACE = "# COMMANDS\n"

_EXAMPLES = """\
jupyter sandbox completion bash >> ~/.bashrc
jupyter sandbox completion zsh >> ~/.zshrc
source <(jupyter sandbox completion bash)
"""

_NO_OPTIONS: dict[Any, Any] = {}


class CompletionApp(SandboxCommand):
    """``jupyter sandbox completion``."""

    name = "jupyter-sandbox-completion"
    description = """Print a script that has a shell complete commands, options, sandboxes and
    workspaces, of jupyter sandbox and of jupyter-sandbox. Shells are bash and zsh."""
    examples = _EXAMPLES
    arguments = "SHELL"

    aliases = _NO_OPTIONS
    flags = _NO_OPTIONS
    works_without_config = True

    def take(self, words: list[str]) -> None:
        """Take the shell."""
        if len(words) != 1 or words[0] not in _SHELLS:
            self._usage(f"needs a shell: {' or '.join(_SHELLS)}")
        self._shell = words[0]

    def run(self) -> int:
        """Print the script."""
        script = files("sandbox_kernel.app").joinpath("completion.sh").read_text(encoding="utf-8")
        before, _, after = script.partition(_PLACE)
        print((_FOR_ZSH if self._shell == "zsh" else "") + before + _cases() + after, end="")
        return 0


def _cases() -> str:
    """Return the lines that say what can follow each command."""
    from sandbox_kernel.app.main import SandboxApp

    lines = []
    for path, command in _commands("", SandboxApp):
        words = [*_below(command), *_options(command)]
        kinds = _kinds(getattr(command, "arguments", ""))
        lines.append(f"    '{path}') words='{' '.join(words)}' kinds='{kinds}' ;;\n")
    return "".join(lines)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, (below, _) in _below(command).items():
        yield from _commands(f"{path} {name}".strip(), import_item(below))


def _below(command: Any) -> dict[str, Any]:
    # One without commands of its own has the trait instead.
    return command.subcommands if isinstance(command.subcommands, dict) else {}


def _options(command: Any) -> list[str]:
    keys = [name for names in (*command.aliases, *command.flags)
            for name in (names if isinstance(names, tuple) else (names,))]  # fmt: skip
    return [f"--{name}" for name in sorted({*keys, "help"}) if len(name) > 1]


def _kinds(arguments: str) -> str:
    """Return what the words of a command can be."""
    if arguments.startswith("SOURCE"):
        return "places"
    named = (("SANDBOX", "sandboxes"), ("KEY", "keys"), ("FILE", "files"), ("SHELL", "shells"))
    return " ".join(kind for word, kind in named if word in arguments)
