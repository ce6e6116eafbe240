"""`pdx top`: the proxy's status page in a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pdx.cli.options import option
from pdx.cli.tables import clipped, duration, escaped, milliseconds, size, table
from pdx.errors import PdxError
from pdx.security.secret_file import load_token
from pdx.wire.overview import EngineView, NodeView, Overview, RequestView, Room

PAUSE_S = 1.0
TIMEOUT_S = 10.0
# Color and characters of each phase in a bar; the characters also work without color, and in ASCII.
_PHASES = {
    "queue": ("bright_black", "·", "."),
    "prefill": ("blue", "█", "#"),
    "handoff": ("yellow", "▒", "="),
    "decode": ("green", "━", "-"),
}
_HEADS = 16  # lines for titles and the header
_LEAST = 1  # minimum lines per section
_ID, _HOW = 12, 20  # characters of a request's name, and of its mode
_BESIDE_BARS = _ID + _HOW + 7 + 11 + 4  # plus tokens, time and spaces
_ALL = 1 << 30
_Row = tuple[RenderableType, ...]


@click.command()
@click.argument("admin", default="127.0.0.1:8001", envvar="PDX_PROXY_ADMIN")
@option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE", help="File with the token that the proxy requires."
)
@option("--once", is_flag=True, help="Print everything once; the default if the output is not a terminal.")
def top(admin: str, token_file: Path | None, once: bool) -> None:
    """Nodes, engines and requests of a service, refreshed every second; q quits.

    ADMIN is the address given to the proxy's --admin: HOST:PORT, http://…, or the /path of a socket. [default:
    $PDX_PROXY_ADMIN, else 127.0.0.1:8001]
    """
    from pdx.client.reach import ThroughProxy

    url = admin if admin.startswith("/") or "://" in admin else f"http://{admin}"
    proxy = ThroughProxy(url.rstrip("/"), load_token(token_file) if token_file is not None else "", TIMEOUT_S)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    told = proxy.overview()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(frame(told, console))
        return
    with contextlib.suppress(KeyboardInterrupt), _keys() as is_quit:
        _watch(proxy.overview, told, console, is_quit)


def _watch(ask: Callable[[], Overview], told: Overview, console: Console, is_quit: Callable[[float], bool]) -> None:
    problem = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(told, console, lines=console.height, problem=problem), refresh=True)
            if is_quit(PAUSE_S):
                return
            try:
                told, problem = ask(), ""
            except PdxError as error:
                problem = str(error)


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Waits up to a number of seconds; says whether q was pressed, or standard input was closed."""
    if not sys.stdin.isatty():
        yield _pause
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def is_quit(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([keyboard], [], [], max(0.0, until - time.monotonic()))[0]:
            if os.read(keyboard, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield is_quit
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


# ---- a frame ------------------------------------------------------------------------------------


def frame(told: Overview, console: Console, *, lines: int = _ALL, problem: str = "") -> RenderableType:
    """As many rows as fit on this many lines. `problem`: why the data is stale."""
    nodes = [row for node in told.nodes for row in _node(node)]
    engines = [_engine(each) for each in told.engines]
    fallbacks = [(f"{duration(each.ago_s)} ago", each.why, each.id) for each in told.fallbacks]
    troubles = [Text(line, style="yellow") for node in told.nodes for line in _troubles(node)]
    rows = told.requests or told.ended
    needs = [len(rows), len(engines), len(nodes), len(fallbacks), len(troubles)]
    shown, of_engines, of_nodes, of_fallbacks, of_troubles = _portions(needs, max(0, lines - _HEADS))
    what = "requests under way" if told.requests or not told.ended else "no request is under way; the last ones"
    is_plain, longest = console.options.ascii_only, max((sum(each.phases) for each in rows[:shown]), default=0.0)
    room = max(10, console.width - _BESIDE_BARS)
    named = len({name for name, *_ in nodes[:of_nodes]} - {""})

    def part(title: str, count: int, of: int, columns: Sequence[str], rows: Sequence[_Row]) -> RenderableType:
        title = f"{title}: {count:,} of {of:,}" if count < of else f"{title}: {of:,}"
        return table(f"\n{title}", columns, rows, is_wide=True, header=bool(rows))

    return Group(
        _head(told, problem),
        part(
            what,
            shown,
            needs[0] + told.more_requests,
            ("request", "how", ">tokens", ">time", " ".join(f"{_shape(each, is_plain)}{each}" for each in _PHASES)),
            [_request(each, longest, room, is_plain=is_plain) for each in rows[:shown]],
        ),
        part(
            "engines",
            of_engines,
            len(engines) + told.more_engines,
            ("engine", "role", "is", "node", ">requests", ">queued", ">tokens/s"),
            engines[:of_engines],
        ),
        part(
            "nodes",
            named,
            len(told.nodes) + told.more_nodes,
            ("node", "", ">used", ">of", ">hits", ">GB/s", "channels"),
            [row[1:] for row in nodes[:of_nodes]],
        ),
        *troubles[:of_troubles],
        part("last fallbacks", of_fallbacks, len(fallbacks), (">when", "why", "request"), fallbacks[:of_fallbacks]),
        *(Text(escaped(each)) for each in (told.notes if lines == _ALL else ())),
    )


def _portions(needs: Sequence[int], room: int) -> list[int]:
    """Distribute lines among sections: an equal share each, and what others do not need, first sections first."""
    shares = [min(need, max(_LEAST, room // len(needs))) for need in needs]
    for at, need in enumerate(needs):
        shares[at] += max(0, min(need - shares[at], room - sum(shares)))
    return shares


def _head(told: Overview, problem: str) -> Text:
    under_way, nodes = len(told.requests) + told.more_requests, len(told.nodes) + told.more_nodes
    of_all = f", {told.load:,} in all {told.workers} workers" if told.workers > 1 else ""
    return Text.assemble(
        ("pdx ", "bold"),
        (told.status, "green" if told.status == "ok" else "bold red"),
        f"  {nodes:,} node{'s' * (nodes != 1)}, {told.prefillers:,} can prefill, {told.decoders:,} can decode",
        f", {under_way:,} under way{of_all}, {told.waiting:,} waiting\n",
        (f"{escaped(problem)}\n" if problem else "", "red"),
    )


def _request(request: RequestView, longest: float, room: int, *, is_plain: bool) -> _Row:
    words = [request.mode, request.why, request.outcome if request.outcome != "ok" else ""]
    tokens = f"{request.prompt_tokens:,}" if request.prompt_tokens else ""
    name, how = clipped(request.id), clipped(" ".join(word for word in words if word))
    name.truncate(_ID, overflow="ellipsis")
    how.truncate(_HOW, overflow="ellipsis")
    bar = _bar(request.phases, longest, room, is_plain=is_plain)
    return name, how, tokens, milliseconds(sum(request.phases)), bar


def _shape(phase: str, is_plain: bool) -> str:
    return _PHASES[phase][1 + is_plain]


def _bar(phases: Sequence[float], longest: float, room: int, *, is_plain: bool) -> Text:
    """Every phase that took any time gets at least one character."""
    bar, spent = Text(no_wrap=True), 0.0
    for ms, phase in zip(phases, _PHASES, strict=False):
        spent += ms
        until = round(spent / longest * room) if longest else 0
        bar.append(_shape(phase, is_plain) * max(until - len(bar), int(ms > 0)), _PHASES[phase][0])
    bar.truncate(room)
    return bar


def _engine(engine: EngineView) -> _Row:
    return (
        clipped(engine.name.removeprefix("http://")),
        engine.role,
        clipped(engine.state, "" if engine.state in ("well", "new") else "yellow"),
        clipped(engine.node or "none"),
        f"{engine.requests:,}",
        f"{engine.backlog_tokens:,}" if engine.backlog_tokens else "",
        f"{engine.tokens_s:,.0f}" if engine.tokens_s else "",
    )


def _node(node: NodeView) -> list[tuple[RenderableType, ...]]:
    """A row per arena and tier; only the first shows the node's name."""
    channels = " ".join(f"{link.channel or 'down'} {link.peers:,}" for link in node.links)
    found, rows = (node.found, node.looked_up), list[tuple[RenderableType, ...]]()
    for room in node.rooms or [Room("")]:
        hits, asked = (room.hits, room.hits + room.misses) if rows else found
        rows.append(
            (
                "" if rows else node.name,
                clipped("" if rows else node.name),
                clipped(room.name),
                size(room.used_bytes) if room.used_bytes or room.limit_bytes else "",
                size(room.limit_bytes) if room.limit_bytes else "",
                f"{hits / asked:.0%}" if asked else "",
                f"{room.load_gb_s:.2f}" if room.load_gb_s else "",
                clipped("" if rows else channels),
            )
        )
    return rows


def _troubles(node: NodeView) -> Iterator[str]:
    states = [f"{room.name}: {room.state}" for room in node.rooms if room.state != "ok"]
    degraded = [f"{why} {count:,} times" for why, count in node.degraded.items()]
    for each in (node.problem, *states, *(link.why for link in node.links), *degraded):
        if each:
            yield escaped(f"{node.name}: {each}")
