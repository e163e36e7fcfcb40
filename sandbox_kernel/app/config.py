"""``jupyter sandbox config``: the settings that hold, and where they come from (K7, A1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sandbox_kernel.amounts import memory_text
from sandbox_kernel.app.command import ENGINE_FLAGS, SandboxCommand
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.group import CommandGroup
from sandbox_kernel.config import (
    CONFIG_NAME,
    SETTINGS,
    Effective,
    Survey,
    config_folders,
    policy_folders,
    survey,
)
from sandbox_kernel.policy import POLICY_NAME, Policy, statements

_HIDDEN = "********"
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@]*@")

_COMMANDS: dict[str, Any] = {
    "show": (
        "sandbox_kernel.app.config.ConfigShowApp",
        "Show every setting, its value and where that comes from.",
    ),
    "path": (
        "sandbox_kernel.app.config.ConfigPathApp",
        "Show where configuration and policy files are looked for.",
    ),
}

_FLAGS: dict[Any, Any] = {name: ENGINE_FLAGS[name] for name in ("json", "debug")}
_NO_ALIASES: dict[Any, Any] = {}


class ConfigApp(CommandGroup):
    """``jupyter sandbox config``."""

    name = "jupyter-sandbox-config"
    description = """Show the settings that hold for sandboxes: built-in defaults, the environment
    group SANDBOX_DOCKER_*, configuration files, and the policy above them."""
    examples = """\
jupyter sandbox config show
jupyter sandbox config show --json | jq '.settings.mem_limit'
jupyter sandbox config path
"""
    subcommands = _COMMANDS


class ConfigShowApp(SandboxCommand):
    """``jupyter sandbox config show``."""

    name = "jupyter-sandbox-config-show"
    description = """Show every setting with the value that holds when neither a kernelspec nor a
    caller says otherwise, and where it comes from; then what the policy says. Secrets are
    masked. The exit code is 1 when the policy refuses these settings."""
    examples = ConfigApp.examples

    aliases = _NO_ALIASES
    flags = _FLAGS

    def run(self) -> int:
        """Show it."""
        found = survey()
        if self.json_output:
            self.print_json(_record(found))
        else:
            self._show(found)
        return 1 if found.refusals else 0

    def _show(self, found: Survey) -> None:
        rows = [
            (name, _text(name, effective), str(effective.origin))
            for name, effective in found.settings.items()
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for name, value, origin in rows:
            line = f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}"
            self.out.print(plain(line), markup=False)
        self.out.print()
        for file in found.files:
            self.out.print(f"read {file.path}", markup=False)
        for line in policy_lines(found.policy):
            self.out.print(plain(line), markup=False)
        for refusal in found.refusals:
            self.err.print("[bold red]Refused:[/]", end=" ")
            self.err.print(plain(str(refusal)), markup=False)


class ConfigPathApp(SandboxCommand):
    """``jupyter sandbox config path``."""

    name = "jupyter-sandbox-config-path"
    description = """Show the folders in which configuration files are looked for, the one that
    wins last, and those of policy files, all of which count; with the files that are there."""
    examples = ConfigApp.examples

    aliases = _NO_ALIASES
    flags = _FLAGS
    works_without_config = True

    def run(self) -> int:
        """Show it."""
        config = {str(folder): _config_files(folder) for folder in config_folders()}
        policy = {
            str(folder): [POLICY_NAME] if (folder / POLICY_NAME).exists() else []
            for folder in policy_folders()
        }
        if self.json_output:
            self.print_json({"ok": True, "config": config, "policy": policy})
            return 0
        for title, folders in (("Configuration", config), ("Policy", policy)):
            self.out.print(f"{title}:")
            for folder, names in folders.items():
                self.out.print(f"  {folder}", markup=False)
                for name in names:
                    self.out.print(f"    {name}", markup=False)
        return 0


def policy_lines(policy: Policy) -> list[str]:
    """Say in lines what a policy says."""
    if not policy.documents:
        return [f"no policy ({POLICY_NAME}) is in force"]
    lines = []
    said = statements(policy)
    for document in policy.documents:
        force = "" if document.binding else " (self-restraint: its owner can change it)"
        lines.append(f"policy {document.source}{force}")
        lines += [f"  {s.key}: {s.text}" for s in said if s.said_by == document.source]
    return lines


def shown_value(name: str, value: Any) -> Any:
    """Return a value as it may be shown."""
    if SETTINGS[name].is_secret and isinstance(value, Mapping):
        return dict.fromkeys(value, _HIDDEN)
    return _USER_IN_ADDRESS.sub(f"{_HIDDEN}@", value) if isinstance(value, str) else value


def _text(name: str, effective: Effective) -> str:
    value = shown_value(name, effective.value)
    if value is None or value in ({}, []):
        return "-"
    if SETTINGS[name].is_memory or name == "max_message_bytes":
        return memory_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return " ".join(f"{variable}={hidden}" for variable, hidden in value.items())
    return " ".join(value) if isinstance(value, list) else str(value)


def _record(found: Survey) -> dict[str, object]:
    return {
        "ok": not found.refusals,
        "settings": {
            name: {
                "value": shown_value(name, effective.value),
                "origin": effective.origin.kind,
                "where": effective.origin.where,
            }
            for name, effective in found.settings.items()
        },
        "files": [str(file.path) for file in found.files],
        "policy": [
            {
                "file": document.source,
                "binding": document.binding,
                "says": {
                    s.key: s.text for s in statements(found.policy) if s.said_by == document.source
                },
            }
            for document in found.policy.documents
        ],
        "refusals": [str(refusal) for refusal in found.refusals],
    }


def _config_files(folder: Any) -> list[str]:
    drop_ins = sorted((folder / f"{CONFIG_NAME}.d").glob("*.json"))
    main = [folder / f"{CONFIG_NAME}.py", folder / f"{CONFIG_NAME}.json"]
    return [str(path.relative_to(folder)) for path in (*drop_ins, *main) if path.exists()]
