"""``jupyter sandbox reap``: clear away what nobody will miss (B13)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from traitlets import Bool

from sandbox_kernel.app.command import ENGINE_FLAGS
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.sandboxes import SandboxesCommand
from sandbox_kernel.sandbox.reap import reap

_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("a", "all"): ({"ReapApp": {"everybody": True}}, "What all owners have left."),
    ("n", "dry-run"): ({"ReapApp": {"dry_run": True}}, "Only say what would be done."),
}

_EXAMPLES = """\
jupyter sandbox reap --dry-run
jupyter sandbox reap --all
"""


class ReapApp(SandboxesCommand):
    """``jupyter sandbox reap``."""

    name = "jupyter-sandbox-reap"
    description = """Remove sandboxes whose time is over and what crashes have left, and name each.
    Sandboxes in use and persistent workspaces are never touched. Most sandboxes end by
    themselves; run this now and then, for example daily from cron."""
    examples = _EXAMPLES

    flags = _FLAGS

    everybody = Bool(False, help="Clear away what all owners have left. Since 0.2.").tag(
        config=True
    )
    dry_run = Bool(False, help="Only say what would be done. Since 0.2.").tag(config=True)

    def run(self) -> int:
        """Do it."""
        owner, dry_run = None if self.everybody else self.whose(), self.dry_run
        found = self.at_engine(lambda engine: reap(engine, owner, dry_run=dry_run))
        ok = not any(thing.trouble for thing in found)
        if self.json_output:
            self.print_json({"ok": ok, "dry_run": dry_run, "found": [asdict(t) for t in found]})
            return 0 if ok else 1
        for thing in found:
            (self.err if thing.trouble else self.out).print(plain(str(thing)), markup=False)
        if not found:
            self.out.print("There is nothing to clear away.")
        return 0 if ok else 1
