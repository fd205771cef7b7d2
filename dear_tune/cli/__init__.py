"""The `dear-tune` command."""
