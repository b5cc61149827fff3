"""Each item of docs/security.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/security.md").read_text()
ITEMS = re.findall(r"^- .*?(?=^- |^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_each_item_names_its_test_or_says_that_there_is_none() -> None:
    assert len(ITEMS) > 20
    assert not [item for item in ITEMS if "::test_" not in item and "(No test: " not in item]


def test_the_tests_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT))
    assert named
    assert not [(path, name) for path, name in named if name not in names_in(ROOT / path)]
