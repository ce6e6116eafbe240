"""A click group whose subcommands are imported when they are needed, so that `pdx node` does not load the proxy."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

import click


class LazyGroup(click.Group):
    """Its commands by name, each as `module:attribute`, in the order in which `--help` lists them."""

    where: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.where)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.where:
            return None
        module, _, name = self.where[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command
