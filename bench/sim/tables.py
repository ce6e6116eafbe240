"""The results of `pdx sim` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pdx.bench.plan.units import show_bytes, show_time
from pdx.bench.sim.replay import Point
from pdx.bench.sim.simulation import Result, Spread
from pdx.cli.tables import table


def result_tables(result: Result) -> Iterator[Table]:
    """Tables of what each tier found, and of latencies, time and cost."""
    found = [
        (
            tier.name,
            f"{tier.hit_tokens / result.tokens:.1%}",
            show_bytes(tier.loaded_bytes),
            show_bytes(tier.stored_bytes),
            f"{tier.evicted_blocks:,}",
            show_bytes(tier.most_bytes),
            f"{tier.busy_share:.0%}",
        )
        for tier in result.tiers
    ]
    columns = ("tier", ">hits", ">loaded", ">stored", ">evicted blocks", ">most at once", ">busy")
    words = f"{result.requests:,} requests, {result.tokens / 1e6:,.1f} M tokens of prompts"
    yield table(f"{result.trace}, {result.policy}: {words}", columns, found)
    facts = [
        ("hits, of all tokens of prompts", f"{result.hit_share:.1%}"),
        ("a store that forgets nothing", f"{result.possible_share:.1%}"),
        ("of the hits, in host memory at a request's turn", f"{result.host_share:.1%}"),
        ("… and when it arrived", f"{result.early_share:.1%}"),
        ("requests with hits, of those that could have some", f"{result.request_hit_share:.1%}"),
        ("TTFT: mean, p50, p90, p99", _spread(result.ttft_s)),
        ("wait for a turn", _spread(result.wait_s)),
        ("time, and GPU time (of it with prompts)", _times(result)),
        ("cost", f"${result.dollars:,.2f}; ${result.dollars_per_million:.3f} per million tokens"),
    ]
    yield table("", ("what", ">"), facts, header=False)


def _times(result: Result) -> str:
    return f"{result.seconds:,.0f} s, {result.gpu_s:,.0f} s ({result.prefill_gpu_s:,.0f} s)"


def _spread(spread: Spread) -> str:
    return ", ".join(show_time(each) for each in (spread.mean, spread.p50, spread.p90, spread.p99))


def points_table(points: Sequence[Point]) -> Table:
    is_time = any(point.kept_s for point in points)
    rows = [
        (
            point.trace,
            f"{point.policy}, {point.kept_s:g} s" if point.kept_s else point.policy,
            show_bytes(point.room_bytes),
            f"{point.of_demand:.3f}",
            f"{point.hit_share:.1%}",
            f"{point.of_possible:.1%}",
        )
        for point in points
    ]
    room = ">most at once" if is_time else ">capacity"
    columns = ("trace", "policy", room, ">of an hour's demand", ">hits", ">of those possible")
    return table("hit rate by time to live" if is_time else "hit rate by capacity", columns, rows)
