"""The page that says where each point of the descriptions went names only what there is."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
DESCRIPTIONS = ("tai42-sandbox-docker", "@pai/sandbox-docker", "pi-sandbox-docker")
FEATURE = re.compile(r"E[1-7]|B(1[0-6]|[1-9])|F[1-4]|C[1-5]|K[1-9]|A[1-4]")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row about a point."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "`tests/" in line]
    # A bar in code is none that divides cells; there is none.
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


@functools.cache
def named_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 100
    missing = [f"{path}::{name}" for path, name in named
               if not (ROOT / path).is_file() or name not in named_in(path)]  # fmt: skip
    assert missing == []
    assert PAGE.count("`tests/") == len(named), "a reference that is none"


def test_every_row_has_a_feature_an_answer_and_a_test() -> None:
    found = rows(PAGE)
    assert len(found) > 90
    for cells in found:
        assert len(cells) == 5, cells
        point, feature, answer, how, shown = cells
        assert point
        assert FEATURE.fullmatch(feature), cells
        assert answer in {"same", "otherwise", "refused"}, cells
        assert how or answer == "same", "what is otherwise has to be said"
        assert TEST.findall(shown), cells


def test_the_larger_image_has_the_tools_that_were_described() -> None:
    """E6: as the recipe says; what it makes of them is the business of the image's own tests."""
    recipe = (ROOT / "sandbox_kernel" / "images" / "python" / "Dockerfile").read_text("utf-8")
    larger = recipe.partition(" AS full-root")[2]
    words = set(larger.replace("\\", " ").replace(";", " ").split())
    tools = "bash coreutils git curl python3-pip nodejs npm build-essential jq ripgrep"
    assert set(tools.split()) <= words


def test_each_description_has_its_part_and_each_refusal_its_reason() -> None:
    """B3, B5, B14: among them those of which nobody may think that they are there."""
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert tuple(part.splitlines()[0] for part in parts) == DESCRIPTIONS
    refused = {cells[1] for part in parts for cells in rows(part) if cells[2] == "refused"}
    assert {"B3", "B5", "B11", "B14"} <= refused
