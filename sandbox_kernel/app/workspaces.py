"""``jupyter sandbox workspaces``: the persistent workspaces of an owner (B6, F4)."""

from __future__ import annotations

import sys
from typing import Any

from traitlets import Bool, Unicode

from sandbox_kernel.amounts import memory_text
from sandbox_kernel.app.command import ENGINE_FLAGS, error_record
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.group import CommandGroup
from sandbox_kernel.app.sandboxes import OWNER_ALIASES, SandboxesCommand
from sandbox_kernel.app.table import table_lines
from sandbox_kernel.errors import SandboxConflictError, SandboxError
from sandbox_kernel.sandbox.blocking import BlockingWorkspaces
from sandbox_kernel.sandbox.workspaces import WorkspaceInfo, WorkspaceSize

_MODULE = "sandbox_kernel.app.workspaces"

_COMMANDS: dict[str, Any] = {
    "ls": (f"{_MODULE}.WorkspacesLsApp", "List workspaces, and who uses them."),
    "size": (f"{_MODULE}.WorkspacesSizeApp", "Measure workspaces."),
    "export": (f"{_MODULE}.WorkspacesExportApp", "Write a workspace to a tar file."),
    "import": (f"{_MODULE}.WorkspacesImportApp", "Fill a new workspace from a tar file."),
    "clone": (f"{_MODULE}.WorkspacesCloneApp", "Copy a workspace to a new one."),
    "rm": (f"{_MODULE}.WorkspacesRmApp", "Remove workspaces with all that is in them."),
}

_LS_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("q", "quiet"): ({"WorkspacesLsApp": {"quiet": True}}, "Print keys only."),
}

_EXPORT_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("f", "force"): ({"WorkspacesExportApp": {"force": True}}, "Replace a file that is there."),
}

_IMPORT_ALIASES: dict[Any, Any] = {
    **OWNER_ALIASES,
    "image": ("WorkspacesImportApp.image", "Image of the new workspace."),
}

_RM_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("y", "yes"): ({"WorkspacesRmApp": {"yes": True}}, "Do not ask."),
}

_EXAMPLES = """\
jupyter sandbox workspaces ls
jupyter sandbox workspaces size thesis
jupyter sandbox workspaces export thesis thesis.tar
jupyter sandbox workspaces import "thesis again" thesis.tar
jupyter sandbox workspaces clone thesis "thesis, second try"
jupyter sandbox workspaces rm "thesis, second try"
"""


class WorkspacesApp(CommandGroup):
    """``jupyter sandbox workspaces``."""

    name = "jupyter-sandbox-workspaces"
    description = """Look after persistent workspaces: the folders /workspace that outlive their
    sandboxes. Each has a key, which is any text."""
    examples = _EXAMPLES
    subcommands = _COMMANDS


class _WorkspacesCommand(SandboxesCommand):
    """Base of the commands within."""

    examples = _EXAMPLES
    flags: dict[Any, Any] = ENGINE_FLAGS

    words: tuple[str, ...] = ()
    """What each word is, in order."""

    def take(self, words: list[str]) -> None:
        """Take the words."""
        if len(words) != len(self.words):
            self._usage(f"needs {' and '.join(self.words) or 'no argument'} (see --help)")
        self._words = words

    def workspaces(self) -> BlockingWorkspaces:
        """Return the workspaces of the owner."""
        return BlockingWorkspaces(engine=self.engine_settings(), owner=self.whose())

    def tell_size(self, key: str, size: WorkspaceSize) -> None:
        """Say how large a workspace is."""
        if self.json_output:
            self.print_json({"ok": True, "key": key, "bytes": size.size, "entries": size.entries})
        else:
            self.out.print(
                plain(f"{key}: {memory_text(size.size)} in {size.entries} entries"), markup=False
            )


class WorkspacesLsApp(_WorkspacesCommand):
    """``jupyter sandbox workspaces ls``."""

    name = "jupyter-sandbox-workspaces-ls"
    description = "List your workspaces by key, and the sandboxes that use them."
    flags = _LS_FLAGS

    quiet = Bool(False, help="Print keys only. Since 0.2.").tag(config=True)

    def run(self) -> int:
        """List them."""
        found = self.workspaces().list()
        if self.json_output:
            self.print_json({"ok": True, "workspaces": [_record(info) for info in found]})
        elif self.quiet:
            for info in found:
                print(plain(info.workspace.key))
        else:
            rows = [
                (
                    info.workspace.key,
                    info.workspace.created[:19].replace("T", " "),
                    info.workspace.image,
                    ", ".join(f"{user.name} ({user.state})" for user in info.users),
                )
                for info in found
            ]
            for line in table_lines(("KEY", "CREATED", "IMAGE", "USED BY"), rows):
                self.out.print(line, markup=False)
        return 0


class WorkspacesSizeApp(_WorkspacesCommand):
    """``jupyter sandbox workspaces size``."""

    name = "jupyter-sandbox-workspaces-size"
    description = "Measure a workspace; also while it is in use."
    arguments = "KEY"
    words = ("a key",)

    def run(self) -> int:
        """Measure it."""
        [key] = self._words
        self.tell_size(key, self.workspaces().size(key))
        return 0


class WorkspacesExportApp(_WorkspacesCommand):
    """``jupyter sandbox workspaces export``."""

    name = "jupyter-sandbox-workspaces-export"
    description = """Write a workspace to a tar file of this machine, whole or not at all. The
    archive is as hostile as the code that made the files: unpack it in a sandbox, or with care."""
    arguments = "KEY FILE"
    words = ("a key", "a file")
    flags = _EXPORT_FLAGS

    force = Bool(False, help="Replace a file that is there. Since 0.2.").tag(config=True)

    def run(self) -> int:
        """Write it."""
        key, file = self._words
        size = self.workspaces().export(key, file, overwrite=self.force)
        if self.json_output:
            self.print_json({"ok": True, "key": key, "file": file, "bytes": size})
        else:
            self.out.print(f"{file}: {memory_text(size)}", markup=False)
        return 0

    def fail(self, error: SandboxError) -> int:
        """Show an error, and what helps when the file is there."""
        code = super().fail(error)
        if isinstance(error, SandboxConflictError) and not (self.force or self.json_output):
            self.err.print("What is there is replaced with --force.")
        return code


class WorkspacesImportApp(_WorkspacesCommand):
    """``jupyter sandbox workspaces import``."""

    name = "jupyter-sandbox-workspaces-import"
    description = """Fill a new workspace, or one with nothing in it, from a tar file that is not
    compressed. It is unpacked in a sandbox."""
    arguments = "KEY FILE"
    words = ("a key", "a file")
    aliases = _IMPORT_ALIASES

    image = Unicode("", help="Image of the new workspace. Since 0.2.").tag(config=True)

    def run(self) -> int:
        """Fill it."""
        key, file = self._words
        image = self.image or self.settle({}).spec.image
        self.tell_size(key, self.workspaces().import_(key, file, image=image))
        return 0


class WorkspacesCloneApp(_WorkspacesCommand):
    """``jupyter sandbox workspaces clone``."""

    name = "jupyter-sandbox-workspaces-clone"
    description = "Copy a workspace, which may be in use, to a new one."
    arguments = "KEY NEW-KEY"
    words = ("a key", "a key for the copy")

    def run(self) -> int:
        """Copy it."""
        key, to = self._words
        self.tell_size(to, self.workspaces().clone(key, to))
        return 0


class WorkspacesRmApp(_WorkspacesCommand):
    """``jupyter sandbox workspaces rm``."""

    name = "jupyter-sandbox-workspaces-rm"
    description = """Remove workspaces with all that is in them. You are asked before; -y says yes,
    and has to where nobody can be asked. One that is in use is never removed."""
    arguments = "KEY…"
    flags = _RM_FLAGS

    yes = Bool(False, help="Do not ask. Since 0.2.").tag(config=True)

    def take(self, words: list[str]) -> None:
        """Take the keys."""
        if not words:
            self._usage("needs the key of a workspace (see --help)")
        if not self.yes and not (sys.stdin and sys.stdin.isatty()):
            self._usage("removes only with -y where nobody can be asked")
        self._words = words

    def run(self) -> int:
        """Remove them."""
        workspaces = self.workspaces()
        removed: list[str] = []
        failed: list[dict[str, object]] = []
        for key in self._words:
            try:
                workspaces.find(key)
                if not self.yes and not self._agreed(key):
                    continue
                workspaces.remove(key)
            except SandboxError as error:
                failed.append({"key": key, **error_record(error)})
                if not self.json_output:
                    self.fail(error)
                continue
            removed.append(key)
            if not self.json_output:
                self.out.print(plain(key), markup=False)
        if self.json_output:
            self.print_json({"ok": not failed, "removed": removed, "errors": failed})
        return 1 if failed else 0

    def _agreed(self, key: str) -> bool:
        question = f"Remove the workspace {key!r} with all that is in it? [y/N] "
        print(question, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _record(info: WorkspaceInfo) -> dict[str, object]:
    workspace = info.workspace
    return {
        "key": workspace.key,
        "volume": workspace.name,
        "owner": workspace.owner,
        "created": workspace.created,
        "image": workspace.image,
        "users": [
            {"id": u.container_id, "name": u.name, "owner": u.owner, "state": u.state}
            for u in info.users
        ],
    }
