"""`pdx node`: run this host's node, or show the state of a running one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.progress import TaskID, TimeElapsedColumn

from pdx.cli.options import (
    NODE_ENV,
    NODE_EXAMPLE,
    Sectioned,
    file_option,
    log_format,
    node_option,
    option,
    said,
    settings_of,
)
from pdx.cli.tables import progress, size, to_json, view
from pdx.client.connection import attached
from pdx.config import NodeConfig, default_node, default_proxy, node_settings, parse, socket_path
from pdx.errors import ChannelUnavailable, ConfigError, NodeError, PdxError
from pdx.telemetry import logs
from pdx.transports.channel import Availability
from pdx.transports.registry import find, schemes
from pdx.wire.status import COUNTING, AttachedStatus, NodeStatus
from pdx.wire.verbs import Status

TIMEOUT_S = 30.0
ANSWER_S = 5.0
_ATTACH_S = 60.0  # for this process to attach to its own node
PAUSE_S = 0.25


# Actions are not settings: they come neither from a file nor from the environment.
_now = partial(option, is_flag=True, section="A running node", allow_from_autoenv=False)


@click.command(cls=Sectioned)
@node_option
@file_option("--config", NODE_EXAMPLE)
@settings_of(NodeConfig, env=NODE_ENV)
@option(
    "--proxy",
    help="Address of the proxy, or of several, separated by commas; '' for none. [default: those found by "
    "--discover, else $PDX_PROXY, else this user's]",
)
@_now("--status", help="Show the state of the running node and exit.")
@_now("--json", "as_json", help="With --status: one JSON object.")
@_now("--watch", help="With --status: refresh every second until Ctrl-C.")
@_now("--stop", help="End the running node, and wait until its memory is free.")
@_now("--force", help="With --stop: even if engines are attached.")
@log_format
def node(
    address: str | None,
    proxy: str | None,
    status: bool,
    as_json: bool,
    watch: bool,
    stop: bool,
    force: bool,
    **settings: Any,
) -> None:
    """Run this host's node in the foreground. With --status, show what the running one holds; with --stop, end it."""
    address = address or default_node()
    if (as_json or watch) and not status:
        raise click.UsageError("--json and --watch go with --status")
    if force and not stop:
        raise click.UsageError("--force goes with --stop")
    if stop:
        click.echo(end_node(address, force=force))
        return
    if status:
        _show(address, as_json=as_json, watch=watch)
        return
    from pdx.node.daemon import run

    check_channels(settings["channels"])
    _check_some_work(settings["channels"])
    if proxy is None:
        proxy = "" if settings["discover"] else default_proxy()
    of_node = {"address": address, "proxy": proxy}
    logs.set_up()
    config = parse(NodeConfig, {**of_node, **node_settings(said(settings))})
    if config.disks:
        _follow_in_background(address)
    run(config)


def check_channels(channels: Sequence[str]) -> None:
    """:raises ConfigError: a channel is unknown, or never leads to another node."""
    known = schemes()
    for channel in channels:
        if channel not in known:
            raise ConfigError(f"no channel between nodes is named {channel!r}; there are {', '.join(known)}")


def _check_some_work(channels: Sequence[str]) -> None:
    """:raises ConfigError: channels are named, but none of them works here: peers would wait for one in vain."""
    failed = []
    for channel in channels:
        try:
            found = find(channel).availability()
        except ChannelUnavailable as error:
            found = Availability(False, str(error), "install what provides it")
        if found.is_ok:
            return
        failed.append(f"--channel {channel}: {found.why}; {found.fix}")
    if failed:
        raise ConfigError(f"{'. '.join(failed)} (pdx doctor tries all channels)")


def _show(address: str, *, as_json: bool, watch: bool) -> None:
    """Show the status of the node at `address`: once, or every second until Ctrl-C."""
    from pdx.client.api import connect

    with connect(address) as client, contextlib.suppress(KeyboardInterrupt):
        status = without_self(client.status())
        if as_json:
            click.echo(to_json(status))
            while watch:
                time.sleep(1.0)
                click.echo(to_json(without_self(client.status())))
        elif not watch:
            Console().print(view(status, address))
        else:
            with Live(view(status, address), screen=sys.stdout.isatty()) as live:
                while True:
                    time.sleep(1.0)
                    live.update(view(without_self(client.status()), address), refresh=True)


def without_self(status: NodeStatus) -> NodeStatus:
    """`status` without the process that asked: this process's session that was heard from last."""
    own = [one for one in status.attached if one.pid == os.getpid() and one.kind == "client"]
    asked = min(own, key=lambda one: one.silent_s, default=None)
    return msgspec.structs.replace(status, attached=[one for one in status.attached if one is not asked])


def end_node(address: str, *, force: bool, timeout_s: float = TIMEOUT_S) -> str:
    """End the node at `address` and wait until its process, socket and arena are gone; returns what was ended.

    `force`: also if engines are attached; they continue without PDX.

    :raises NodeUnavailable: no node answers there.
    :raises NodeError: engines are attached, or it does not end.
    """
    with attached(address, ANSWER_S, name="pdx node --stop") as node:
        status, arena = without_self(node.call_for(Status(), ANSWER_S, NodeStatus)), node.arena.path
        engines = [one for one in status.attached if one.kind != "client"]
        if engines and not force:
            raise NodeError(
                f"engines are attached to the node at {address}: {_listed(engines)}; --force ends it anyway"
            )
        pidfd = node.pidfd()
    try:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        except OSError as error:
            raise NodeError(f"the node is out of reach of signals from here; end it where it runs ({error})") from error
        if not select.select([pidfd], [], [], timeout_s)[0]:
            raise NodeError(f"process {status.pid} has not ended within {timeout_s:g} s; see its log, or kill it")
    finally:
        os.close(pidfd)
    left = [str(path) for path in (socket_path(address), arena) if path.exists()]
    if left:
        raise NodeError(f"process {status.pid} ended and left {' and '.join(left)} behind")
    held = f"{size(status.arena_bytes)} of memory and {sum(status.chunks.values()):,} chunks"
    others = f"; still attached were {_listed(status.attached)}" if status.attached else ""
    return f"the node at {address} (process {status.pid}) has ended, with {held}{others}"


def _listed(attached: Sequence[AttachedStatus]) -> str:
    """Up to eight of them by name."""
    names = [f"{one.kind} {one.engine[:8] or one.name} (process {one.pid})" for one in attached]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


# ---- while a node counts the files of its disks, which it does beside serving -------------------


def _follow_in_background(address: str) -> None:
    """Show progress for the node at `address`, which this process runs or is about to run; from a thread, until it is
    done."""
    console = Console(stderr=True)
    if console.is_terminal:
        threading.Thread(target=_attach_and_follow, args=(address, console), name="pdx-counting", daemon=True).start()


def _attach_and_follow(address: str, console: Console) -> None:
    from pdx.client.api import connect

    with contextlib.suppress(PdxError), connect(address, timeout_s=_ATTACH_S) as node:  # the node ends, or never starts
        follow(node.status, console)


def follow(read: Callable[[], NodeStatus], console: Console, pause_s: float = PAUSE_S) -> None:
    """Show a progress bar for each tier that is still counting, according to `read`, until none is. Totals are not
    known."""
    with progress(TimeElapsedColumn(), console=console) as shown:
        bars: dict[str, TaskID] = {}
        while True:
            counting = [tier for tier in read().tiers if tier.state == COUNTING]
            for tier in counting:
                if tier.name not in bars:
                    bars[tier.name] = shown.add_task(f"{COUNTING} of {tier.place}", total=None)
                shown.update(bars[tier.name], completed=tier.chunks)
            if not counting:
                return
            time.sleep(pause_s)
