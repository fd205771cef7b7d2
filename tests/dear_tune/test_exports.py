"""Every module says what it offers: `__all__` is complete, sorted and true."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

PACKAGES = ("dear_tune", "dear_engine", "dear_service")


def modules() -> list[str]:
    """All public modules of the three packages."""
    names = list(PACKAGES)
    for package in PACKAGES:
        found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        names += [module.name for module in found if not any(part.startswith("_") for part in module.name.split("."))]
    return names


def kind_and_name(name: str) -> tuple[int, str]:
    """The order of a sorted `__all__`: constants, classes, then the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def is_route(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a function is reached through a router (`@router.get(...)`), and not by its name."""
    return any(ast.unparse(decorator).startswith("router.") for decorator in node.decorator_list)


@pytest.mark.parametrize("name", modules())
def test_all_is_complete_sorted_and_true(name: str) -> None:
    """Every public function and class is listed, in order, and everything listed exists."""
    module = importlib.import_module(name)
    assert module.__file__
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    defined = (node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    public = {node.name for node in defined if not node.name.startswith("_") and not is_route(node)}
    exported = list(getattr(module, "__all__", []))
    assert public - set(exported) == set()
    assert [each for each in exported if not hasattr(module, each)] == []
    assert exported == sorted(exported, key=kind_and_name)
