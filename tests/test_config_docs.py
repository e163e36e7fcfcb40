"""The page on configuration names everything that there is, and its examples are understood."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.config import SETTINGS, VARIABLES, load_config_files, resolve
from sandbox_kernel.policy import Policy, PolicyDocument, parse_policy
from sandbox_kernel.policy.document import MEMORY_CAPS, NUMBER_CAPS

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / name).read_text() for name in ("docs/configuration.md", "README.md")}
SETTINGS_TABLE, POLICY_TABLE = PAGES["docs/configuration.md"].split("\n## Policy\n")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def row(table: str, key: str) -> str:
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    [found] = [line for line in rows if f"`{key}`" in line.split("|")[1]]
    return found


def test_every_setting_has_a_row() -> None:
    """K7: with its default; the environment group holds what the page says."""
    for name, setting in SETTINGS.items():
        line = row(SETTINGS_TABLE, name)
        assert ("never in the environment" in line) == (not setting.in_environment)
        assert setting.in_environment == (f"SANDBOX_DOCKER_{name.upper()}" in VARIABLES)
        if isinstance(setting.built_in, float):
            assert f"{setting.built_in:g}" in line
        elif isinstance(setting.built_in, str):
            assert f"`{setting.built_in}`" in line


def test_every_key_of_a_policy_has_a_row() -> None:
    """A1"""
    for key in set(PolicyDocument.__dataclass_fields__) - {"source", "binding"}:
        assert row(POLICY_TABLE, key)
    for cap in (*MEMORY_CAPS, *NUMBER_CAPS):
        assert f"`{cap}`" in row(POLICY_TABLE, "caps")


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_are_understood(name: str, tmp_path: Path) -> None:
    """K7, A1"""
    page = PAGES[name]
    python = [block for block in blocks(page, "python") if "c.Sandbox" in block]
    assert python
    for number, block in enumerate(python):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "jupyter_sandbox_config.py").write_text(block)
        found = resolve({}, environ={}, files=load_config_files([folder]), policy=Policy())
        assert found["mem_limit"] == 4 << 30
    policies = 0
    for block in blocks(page, "json"):
        content: dict[str, Any] = json.loads(block)
        if "SandboxDefaults" in content:
            (tmp_path / "jupyter_sandbox_config.json").write_text(block)
            load_config_files([tmp_path])
        else:
            policies += 1
            parse_policy(block, name)
    assert policies == 1
