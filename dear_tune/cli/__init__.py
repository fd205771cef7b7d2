"""The `dear-tune` command."""

from dear_tune.cli.app import main

__all__ = ["main"]
