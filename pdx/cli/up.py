"""`pdx up`: nodes, engines and a proxy on this host with one command, and nothing left when it ends."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
import msgspec

from pdx.cli import placement
from pdx.cli.node import check_channels
from pdx.cli.options import as_flags, node_options, refuse_node_options
from pdx.cli.ports import free_ports, held_port
from pdx.cli.processes import Processes, State
from pdx.cli.progress import Progress
from pdx.cli.ready import answers_at, answers_health, attached_urls, knows_nodes
from pdx.cli.serve import TLS, engine_command, flag
from pdx.client.api import connect
from pdx.config import NodeOptions, default_proxy, parse, private_folder, runtime_folder, socket_path
from pdx.errors import ConfigError
from pdx.security.address import bracketed, is_loopback, is_wildcard, spelled
from pdx.security.socket_lock import owned

log = logging.getLogger(__name__)

LOOK_S = 0.25
DRAIN_S = 5.0  # requests under way when all of it is to end; the guard gives each process GRACE_S
PDX = [sys.executable, "-P", "-m", "pdx.cli.main"]


class Engine(msgspec.Struct, frozen=True):
    """One vLLM server of the plan."""

    name: str
    role: str
    port: int

    @property
    def url(self) -> str:
        """Where it serves HTTP; engines are for the proxy only, so never beyond this host."""
        return f"http://127.0.0.1:{self.port}"


class Node(msgspec.Struct, frozen=True):
    """One node of the plan, for the engines of these roles."""

    name: str
    address: str
    roles: Sequence[str] = ("prefill", "decode")
    is_own: bool = True  # start it, else attach to the one that is there
    options: Sequence[str] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to start."""

    model: str
    engines: list[Engine]
    host: str
    port: int
    has_gpus: bool  # nodes have arenas on some
    nodes: list[Node]
    control: str  # where nodes and the proxy meet
    proxy_options: Sequence[str]
    flags: Sequence[str]
    share_port: Callable[[], None]  # to be called before the proxy starts

    @property
    def url(self) -> str:
        """Where this host's clients find the proxy."""
        host = spelled(self.host)
        if is_wildcard(host):
            host = "::1" if ":" in host else "127.0.0.1"
        return f"http://{bracketed(host)}:{self.port}"

    def node_of(self, engine: Engine) -> str:
        """The address of the node that `engine` attaches to."""
        return next(node.address for node in self.nodes if engine.role in node.roles)


class _Command(click.Command):
    """Says where flags for vLLM go."""

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
@click.option("--prefill", default=1, show_default=True, type=click.IntRange(1, 64), help="Prefill engines.")
@click.option("--decode", default=1, show_default=True, type=click.IntRange(1, 64), help="Decode engines.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address the proxy serves on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65_535), help="The proxy's port.")
@node_options
@click.option("--node", help="Use the node at this address. [default: start one for this command alone]")
@click.option(
    "--channel",
    metavar="SCHEME",
    help="A node for each role, joined by this channel, as if on two hosts; auto: the fastest. [default: one node]",
)
@click.option("--admin", default="", metavar="ADDRESS", help="See `pdx proxy`. [default: nowhere]")
@click.option("--debug-headers", is_flag=True, help="See `pdx proxy`.")
@click.option(
    "--logs",
    type=click.Path(path_type=Path),
    default="pdx-logs",
    show_default=True,
    help="Folder for logs; another pdx up needs another.",
)
@click.option(
    "--wait",
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    callback=_seconds,
    help="Give up starting after this long.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def up(
    model: str,
    prefill: int,
    decode: int,
    host: str,
    port: int,
    node: str | None,
    channel: str | None,
    admin: str,
    debug_headers: bool,
    logs: Path,
    wait: float,
    flags: tuple[str, ...],
    **of_node: Any,
) -> None:
    """Start a node, engines and a proxy for MODEL; Ctrl-C ends them all.

    With --channel there are two nodes, and prompts travel between them over that channel. Each has the memory that is
    asked for, a folder of its own in that of --disk with a limit of its own, and one of two GPUs.

    Flags after -- go to every vLLM engine: pdx up MODEL -- --max-model-len 8192
    """
    if node and channel:
        raise ConfigError("--channel starts two nodes of its own, --node uses one that is there; choose one of them")
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
        connect(node).close()  # or engines would load a model and then wait for it in vain
    # Named after the port, not the process: should a node be killed hard, the next one on that port has its address and
    # frees the shared memory that was left.
    folder = runtime_folder() / f"up-{port}"
    nodes = [Node("node", node, is_own=False)] if node else nodes_of(folder, channel, of_node)
    with _signals() as signals, _owned(folder, port), held_port(host, port) as share_port:
        private_folder(folder)
        plan = Plan(
            model=model,
            engines=_engines(prefill, decode),
            host=host,
            port=port,
            has_gpus=bool(of_node["gpus"]),
            nodes=nodes,
            control=default_proxy() if node else f"ipc://{folder}/proxy.sock",
            proxy_options=[*(["--admin", admin] if admin else []), *(["--debug-headers"] if debug_headers else [])],
            flags=flags,
            share_port=share_port,
        )
        sys.exit(_run(plan, logs, wait, signals))


def _run(plan: Plan, logs: Path, wait_s: float, signals: Sequence[int]) -> int:
    """Start stage by stage, then watch until a signal comes (0) or a process ends on its own (1)."""
    with Processes(logs) as processes, _sole(logs), Progress(processes) as progress:
        deadline = time.monotonic() + wait_s
        waiting = [_start_nodes, _start_engines, _start_proxy]
        is_up = False
        missing: list[str] = []
        if warning := exposure(plan.host, plan.port, plan.flags):
            progress.say(warning)
        while not signals:
            if _died(processes, progress):
                return 1
            progress.update()
            if not is_up and all(process.state is State.READY for process in processes):
                if waiting:
                    processes.stage()
                    waiting.pop(0)(plan, processes)
                else:
                    known, missing = missing, _unattached(plan)
                    is_up = not missing
                    if is_up:
                        progress.say(f"ready: {plan.url} serves {plan.model}; Ctrl-C ends it")
                    elif missing != known:
                        progress.say(f"waiting for {' and '.join(missing)} to attach to a node")
            if not is_up and time.monotonic() > deadline:
                why = f"{' and '.join(missing)} not attached to a node; " if missing else ""
                progress.say(f"not ready within {wait_s:.0f} s: {why}see the logs in {logs}, or raise --wait")
                return 1
            time.sleep(LOOK_S)
        progress.say("stopping")
        processes.stop()
        progress.say("stopped")
        return 0


def _unattached(plan: Plan) -> list[str]:
    """Engines that their nodes do not know (yet): they serve, but without PDX."""
    known = {node.address: attached_urls(node.address) for node in plan.nodes}
    return [engine.name for engine in plan.engines if engine.url not in known[plan.node_of(engine)]]


def exposure(host: str, port: int, flags: Sequence[str]) -> str:
    """What to know before the proxy is open to others; empty where it is not, or engines ask for a key."""
    has_key = bool(flag(flags, "--api-key") or os.environ.get("VLLM_API_KEY"))  # to vLLM an empty one is none
    if has_key or is_loopback(spelled(host)):
        return ""
    return (
        f"warning: whoever reaches port {port} at {host} may use the engines, no key is asked for; "
        "ask for one with: -- --api-key KEY"
    )


def _died(processes: Processes, progress: Progress) -> bool:
    """Report processes that ended on their own."""
    dead = processes.look()
    for process in dead:
        progress.update()
        progress.say(f"{process.name} ended with status {process.exit_status}; the end of {process.log}:")
        for line in process.tail(20):
            progress.say(f"  {line}")
    return bool(dead)


def _start_nodes(plan: Plan, processes: Processes) -> None:
    for node in plan.nodes:
        if node.is_own:
            options = ["--address", node.address, "--proxy", plan.control, *node.options]
            processes.start(node.name, [*PDX, "node", *options], is_ready=answers_at(node.address))


def _start_engines(plan: Plan, processes: Processes) -> None:
    cores, gpus = placement.cores(), placement.gpus()
    homes = placement.place(len(plan.engines), cores, gpus, os.environ, sees_others=plan.has_gpus)
    for engine, home in zip(plan.engines, homes, strict=True):
        command = engine_command(
            plan.model,
            [*plan.flags, "--host", "127.0.0.1", "--port", str(engine.port)],
            role=engine.role,
            node=plan.node_of(engine),
            proxy=plan.control,
            start_node=False,  # the node is a process of this command, which ends when the node does
            url=engine.url,
        )
        processes.start(engine.name, command, is_ready=answers_health(engine.url), env=home)


def _start_proxy(plan: Plan, processes: Processes) -> None:
    options = ["--host", plan.host, "--port", str(plan.port), "--control", plan.control, *plan.proxy_options]
    options += ["--drain", str(DRAIN_S)]
    for engine in plan.engines:
        options += [f"--{engine.role}", engine.url]
    reporting = sum(node.is_own for node in plan.nodes)
    is_ready = knows_nodes(plan.url, reporting)
    plan.share_port()
    processes.start("proxy", [*PDX, "proxy", *options], is_ready=is_ready)


def nodes_of(folder: Path, channel: str | None, of_node: Mapping[str, Any]) -> list[Node]:
    """One for all engines, or one for each role; the proxy tells them of each other. `of_node`: see `NodeOptions`.

    :raises ConfigError: what no node takes, or one takes and two do not.
    """
    gpus = of_node.get("gpus", [])
    if channel is not None and (len(gpus) > 2 or not all(gpus)):
        raise ConfigError(f"--gpu {','.join(gpus)!r} for two nodes: name one or two")
    parse(NodeOptions, dict(of_node)).settings()
    if channel is None:
        return [Node("node", f"ipc://{folder}/node.sock", options=as_flags(of_node))]
    if of_node.get("metrics"):
        raise ConfigError("--metrics is where one node listens, --channel starts two; choose one of them")
    nodes = []
    for number, role in enumerate(("prefill", "decode")):
        own = dict(of_node)
        if gpus:
            own["gpus"] = [gpus[number % len(gpus)]]
        if own.get("disk"):
            own["disk"] = os.path.join(own["disk"], role)
        joined = [] if channel == "auto" else ["--channel", channel]
        options = ["--name", role, *joined, *as_flags(own)]
        nodes.append(Node(f"node-{role}", f"ipc://{folder}/{role}.sock", [role], options=options))
    return nodes


def _engines(prefill: int, decode: int) -> list[Engine]:
    names = [("prefill", index) for index in range(prefill)] + [("decode", index) for index in range(decode)]
    ports = free_ports(len(names))
    return [Engine(f"{role}-{index}", role, port) for (role, index), port in zip(names, ports, strict=True)]


@contextmanager
def _owned(folder: Path, port: int) -> Iterator[None]:
    """A folder for the node's and the proxy's sockets of this command alone, by a lock beside it; it is not made yet.

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


@contextmanager
def _sole(logs: Path) -> Iterator[None]:
    """Be the only `pdx up` with logs there: another one would move these away, and cut off what is not its own.

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


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that signals to end are added to, while inside; they interrupt nothing."""
    seen: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, remember) for number in numbers]
    try:
        yield seen
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
