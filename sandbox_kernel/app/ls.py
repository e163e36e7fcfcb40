"""``jupyter sandbox ls``: which sandboxes there are (B9)."""

from __future__ import annotations

from typing import Any

from traitlets import Bool

from sandbox_kernel.app.command import ENGINE_FLAGS
from sandbox_kernel.app.sandboxes import SandboxesCommand
from sandbox_kernel.app.table import now, span, table_lines
from sandbox_kernel.sandbox.found import SandboxInfo, list_sandboxes

_TITLES = ("ID", "NAME", "STATE", "AGE", "EXPIRES", "NETWORK", "IMAGE", "WORKSPACE", "KERNEL")

_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    ("a", "all"): ({"LsApp": {"everybody": True}}, "Those of all owners."),
    ("q", "quiet"): ({"LsApp": {"quiet": True}}, "Print ids only."),
}

_EXAMPLES = """\
jupyter sandbox ls
jupyter sandbox ls --all                # of all owners; "jupyter sandbox list" is the same
jupyter sandbox ls --json
jupyter sandbox rm $(jupyter sandbox ls -q)
"""


class LsApp(SandboxesCommand):
    """``jupyter sandbox ls``."""

    name = "jupyter-sandbox-ls"
    description = """List the sandboxes that are on the engine, the oldest first: your own, or
    those of everybody. EXPIRES is the end of the lifetime; how long one may be without use is
    for itself to know."""
    examples = _EXAMPLES

    flags = _FLAGS

    everybody = Bool(False, help="List those of all owners. Since 0.2.").tag(config=True)
    quiet = Bool(False, help="Print ids only. Since 0.2.").tag(config=True)

    def run(self) -> int:
        """List them."""
        owner = None if self.everybody else self.whose()
        found = self.at_engine(lambda engine: list_sandboxes(engine, owner))
        if self.json_output:
            self.print_json({"ok": True, "sandboxes": [sandbox_record(info) for info in found]})
        elif self.quiet:
            for info in found:
                print(info.short_id)
        else:
            titles = (*_TITLES, "OWNER") if self.everybody else _TITLES
            for line in table_lines(titles, [self._row(info) for info in found]):
                self.out.print(line, markup=False)
        return 0

    def _row(self, info: SandboxInfo) -> list[str]:
        cells = [
            info.short_id,
            info.name,
            info.state,
            span(now() - info.created),
            "never" if info.ends is None else f"in {span(info.ends - now())}",
            info.network,
            info.image,
            info.workspace or "",
            info.kernel,
        ]
        return [*cells, info.owner] if self.everybody else cells


def sandbox_record(info: SandboxInfo) -> dict[str, object]:
    """Describe a sandbox for programs."""
    return {
        "id": info.id,
        "name": info.name,
        "owner": info.owner,
        "state": info.state,
        "image": info.image,
        "network": info.network,
        "durability": info.durability,
        "workspace": info.workspace,
        "kernel": info.kernel or None,
        "created": info.created.isoformat(),
        "ends": info.ends and info.ends.isoformat(),
        "labels": dict(info.labels),
    }
