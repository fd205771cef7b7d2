"""The root of the `dear-tune` command, and how it ends.

Exit codes: 0 done, 1 failed, 2 wrong usage or a missing extra, 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from dear_tune.cli.components import ComponentGroup
from dear_tune.cli.studies import show, studies, trials
from dear_tune.errors import DearTuneError, MissingExtraError

__all__ = ["create_app", "main"]


def main() -> None:
    """Run the command line; the console script's entry point."""
    try:
        create_app()()
    except DearTuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, MissingExtraError) else 1)


def create_app() -> typer.Typer:
    """The command with its base commands; the installed components' join them by entry points."""
    app = typer.Typer(
        name="dear-tune",
        cls=ComponentGroup,
        callback=_root,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # an error that is not ours is a bug, and its plain traceback says where
    )
    for command in (studies, trials, show):
        app.command()(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dear-tune {version('dear-tune')}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tune the gradient fusion of PyTorch data-parallel training, live."""
