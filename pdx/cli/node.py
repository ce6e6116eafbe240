"""`pdx node`: run this host's node, or show the state of a running one."""

from __future__ import annotations

import logging
import sys
import time

import click

from pdx.config import NodeConfig, default_node, default_proxy, parse, parse_bytes


@click.command()
@click.option("--address", help="The node's socket. [default: $PDX_NODE, else this user's socket on this host]")
@click.option("--arena", default="4GiB", show_default=True, help="Shared memory for chunks.")
@click.option("--proxy", help="Where the proxy listens; '' for none. [default: $PDX_PROXY, else this user's]")
@click.option("--exit-when-idle", type=float, default=0.0, metavar="SECONDS", help="End when nobody is attached.")
@click.option("--status", is_flag=True, help="Show the state of the running node and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --status: one JSON object.")
@click.option("--watch", is_flag=True, help="With --status: refresh every second until Ctrl-C.")
def node(
    address: str | None,
    arena: str,
    proxy: str | None,
    exit_when_idle: float,
    status: bool,
    as_json: bool,
    watch: bool,
) -> None:
    """Run the node of this host in the foreground; or, with --status, show what the running one holds."""
    address = address or default_node()
    if (as_json or watch) and not status:
        raise click.UsageError("--json and --watch go with --status")
    if status:
        _show(address, as_json=as_json, watch=watch)
        return
    from pdx.node.daemon import run

    settings = {
        "address": address,
        "arena_bytes": parse_bytes(arena),
        "proxy": default_proxy() if proxy is None else proxy,
        "exit_when_idle_s": exit_when_idle,
    }
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(parse(NodeConfig, settings))


def _show(address: str, *, as_json: bool, watch: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from pdx.cli.status import as_object, view
    from pdx.client import connect

    with connect(address) as attached:
        if as_json:
            while True:
                click.echo(as_object(attached.status()))
                if not watch:
                    return
                time.sleep(1.0)
        if not watch:
            Console().print(view(attached.status(), address))
            return
        try:
            with Live(view(attached.status(), address), screen=sys.stdout.isatty()) as live:
                while True:
                    time.sleep(1.0)
                    live.update(view(attached.status(), address), refresh=True)
        except KeyboardInterrupt:
            return
