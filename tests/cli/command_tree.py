"""All commands of `pdx`."""

from __future__ import annotations

import click

from pdx.cli.main import main


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        found += [(*path, name)] if not isinstance(command, click.Group) else commands(command, (*path, name))
    return found
