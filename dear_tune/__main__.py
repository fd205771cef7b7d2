"""`python -m dear_tune` is `dear-tune`."""

from dear_tune.cli import main

__all__: list[str] = []

main()
