"""The `pdx` command: finds the subcommand, and turns every `PdxError` into one line and exit status 1."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from pdx.errors import PdxError

# Where each command is implemented, in the order of `--help`.
COMMANDS = {
    "up": "pdx.cli.up:up",
    "serve": "pdx.cli.serve:serve",
    "node": "pdx.cli.node:node",
    "proxy": "pdx.cli.proxy:proxy",
    "cache": "pdx.cli.cache:cache",
    "why": "pdx.cli.why:why",
    "top": "pdx.cli.top:top",
    "blend": "pdx.cli.blend:blend",
    "keygen": "pdx.cli.keygen:keygen",
    "doctor": "pdx.cli.doctor:doctor",
    "parity": "pdx.bench.parity.command:parity",
    "bench": "pdx.cli.main:bench",
    "plan": "pdx.bench.plan.command:plan",
    "sim": "pdx.bench.sim.command:sim",
}
BENCHES = {
    "breakdown": "pdx.bench.breakdown.command:breakdown",
    "reuse": "pdx.bench.reuse.command:reuse",
    "transfer": "pdx.bench.harness.commands:transfer",
    "proxy": "pdx.bench.harness.commands:proxy",
    "serve": "pdx.bench.serve.command:serve",
    "quality": "pdx.bench.quality.command:quality",
}


class LazyGroup(click.Group):
    """Imports commands on demand, so that `pdx node` does not load the proxy."""

    def __init__(self, *args: Any, where: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._where = where

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._where)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module, _, name = self._where.get(cmd_name, "").partition(":")
        return getattr(import_module(module), name) if module else None

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PdxError as error:
            raise click.ClickException(str(error)) from error


_SETTINGS = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PDX"}  # see pdx.cli.options


@click.group(cls=LazyGroup, where=COMMANDS, context_settings=_SETTINGS)
@click.version_option(package_name="pdx-transport", prog_name="pdx", allow_from_autoenv=False)
def main() -> None:
    """PDX moves the KV cache of LLM engines: from prefill to decode, and from engines to memory for reuse.

    \b
    The quickest start:  pdx up MODEL
    Part by part:        pdx node;  pdx serve prefill MODEL;  pdx serve decode MODEL;  pdx proxy

    Options may stand in the environment, too: --max-body of pdx proxy as PDX_PROXY_MAX_BODY. Those of a node and of the
    proxy have one name in all commands, as PDX_NODE_ARENA. The command line comes first.
    """


@click.group(cls=LazyGroup, where=BENCHES)
def bench() -> None:
    """Measure: a handoff part by part beside vLLM's own, channels, the proxy, and a whole service.

    \b
    Where does a request's time go?      pdx bench breakdown
    What is it worth to keep KV?         pdx bench reuse
    How fast is each channel here?       pdx bench transfer
    What does the proxy cost?            pdx bench proxy
    How does a running service do?       pdx bench serve --url http://127.0.0.1:8000
    What does approximate KV change?     pdx bench quality
    """


if __name__ == "__main__":
    main()
