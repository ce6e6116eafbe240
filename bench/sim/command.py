"""`pdx sim`: estimates what memory, a disk or an eviction policy is worth, by a trace through PDX's own store."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console

from pdx.cli.options import Sectioned, option
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.sim.replay import Point
    from pdx.bench.sim.requests import Trace

_SHARE = click.FloatRange(0.01, 1.0)
_PRICE = click.FloatRange(0)


@click.command(
    cls=Sectioned,
    sections={
        "--sessions": "Requests",
        "--host": "Memory, disk and store",
        "--model": "Engines and nodes",
        "--look-ahead": "Queues",
        "--gpu-price": "Prices",
        "--apart": "Options",
    },
)
@click.argument("traces", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[TRACE]...")
@option("--sessions", default=0, type=click.IntRange(0), help="Generate so many conversations, in place of TRACE.")
@option("--session-rate", default=1.0, type=click.FloatRange(0.001), help="Of those per second (Poisson).")
@option("--think", default="60s", help="Mean time to a session's next turn.")
@option("--window", default="2048", help="Tokens of the context of those; longer histories are cut.")
@option("--moves/--no-moves", default=False, help="Those send the hint `reuse: moved`, and keep their first block.")
@option("--block", default="64", help="Tokens of a block of those.")
@option("--rate", default=0.0, type=click.FloatRange(0), help="Requests per second.  [default: the trace's own]")
@option("--seed", default=1, type=int, help="Of what is generated.")
@option("--host", default="128GB", metavar="SIZE", help="Host memory for chunks.")
@option("--disk", default="", metavar="SIZE", help="A disk below it.  [default: none]")
@option("--disk-speed", default="7GB/s,5GB/s", help="Of loads, and of stores.")
@option("--disk-latency", default="100us", help="Of each.")
@option("--remote", default="", metavar="SIZE", help="A store that nodes share, below that.  [default: none]")
@option("--remote-speed", default="15Gbps", help="Of loads, and, behind a comma, of stores.")
@option("--remote-latency", default="5ms", help="Of each.")
@option("--policy", default="lru", help="As of pdx node, or belady, which knows the trace. With --sweep a list.")
@option("--disk-policy", default="lru", help="As of pdx node. With --policy belady the disk knows the trace, too.")
@option("--store", default="all", type=click.Choice(["all", "twice-seen", "write-back"]), help="As of pdx node.")
@option("--store-window", default=0.1, type=_SHARE, help="As of pdx node.")
@option("--model", default="llama-3.1-8b", help="A preset's name, or a Hugging Face config.json; as of pdx plan.")
@option("--gpu", default="h100", help="As of pdx plan.")
@option("--tp", default=1, type=click.IntRange(1), help="GPUs of one engine.")
@option("--engines", default=1, type=click.IntRange(1), help="That share a node.")
@option("--nodes", default=1, type=click.IntRange(1), help="Each with memory, disk and engines of its own.")
@option(
    "--routing",
    default="least-loaded",
    type=click.Choice(["round-robin", "least-loaded", "session", "prefix"]),
    help="As of pdx proxy.",
)
@option("--peer-speed", default="", metavar="RATE", help="Nodes fetch from each other.  [default: they do not]")
@option("--batch", default=64, type=click.IntRange(1), help="Requests of one engine that are under way at a time.")
@option("--mfu", default=0.5, type=_SHARE, help="As of pdx plan.")
@option("--mbu", default=0.7, type=_SHARE, help="As of pdx plan.")
@option("--link-share", default=0.8, type=_SHARE, help="As of pdx plan.")
@option("--step", default="3ms", help="As of pdx plan.")
@option("--look-ahead/--no-look-ahead", default=True, help="Engines tell the node what waits in their queues.")
@option("--early", default=8, type=click.IntRange(0), help="A request asks as it comes if fewer than this wait.")
@option("--queue-depth", default=0, type=click.IntRange(0), help="Requests come as soon as fewer wait, not by time.")
@option("--warm-up", default=0, type=click.IntRange(0), help="So many requests are not counted.")
@option("--any-load", is_flag=True, help="Load also what would be computed sooner.")
@option("--gpu-price", default=5.0, type=_PRICE, help="Dollars per hour, of a GPU …")
@option("--host-price", default=0.0088, type=_PRICE, help="… of a GB of host memory …")
@option("--disk-price", default=0.000082, type=_PRICE, help="… of a GB of disk …")
@option("--remote-price", default=0.00003, type=_PRICE, help="… and of a GB of the shared store.")
@option(
    "--apart",
    is_flag=False,
    flag_value="each",
    default="",
    type=click.Choice(["", "each", "after"]),
    metavar="[each|after]",
    help="Memory alone, as a plain cache's simulator: blocks one by one; after: room is made after each prompt.",
)
@option(
    "--sweep",
    default="",
    metavar="WHAT=…,…",
    help="Hit rate by capacity, host=16GB,64GB, or in shares of an hour's demand, host=0.1x; or by how long chunks are "
    "kept, by age or unused: age=60s,10m,1h or idle=60s,10m,1h.",
)
@option("--json", "as_json", is_flag=True, help="One JSON array instead of tables.")
def sim(
    *,
    traces: tuple[Path, ...],
    apart: str,
    sweep: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate nodes and their engines on virtual time, by a trace in Mooncake's form or by generated conversations.

    The node's store, its tiers and policies are the real ones; devices and GPUs have modelled speeds. The same seed
    gives the same result, bit for bit.

    \b
    pdx sim trace.jsonl.gz --host 128GB --disk 10TB --engines 4
    pdx sim --sessions 9000 --model llama-13b --gpu a100 --tp 2 --queue-depth 64
    pdx sim --sessions 9000 --sweep host=0.05x,0.1x,0.25x,0.5x
    """
    from pdx.bench.sim.options import traces_of

    if apart and sweep:
        raise ConfigError("--apart and --sweep are two different questions; ask one")
    chosen = SimpleNamespace(**options)
    found = traces_of(traces, chosen)
    if sweep:
        _sweep(found, chosen, sweep, as_json)
    elif apart:
        _apart(found, chosen, apart, as_json)
    else:
        _simulate(found, chosen, as_json)


def _simulate(traces: Sequence[Trace], options: SimpleNamespace, as_json: bool) -> None:
    from pdx.bench.harness.progress import ProgressBar
    from pdx.bench.sim.options import case_of
    from pdx.bench.sim.simulation import simulate
    from pdx.bench.sim.tables import result_tables

    case = case_of(options)
    results = []
    with ProgressBar() as bar:
        for trace in traces:
            bar.begin(len(trace.requests), trace.name)
            results.append(simulate(trace, case, bar.advance))
    if as_json:
        click.echo(msgspec.json.encode(results))
        return
    for result in results:
        for each in result_tables(result):
            _console().print(each)


def _apart(traces: Sequence[Trace], options: SimpleNamespace, way: str, as_json: bool) -> None:
    from pdx.bench.sim.options import case_of, policy_of
    from pdx.bench.sim.replay import replay
    from pdx.bench.sim.simulation import block_bytes
    from pdx.cli.tables import table

    case, policy = case_of(options), policy_of(options)
    rows: list[tuple[str, str, int, float]] = []
    for trace in traces:
        blocks = max(1, int(case.host_bytes / block_bytes(case, trace)))
        share = replay(trace, policy, blocks, way).hit_share
        rows.append((trace.name, policy, blocks, share))
    if as_json:
        columns = ("trace", "policy", "blocks", "hit_share")
        click.echo(msgspec.json.encode([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    lines = [(name, policy, f"{blocks:,}", f"{share:.1%}") for name, policy, blocks, share in rows]
    _console().print(table("memory alone", ("trace", "policy", ">blocks", ">hits"), lines))


def _sweep(traces: Sequence[Trace], options: SimpleNamespace, sweep: str, as_json: bool) -> None:
    from pdx.bench.harness.progress import ProgressBar
    from pdx.bench.sim.options import case_of, policy_of, seconds_of
    from pdx.bench.sim.replay import demand_bytes, sweep_capacities, sweep_times
    from pdx.bench.sim.tables import points_table

    policies = options.policy.split(",")
    for policy in policies:
        policy_of(SimpleNamespace(policy=policy))
    token_bytes = case_of(SimpleNamespace(**{**vars(options), "policy": "lru"})).model.kv_token_bytes
    what, _, values = sweep.partition("=")
    if what not in ("host", "age", "idle") or not values:
        raise ConfigError(f"--sweep {sweep!r}: write for example host=16GB,64GB or host=0.1x,0.25x or idle=60s,10m")
    times = [seconds_of(text) for text in values.split(",")] if what != "host" else []
    sizes = _sizes(values) if what == "host" else []
    points: list[Point] = []
    with ProgressBar(len(traces) * (len(times) or len(sizes) * len(policies))) as bar:
        on_point = partial(bar.advance, 1)
        for trace in traces:
            if times:
                points += sweep_times(trace, token_bytes, what, times, on_point)
                continue
            demand = demand_bytes(trace, token_bytes)
            rooms = [size * demand if is_share else size for size, is_share in sizes]
            points += sweep_capacities(trace, token_bytes, rooms, policies, on_point)
    if as_json:
        click.echo(msgspec.json.encode(points))
    else:
        _console().print(points_table(points))


def _sizes(values: str) -> list[tuple[float, bool]]:
    """Capacities, and whether each is a share of an hour's demand."""
    from pdx.config import parse_bytes

    found: list[tuple[float, bool]] = []
    for value in values.split(","):
        try:
            found.append((float(value[:-1]), True) if value.endswith("x") else (float(parse_bytes(value)), False))
            if not math.isfinite(found[-1][0]):
                raise ValueError(value)
        except ValueError as error:
            raise ConfigError(f"--sweep: {value!r} is neither a size nor a share; write 64GB or 0.25x") from error
        if not found[-1][0] > 0:
            raise ConfigError(f"--sweep: {value!r} is no room at all")
    return found


def _console() -> Console:
    return Console(width=None if os.isatty(1) else 120, highlight=False)
