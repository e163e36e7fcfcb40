"""``jupyter sandbox status``: can sandboxes run here, and what to do if not (feature E7)."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import entry_points
from typing import Any

from traitlets import Unicode

from sandbox_kernel import __version__
from sandbox_kernel.app.checks import (
    Check,
    config_check,
    engine_checks,
    image_check,
    policy_check,
    sandbox_check,
)
from sandbox_kernel.app.command import ENGINE_ALIASES, ENGINE_FLAGS, SandboxCommand
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.firewall import network_checks
from sandbox_kernel.config import load_config_files, load_policy_in_force
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import DEFAULT_IMAGE, image_present
from sandbox_kernel.engine.probe import ProbeReport, probe
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxError
from sandbox_kernel.kernel.kernelspec import PROVISIONER, installed_specs
from sandbox_kernel.sandbox.order import Order

_MARKS = {
    "ok": "[green]✓[/]",
    "note": "[blue]·[/]",
    "warning": "[yellow]![/]",
    "problem": "[bold red]✗[/]",
}


_ALIASES: dict[Any, Any] = {
    **ENGINE_ALIASES,
    "image": (
        "StatusApp.image",
        f"Image to look for (default: the configured one, else {DEFAULT_IMAGE}).",
    ),
}


_EXAMPLES = """\
jupyter sandbox status
jupyter sandbox status --engine tcp://engine.example.org:2376
jupyter sandbox status --json | jq '.checks[] | select(.level == "problem")'
"""


class StatusApp(SandboxCommand):
    """``jupyter sandbox status``."""

    name = "jupyter-sandbox-status"
    description = """Say whether sandboxes can run here: configuration and policy in force, the
    engine and why this one was taken, its versions and security options, the image, the kernel
    in Jupyter. Each problem comes with
    what to do. The exit code is 0 when sandboxes can run and 1 when not."""
    examples = _EXAMPLES

    aliases = _ALIASES
    flags = ENGINE_FLAGS

    works_without_config = True

    image = Unicode("", help="Image to look for; the configured one by default. Since 0.1.").tag(
        config=True
    )

    def run(self) -> int:
        """Look at everything, and show it."""
        endpoint, report, checks = self._look()
        ok = all(check.level != "problem" for check in checks)
        if self.json_output:
            self.print_json(
                {
                    "ok": ok,
                    "version": __version__,
                    "endpoint": endpoint and {"url": endpoint.url, "source": endpoint.source},
                    "engine": report and _report_record(report),
                    "checks": [asdict(check) for check in checks],
                }
            )
        else:
            self._show(checks, ok)
        return 0 if ok else 1

    def _look(self) -> tuple[Endpoint | None, ProbeReport | None, list[Check]]:
        endpoint: Endpoint | None = None
        report: ProbeReport | None = None
        checks: list[Check] = []
        order = self._settled(checks)
        try:
            endpoint = self.endpoint()
            checks.append(Check("endpoint", "ok", f"{endpoint.url}, from {endpoint.source}"))
            report = EngineThread.current().run(probe, endpoint)
            checks += EngineThread.current().run(_inspect, report, self.image, order)
        except SandboxError as error:
            checks.append(_problem("engine", error))
        checks.append(_kernel_check())
        return endpoint, report, checks

    def _settled(self, checks: list[Check]) -> Order | None:
        """Look at configuration and policy; return what a kernel would get by default."""
        try:
            if self.config_error is not None:
                raise self.config_error
            checks.append(config_check(load_config_files()))
        except SandboxError as error:
            checks.append(_problem("configuration", error))
        try:
            checks.append(policy_check(load_policy_in_force()))
        except SandboxError as error:
            checks.append(_problem("policy", error))
        if any(check.level == "problem" for check in checks):
            return None
        try:
            return self.settle({"image": self.image or None}, door="kernel")
        except SandboxError as error:
            checks.append(_problem("settings", error))
            return None

    def _show(self, checks: list[Check], ok: bool) -> None:
        width = max(len(check.name) for check in checks)
        for check in checks:
            self.out.print(f"{_MARKS[check.level]} {check.name:<{width}}", end="  ")
            self.out.print(plain(check.text), markup=False)
            if check.remedy:
                self.out.print(f"  {'':<{width}}  → {plain(check.remedy)}", markup=False)
        problems = sum(check.level == "problem" for check in checks)
        self.out.print()
        if ok:
            self.out.print("Sandboxes can run here.")
        else:
            self.out.print(f"{problems} problem{'s' if problems > 1 else ''}: see → above.")


async def _inspect(report: ProbeReport, image: str, order: Order | None) -> list[Check]:
    engine = await EngineThread.current().engine(report.endpoint)
    checks = engine_checks(report, await engine.version())
    if order is not None:
        checks.append(sandbox_check(await engine.info(), order.spec))
        checks += await network_checks(engine, order.spec)
    ref = image or (DEFAULT_IMAGE if order is None else order.spec.image)
    return [*checks, image_check(ref, await image_present(engine, ref), __version__)]


def _problem(name: str, error: SandboxError) -> Check:
    remedy = str(getattr(error, "remedy", ""))
    text = str(error).removesuffix(remedy).rstrip(" .") if remedy else str(error)
    return Check(name, "problem", text, remedy)


def _kernel_check() -> Check:
    if not entry_points(group="jupyter_client.kernel_provisioners", name=PROVISIONER):
        return Check(
            "kernel",
            "problem",
            "Jupyter in this environment does not know the provisioner",
            "Install sandbox-kernel into the environment that Jupyter runs in: "
            "pip install sandbox-kernel",
        )
    specs = installed_specs()
    if not specs:
        return Check(
            "kernel",
            "problem",
            "no kernel of Jupyter uses sandboxes",
            "Run: jupyter sandbox install",
        )
    shown = ", ".join(f"{spec.display_name!r} ({spec.name}) in {spec.folder}" for spec in specs)
    return Check("kernel", "ok", shown)


def _report_record(report: ProbeReport) -> dict[str, Any]:
    record = asdict(report)
    del record["endpoint"]
    return record
