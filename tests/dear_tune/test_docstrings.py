"""The tests themselves: each says which fact it holds."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_states_its_fact() -> None:
    """Every test function has a docstring."""
    silent = [
        f"{file.relative_to(TESTS)}: {node.name}"
        for file in TESTS.rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []
