"""The `pdx` command: finds the subcommand, and turns every `PdxError` into one line and exit status 1."""

from __future__ import annotations

import click

from pdx.cli.lazy_group import LazyGroup
from pdx.errors import PdxError

COMMANDS = {
    "up": "pdx.cli.up:up",
    "serve": "pdx.cli.serve:serve",
    "node": "pdx.cli.node:node",
    "proxy": "pdx.cli.proxy:proxy",
    "keygen": "pdx.cli.keygen:keygen",
    "doctor": "pdx.cli.doctor:doctor",
    "bench": "pdx.cli.bench:bench",
    "plan": "pdx.cli.plan:plan",
}


class Commands(LazyGroup):
    """The subcommands of `pdx`."""

    where = COMMANDS

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PdxError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands)
@click.version_option(package_name="pdx-transport", prog_name="pdx")
def main() -> None:
    """PDX moves the KV cache of LLM engines: from prefill to decode, and from engines to memory for reuse.

    \b
    The quickest start:  pdx up MODEL
    Part by part:        pdx node;  pdx serve prefill MODEL;  pdx serve decode MODEL;  pdx proxy
    """


if __name__ == "__main__":
    main()
