"""Commands that the installed components contribute, loaded only when they are run.

A component names its commands in the entry-point group `dear_tune.commands.<extra>`, after the extra that brings its
libraries. An entry point is a function, as typer takes it, or a `typer.Typer`. Listing the commands imports none of
them: the help line is read from the source.
"""

from __future__ import annotations

import ast
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dear_tune.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ComponentCommand", "ComponentGroup"]

_GROUP_PREFIX = "dear_tune.commands."
_EXTRAS = ("service", "engine")
_OWN_PACKAGES = frozenset({"dear_tune", "dear_engine", "dear_service"})


class ComponentCommand(TyperCommand):
    """A command's name and help line, standing in until it is run.

    Args:
        entry_point: where the command is.
        extra: the extra that it needs.
    """

    def __init__(self, entry_point: EntryPoint, extra: str) -> None:
        super().__init__(entry_point.name, help=_help_line(entry_point) or f"Needs the extra '{extra}'.")
        self._entry_point = entry_point
        self._extra = extra

    def load(self) -> Any:
        """Import the command itself.

        Raises:
            MissingExtraError: a library is missing. One of dear-tune's own modules is a bug, and stays an ImportError.
        """
        try:
            found = self._entry_point.load()
        except ModuleNotFoundError as error:
            if _package(error.name or "") in _OWN_PACKAGES:
                raise
            raise MissingExtraError(f"`dear-tune {self.name}`", self._extra) from error
        return typer.main.get_command(found if isinstance(found, typer.Typer) else _app(found))


class ComponentGroup(TyperGroup):
    """A group of commands that the components' join."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for command in _contributed():
            self.add_command(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command that is to run, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, ComponentCommand) else command, rest


def _contributed() -> Iterator[ComponentCommand]:
    for extra in _EXTRAS:
        for entry_point in entry_points(group=_GROUP_PREFIX + extra):
            yield ComponentCommand(entry_point, extra)


def _app(function: Any) -> typer.Typer:
    app = typer.Typer()
    app.command()(function)
    return app


def _help_line(entry_point: EntryPoint) -> str | None:
    """The first line of the docstring of a command's function, or else of its module; None if there is no source."""
    source = _source(entry_point.module)
    if source is None:
        return None
    module = ast.parse(source.read_text(encoding="utf-8"))
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == entry_point.attr)
    text = ast.get_docstring(next(functions, module))
    return text.partition("\n")[0] if text else None


def _source(module: str) -> Path | None:
    """A module's file. Only its package is looked up, as looking up a module imports the packages above it."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        stem = Path(folder, *inner)
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return file
    return None


def _package(module: str) -> str:
    return module.partition(".")[0]
