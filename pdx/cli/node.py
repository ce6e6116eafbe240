"""`pdx node`: run this host's node, or show the state of a running one."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from pdx.cli.options import node_options
from pdx.config import NodeConfig, NodeOptions, default_node, default_proxy, parse
from pdx.errors import ConfigError
from pdx.transports.registry import INSIDE_ONE_PROCESS, schemes


@click.command()
@click.option("--address", help="The node's socket. [default: $PDX_NODE, else this user's socket on this host]")
@node_options
@click.option("--proxy", help="Where the proxy listens; '' for none. [default: $PDX_PROXY, else this user's]")
@click.option("--name", default="", help="What peers and the proxy call it. [default: made from host and address]")
@click.option("--listen", default="", metavar="ADDRESS", help="Where peers connect. [default: a socket on this host]")
@click.option("--roster", default="", metavar="FILE", help="Names the peers, their addresses and public keys.")
@click.option("--keys", default="", metavar="FILE", help="Secret key made by pdx keygen; needed beyond this host.")
@click.option(
    "--channel",
    "channels",
    multiple=True,
    metavar="SCHEME",
    help="Use this channel to peers; repeated: the first that works. [default: the fastest; pdx doctor lists them]",
)
@click.option(
    "--trusted-network",
    is_flag=True,
    help="Choose also among channels that do not authenticate who writes (nixl, ucx): whoever reaches this host may.",
)
@click.option(
    "--digests",
    default="wire",
    show_default=True,
    type=click.Choice(["wire", "always", "never"]),
    help="Check what arrives from peers: what came over a wire, everything, or nothing.",
)
@click.option("--exit-when-idle", type=float, default=0.0, metavar="SECONDS", help="End when nobody is attached.")
@click.option("--status", is_flag=True, help="Show the state of the running node and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --status: one JSON object.")
@click.option("--watch", is_flag=True, help="With --status: refresh every second until Ctrl-C.")
@click.option("--stop", is_flag=True, help="End the running node, and wait until its memory is free.")
@click.option("--force", is_flag=True, help="With --stop: also while engines are attached.")
def node(
    address: str | None,
    proxy: str | None,
    exit_when_idle: float,
    status: bool,
    as_json: bool,
    watch: bool,
    stop: bool,
    force: bool,
    **others: Any,
) -> None:
    """Run the node of this host in the foreground; or, with --status, show what the running one holds; or end it."""
    address = address or default_node()
    if (as_json or watch) and not status:
        raise click.UsageError("--json and --watch go with --status")
    if force and not stop:
        raise click.UsageError("--force goes with --stop")
    if stop:
        from pdx.cli.stop import stop as stop_node

        click.echo(stop_node(address, force=force))
        return
    if status:
        _show(address, as_json=as_json, watch=watch)
        return
    from pdx.node.daemon import run

    check_channels(others["channels"])
    of_node = {name: others.pop(name) for name in NodeOptions.__struct_fields__}
    settings = {
        "address": address,
        "proxy": default_proxy() if proxy is None else proxy,
        "exit_when_idle_s": exit_when_idle,
        **parse(NodeOptions, of_node).settings(),
        **others,
    }
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(parse(NodeConfig, settings))


def check_channels(channels: Sequence[str]) -> None:
    """:raises ConfigError: a channel that nobody provides, or that never leads to another node."""
    known = [scheme for scheme in schemes() if scheme not in INSIDE_ONE_PROCESS]
    for channel in channels:
        if channel not in known:
            raise ConfigError(f"no channel between nodes is named {channel!r}; there are {', '.join(known)}")


def _show(address: str, *, as_json: bool, watch: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from pdx.cli.status import as_object, view, without_self
    from pdx.client.api import connect

    with connect(address) as attached:
        if as_json:
            while True:
                click.echo(as_object(without_self(attached.status())))
                if not watch:
                    return
                time.sleep(1.0)
        if not watch:
            Console().print(view(without_self(attached.status()), address))
            return
        try:
            with Live(view(without_self(attached.status()), address), screen=sys.stdout.isatty()) as live:
                while True:
                    time.sleep(1.0)
                    live.update(view(without_self(attached.status()), address), refresh=True)
        except KeyboardInterrupt:
            return
