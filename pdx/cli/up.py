"""`pdx up`: nodes, engines and a proxy on this host with one command; nothing is left when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdx.cli import placement
from pdx.cli.node import check_channels
from pdx.cli.options import (
    FOLDER,
    NODE_EXAMPLE,
    PROXY_ENV,
    Sectioned,
    as_flags,
    file_option,
    log_format,
    node_options,
    option,
    refuse_node_options,
    said,
    setting,
    settings_of,
)
from pdx.cli.ports import free_ports, held_port
from pdx.cli.processes import Processes, ProcessState, answers, attached_urls
from pdx.cli.serve import TLS, engine_command, flag
from pdx.client.api import connect
from pdx.config import (
    ConnectorConfig,
    NodeConfig,
    default_proxy,
    node_settings,
    private_folder,
    runtime_folder,
    socket_path,
)
from pdx.errors import ConfigError
from pdx.options import options_of
from pdx.proxy.config import ProxyConfig
from pdx.security.address import bracketed, is_loopback, is_wildcard, spelled
from pdx.security.socket_lock import owned

log = logging.getLogger(__name__)

LOOK_S = 0.25
DRAIN_S = 5.0  # time for requests in flight at shutdown; the guard then gives each process GRACE_S
PDX = [sys.executable, "-P", "-m", "pdx.cli.main"]
_COLOURS = dict(zip(ProcessState, ("yellow", "green", "dim", "bold red"), strict=True))
_WHOLE = click.IntRange(1, 64)
_OF_PROXY = ("admin", "cache_token_file", "debug_headers", "forward", "workers")


class Node(msgspec.Struct, frozen=True):
    """One node, for the engines of these roles."""

    name: str
    address: str
    roles: Sequence[str] = ("prefill", "decode")
    options: Sequence[str] = ()


class Start(msgspec.Struct, frozen=True):
    """A process to start, and how to tell that it is ready."""

    name: str
    command: Sequence[str]
    is_ready: Callable[[], bool]
    env: Mapping[str, str] = {}
    url: str = ""  # an engine's
    node: str = ""  # address of the node that an engine attaches to


class _Command(Sectioned):
    """Says in its help where flags for vLLM go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = f"what is vLLM's goes after --: pdx up MODEL -- {error.option_name}"
            raise click.UsageError(f"{error.format_message()} ({hint})", ctx) from error


def _seconds(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    if not 0 < value <= 86_400:
        raise click.BadParameter(f"{value:g} is no number of seconds from 1 to 86400")
    return value


@click.command(cls=_Command)
@click.argument("model")
@option("--prefill", default=1, type=_WHOLE, help="Number of prefill engines.")
@option("--decode", default=1, type=_WHOLE, help="Number of decode engines.")
@option("--host", default="127.0.0.1", envvar=f"{PROXY_ENV}HOST", help="Address that the proxy serves on.")
@option("--port", default=8000, type=click.IntRange(1, 65_535), envvar=f"{PROXY_ENV}PORT", help="The proxy's port.")
@file_option("--config", NODE_EXAMPLE)
@node_options
@option("--node", help="Use the node at this address. [default: start one for this command alone]")
@option(
    "--channel",
    metavar="SCHEME",
    help="One node per role, connected by this channel, as if on two hosts; auto: the fastest. [default: one node]",
)
@setting(options_of(ConnectorConfig)["moved"])
@settings_of(ProxyConfig, env=PROXY_ENV, only=_OF_PROXY, section="Proxy")
@option("--logs", type=FOLDER, default="pdx-logs", help="Folder for logs; each pdx up needs its own.")
@option("--wait", default=900.0, metavar="SECONDS", callback=_seconds, help="Give up starting after this long.")
@log_format
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def up(
    model: str,
    prefill: int,
    decode: int,
    host: str,
    port: int,
    node: str | None,
    channel: str | None,
    moved: bool | None,
    logs: Path,
    wait: float,
    flags: tuple[str, ...],
    **settings: Any,
) -> None:
    """Start a node, engines and a proxy for MODEL; Ctrl-C ends them all.

    With --channel there are two nodes, and prompts travel between them over that channel. Each node has the full amount
    of memory given, its own folder in that of --disk with its own limit, and one of two GPUs.

    Flags after -- go to every vLLM engine: pdx up MODEL -- --max-model-len 8192
    """
    of_proxy = said({name: settings.pop(name) for name in _OF_PROXY})
    if node and channel:
        raise ConfigError("--channel starts two nodes of its own, --node uses one that is there; choose one of them")
    for name in ("PDX_PROXY_TLS_CERT", "PDX_PROXY_TLS_KEY"):
        if os.environ.get(name):
            raise ConfigError(f"{name}: pdx up asks its proxy by plain HTTP; unset it, or run pdx proxy by itself")
    if node:
        refuse_node_options("--node uses one that is there")
    check_channels([channel] if channel and channel != "auto" else [])
    for name in ("--uds", *TLS):
        if flag(flags, name) is not None:
            raise ConfigError(
                f"{name}: engines of pdx up serve its proxy alone, at loopback; use pdx serve, or drop it"
            )
    if node:
        socket_path(node)
        connect(node).close()  # otherwise engines would load a model and then wait for it in vain
    # Named after the port, not the process: if a node is killed, the next one on that port has its address and frees
    # the shared memory that was left.
    folder = runtime_folder() / f"up-{port}"
    own = [] if node else nodes_of(folder, channel, said(settings))
    with _signals() as signals, _owned(folder, port), held_port(host, port) as share_port:
        private_folder(folder)
        control = default_proxy() if node else f"ipc://{folder}/proxy.sock"
        with Processes(logs) as processes, _sole(logs):
            roles = ["prefill"] * prefill + ["decode"] * decode
            homes = [Node("node", node)] if node else own
            of_engines = {"proxy": control, **said({"moved": moved})}
            engines = _engines(model, roles, flags, homes, of_engines, sees_others=bool(settings["gpus"]))
            started = _Up(processes, signals, wait, logs)
            if warning := exposure(host, port, flags):
                started.say(warning)
            url = f"http://{bracketed(_reached_at(host))}:{port}"
            proxy = ["--host", host, "--port", str(port), "--control", control, *as_flags(ProxyConfig, of_proxy)]
            stages = [_nodes(own, control), engines, [_proxy(proxy, engines, url, len(own))]]
            sys.exit(started.run(stages, f"{url} serves {model}", share_port))


class _Up:
    """The processes of this command from start to end, and how they are shown: a live table on a terminal, one line per
    change elsewhere."""

    def __init__(self, processes: Processes, signals: Sequence[int], wait_s: float, logs: Path) -> None:
        """`signals` collects those received."""
        self._processes = processes
        self._signals = signals
        self._wait_s = wait_s
        self._logs = logs
        self._started_at = time.monotonic()
        self._shown: dict[str, ProcessState] = {}
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if sys.stdout.isatty() else None

    def run(self, stages: list[list[Start]], serves: str, share_port: Callable[[], None]) -> int:
        """Start stage by stage, then watch until a signal arrives (0) or a process ends on its own (1).

        Call `share_port` before the last stage, the proxy, starts.
        """
        with self._live or contextlib.nullcontext():
            return self._run(stages, serves, share_port)

    def _run(self, stages: list[list[Start]], serves: str, share_port: Callable[[], None]) -> int:
        engines = [each for each in stages[1] if each.url]
        missing: list[str] = []
        is_up = False
        while not self._signals:
            if self._died():
                return 1
            self._update()
            if not is_up and all(process.state is ProcessState.READY for process in self._processes):
                if stages:
                    if len(stages) == 1:
                        share_port()
                    self._start(stages.pop(0))
                else:
                    known, missing = missing, _unattached(engines)
                    is_up = not missing
                    if is_up:
                        nodes = dict.fromkeys(f"PDX_NODE={engine.node}" for engine in engines)
                        self.say(f"ready: {serves}; Ctrl-C ends it; {' and '.join(nodes)}")
                    elif missing != known:
                        self.say(f"waiting for {' and '.join(missing)} to attach to a node")
            if not is_up and time.monotonic() > self._started_at + self._wait_s:
                why = f"{' and '.join(missing)} not attached to a node; " if missing else ""
                self.say(f"not ready within {self._wait_s:.0f} s: {why}see the logs in {self._logs}, or raise --wait")
                return 1
            time.sleep(LOOK_S)
        self.say("stopping")
        self._processes.stop()
        self.say("stopped")
        return 0

    def _start(self, stage: list[Start]) -> None:
        self._processes.stage()
        for each in stage:
            self._processes.start(each.name, each.command, is_ready=each.is_ready, env=each.env)

    def _died(self) -> bool:
        dead = self._processes.look()
        for process in dead:
            self._update()
            self.say(f"{process.name} ended with status {process.exit_status}; the end of {process.log}:")
            for line in process.tail(20):
                self.say(f"  {line}")
        return bool(dead)

    def say(self, line: str) -> None:
        """Print a line with the time since the start; it stays on the screen."""
        text = f"[{time.monotonic() - self._started_at:6.1f} s] {line}"
        self._console.print(text, markup=False, soft_wrap=True)
        self._console.file.flush()

    def _update(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        for process in self._processes:
            if self._shown.get(process.name) is not process.state:
                self._shown[process.name] = process.state
                self.say(f"{process.name} (pid {process.pid}) {process.state}; log: {process.log}")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, expand=True)
        for name in ("process", "pid", "state", "seconds"):
            table.add_column(name, justify="right" if name in ("pid", "seconds") else "left", no_wrap=True)
        table.add_column("last line of its log", no_wrap=True, overflow="ellipsis", ratio=1)
        for process in self._processes:
            age = f"{process.ready_after_s or time.monotonic() - process.started_at:.0f}"
            last = Text("".join(process.tail(1)), style="dim")
            state = Text(process.state, style=_COLOURS[process.state])
            table.add_row(process.name, str(process.pid), state, age, last)
        return table


def _unattached(engines: Sequence[Start]) -> list[str]:
    """Engines that their nodes do not know yet: they serve, but without PDX."""
    known = {node: attached_urls(node) for node in {engine.node for engine in engines}}
    return [engine.name for engine in engines if engine.url not in known[engine.node]]


def _reached_at(host: str) -> str:
    host = spelled(host)
    return ("::1" if ":" in host else "127.0.0.1") if is_wildcard(host) else host


def exposure(host: str, port: int, flags: Sequence[str]) -> str:
    """A warning if the proxy is about to be open to others and neither it nor the engines require a key; else empty."""
    # vLLM regards an empty key as none.
    has_key = flag(flags, "--api-key") or any(map(os.environ.get, ("VLLM_API_KEY", f"{PROXY_ENV}API_KEYS")))
    if has_key or is_loopback(spelled(host)):
        return ""
    return (
        f"warning: whoever reaches port {port} at {host} may use the engines, no key is asked for; "
        "ask for one with: -- --api-key KEY"
    )


def _nodes(nodes: Sequence[Node], control: str) -> list[Start]:
    return [
        Start(
            node.name,
            [*PDX, "node", "--node", node.address, "--proxy", control, *node.options],
            partial(answers, node.address),
        )
        for node in nodes
    ]


def _engines(
    model: str,
    roles: Sequence[str],
    flags: Sequence[str],
    nodes: Sequence[Node],
    settings: Mapping[str, Any],
    *,
    sees_others: bool,
) -> list[Start]:
    """Engines that serve only the proxy, so never beyond this host. `settings`: the connector's, for all of them."""
    cores, gpus = placement.cores(), placement.gpus()
    homes = placement.place(len(roles), cores, gpus, os.environ, sees_others=sees_others)
    found: list[Start] = []
    for role, port, home in zip(roles, free_ports(len(roles)), homes, strict=True):
        url = f"http://127.0.0.1:{port}"
        node = next(node.address for node in nodes if role in node.roles)
        command = engine_command(
            model,
            [*flags, "--host", "127.0.0.1", "--port", str(port)],
            role=role,
            node=node,
            **settings,
            start_node=False,  # the node is a process of this command, which ends when the node does
            url=url,
        )
        name = f"{role}-{sum(each.name.startswith(role) for each in found)}"
        found.append(Start(name, command, partial(answers, url), home, url, node))
    return found


def _proxy(options: Sequence[str], engines: Sequence[Start], url: str, num_nodes: int) -> Start:
    roles = [engine.name.partition("-")[0] for engine in engines]
    named = [word for role, engine in zip(roles, engines, strict=True) for word in (f"--{role}", engine.url)]
    has = partial(answers, url, nodes=num_nodes, prefillers=roles.count("prefill"), decoders=roles.count("decode"))
    return Start("proxy", [*PDX, "proxy", *options, "--drain", str(DRAIN_S), *named], has)


def nodes_of(folder: Path, channel: str | None, of_node: Mapping[str, Any]) -> list[Node]:
    """One node for all engines, or one per role; the proxy tells them about each other. `of_node`: see `node_options`.

    :raises ConfigError: an option is invalid for a node, or for two of them.
    """
    gpus = of_node.get("gpus", [])
    if channel is not None and (len(gpus) > 2 or not all(gpus)):
        raise ConfigError(f"--gpu {','.join(gpus)!r} for two nodes: name one or two")
    node_settings(of_node)
    if channel is None:
        return [Node("node", f"ipc://{folder}/node.sock", options=as_flags(NodeConfig, of_node))]
    if of_node.get("metrics"):
        raise ConfigError("--metrics is where one node listens, --channel starts two; choose one of them")
    nodes = []
    for number, role in enumerate(("prefill", "decode")):
        own = dict(of_node)
        if gpus:
            own["gpus"] = [gpus[number % len(gpus)]]
        if own.get("disk"):
            own["disk"] = [os.path.join(folder, role) for folder in own["disk"]]
        joined = [] if channel == "auto" else ["--channel", channel]
        options = ["--name", role, *joined, *as_flags(NodeConfig, own)]
        nodes.append(Node(f"node-{role}", f"ipc://{folder}/{role}.sock", [role], options=options))
    return nodes


@contextlib.contextmanager
def _owned(folder: Path, port: int) -> Iterator[None]:
    """A folder for the sockets of this command's node and proxy, owned through a lock beside it; it is not created yet.

    :raises ConfigError: another `pdx up` has it.
    """

    def taken(owner: str) -> ConfigError:
        return ConfigError(f"port {port} is that of another pdx up, process {owner}; choose another with --port")

    with owned(folder, taken):
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            Path(f"{folder}.lock").unlink(missing_ok=True)


@contextlib.contextmanager
def _sole(logs: Path) -> Iterator[None]:
    """Ensure that no other `pdx up` logs to this folder: it would move these logs away, and truncate files it does not
    own.

    :raises ConfigError: there is another one.
    """
    folder = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another pdx up writes its logs to {logs}; name a folder with --logs") from error
        except OSError as error:  # a file system without locks
            log.debug("%s cannot be locked: %s", logs, error)
        yield
    finally:
        os.close(folder)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that collects termination signals inside the block; they interrupt nothing."""
    seen: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers]
    try:
        yield seen
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
