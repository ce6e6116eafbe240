"""The `pdx` command."""
