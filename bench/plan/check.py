"""The model against what was measured: calibrated at one prompt length, it predicts the others.

Requests sent at once are followed step by step through one engine, or through a prefill and a decode engine: what
vLLM's scheduler does with them, first come first served, in steps of at most `Engine.budget` prompt tokens. Seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec
from rich.table import Table

from pdx.bench.breakdown import records
from pdx.bench.plan.fit import Calibration, Measured, calibrate, choose_system, points, shapes_measured
from pdx.bench.plan.machines import INF, Engine
from pdx.bench.plan.shapes import Shapes
from pdx.bench.plan.transfer import Overlap, group_of, overlap
from pdx.bench.plan.units import show_rate
from pdx.errors import ConfigError


class Row(msgspec.Struct, frozen=True):
    """One quantity at one point. `is_own`: the model was calibrated with it, so it proves nothing."""

    quantity: str
    tokens: int
    concurrency: int
    measured: float
    predicted: float
    unit: str
    is_own: bool

    @property
    def error(self) -> float:
        """Relative to what was measured; of shares, their difference."""
        if self.unit == "share":
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else INF


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What `pdx plan --check` says."""

    kind: str = "pdx-plan-check"
    version: int = 1
    calibration: Calibration
    rows: list[Row]
    errors: dict[str, float]  # median of the absolute errors of each quantity, without what it was calibrated with


def check(result: records.Result, *, system: str = "", at: int = 0, shapes: Shapes | None = None) -> Check:
    """Calibrate `system` (empty: PDX's first) with prompts of `at` tokens (0: the middle length), predict the rest.

    :raises ConfigError: the result does not have it.
    """
    measured = points(result, choose_system(result, system))
    single = [point.tokens for point in measured if point.concurrency == 1 and point.prefill_s]
    if not single:
        raise ConfigError(
            f"{measured[0].system}: no prefill was measured with one request at a time; choose by --system"
        )
    found = calibrate(result, measured, shapes_measured(result, shapes), at=at or single[len(single) // 2])
    rows = [row for point in measured for row in _rows(found, point)]
    kinds = dict.fromkeys(row.quantity for row in rows if not row.is_own)
    errors = {
        kind: statistics.median(abs(row.error) for row in rows if row.quantity == kind and not row.is_own)
        for kind in kinds
    }
    return Check(calibration=found, rows=rows, errors=errors)


def way(found: Calibration, tokens: int) -> Overlap:
    """A prompt's transfer, as calibrated."""
    engine = found.engine
    return overlap(
        engine.prefill_steps(tokens),
        layers=engine.shapes.layers,
        layer_token_bytes=engine.shapes.kv_layer_bytes,
        wire_bytes_s=found.wire_bytes_s,
        group=group_of(engine.shapes.kv_layer_bytes, engine.shapes.layers),
    )


def control_s(found: Calibration) -> float:
    """Of a handoff, what is neither wire nor scatter: the calibration's constant, less what of the wire did not hide
    at its lengths."""
    if not found.is_wired:
        return found.control_s
    return max(0.0, found.control_s - statistics.median(way(found, other).exposed_s for other in found.at_tokens))


def handoff_s(found: Calibration, tokens: int) -> float:
    """Prefill has ended -> the decode engine may run: a constant, what of the wire does not hide, and the scatter."""
    nbytes = tokens * found.engine.shapes.kv_token_bytes
    exposed_s = way(found, tokens).exposed_s if found.is_wired else 0.0
    return control_s(found) + exposed_s + nbytes / found.scatter_bytes_s


def replayed(found: Calibration, point: Measured) -> list[Replayed]:
    """The requests of one point."""
    sizes = (point.tokens, point.concurrency, max(1, point.output_tokens))
    if point.handoff_s is None:
        return alone(found.engine, *sizes)
    return pair(found.engine, *sizes, handoff_s(found, point.tokens))


def _rows(found: Calibration, point: Measured) -> Iterator[Row]:
    own = point.concurrency == 1 and point.tokens in found.at_tokens
    where = (point.tokens, point.concurrency)

    def row(quantity: str, measured: float, predicted: float, scale: float = 1e3, unit: str = "ms") -> Row:
        return Row(quantity, *where, measured * scale, predicted * scale, unit, own)

    requests = replayed(found, point)
    if point.concurrency == 1:
        if point.prefill_s:
            yield row("prefill", point.prefill_s, found.engine.prefill_s(point.tokens))
        if point.scatter_s:
            nbytes = point.tokens * found.engine.shapes.kv_token_bytes
            yield row("scatter", point.scatter_s, nbytes / found.scatter_bytes_s)
        if point.handoff_s is not None:
            yield row("handoff", point.handoff_s, handoff_s(found, point.tokens))
        if point.hidden_share is not None:  # PDX alone
            share = way(found, point.tokens).hidden_bytes_share if found.is_wired else 1.0
            yield msgspec.structs.replace(row("hidden", point.hidden_share, share, 1.0, "share"), is_own=False)
    yield row("TTFT", point.ttft_s, mean_first_s(requests) + found.request_s)
    if point.itl_s:
        yield row("ITL", point.itl_s, mean_gap_s(requests))


def table(found: Check) -> Table:
    """All rows; those that the model was calibrated with are dim."""
    lengths = ", ".join(f"{tokens:,}" for tokens in found.calibration.at_tokens)
    title = f"{found.calibration.system}: measured, and predicted by a model calibrated at {lengths} tokens"
    shown = Table(title=title, title_justify="left")
    for name in ("quantity", "tokens", "at once", "measured", "predicted", "error"):
        shown.add_column(name, justify="left" if name == "quantity" else "right")
    for row in sorted(found.rows, key=lambda row: (_order(found.rows, row), row.concurrency, row.tokens)):
        form = "{:.3f}" if row.unit == "share" else "{:,.1f} ms"
        error = f"{row.error:+.3f}" if row.unit == "share" else f"{row.error:+.0%}"
        cells = (f"{row.tokens:,}", str(row.concurrency), form.format(row.measured), form.format(row.predicted))
        shown.add_row(row.quantity, *cells, "calibrated" if row.is_own else error, style="dim" if row.is_own else None)
    return shown


def speeds(found: Calibration) -> str:
    """The calibration in a line."""
    fast = found.engine.speeds
    parts = [f"matrices {fast.flops / 1e9:,.4g} GFLOPS, attention {fast.attention_flops / 1e9:,.4g} GFLOPS"]
    named = (("memory", fast.memory_bytes), ("scatter", found.scatter_bytes_s), ("wire", found.wire_bytes_s))
    parts += [f"{name} {show_rate(rate)}" for name, rate in named if rate < INF]
    parts.append(f"handoff {control_s(found) * 1e3:.1f} ms and TTFT {found.request_s * 1e3:.1f} ms besides")
    return "; ".join(parts)


def _order(rows: Sequence[Row], row: Row) -> int:
    return list(dict.fromkeys(other.quantity for other in rows)).index(row.quantity)


class Replayed(msgspec.Struct, frozen=True):
    """One request, from when all were sent."""

    first_s: float
    gaps_s: list[float]


class _Running(msgspec.Struct):
    """A request inside an engine."""

    left: int  # prompt tokens to compute
    done: int = 0
    times_s: list[float] = []


def alone(engine: Engine, tokens: int, count: int, output: int) -> list[Replayed]:
    """`count` prompts of so many tokens, all on one engine that prefills and decodes in the same steps."""
    requests = [_Running(tokens) for _ in range(count)]
    now = 0.0
    while any(len(request.times_s) < output for request in requests):
        decoding = [request for request in requests if not request.left and len(request.times_s) < output]
        pieces = _pieces(requests, engine.budget - len(decoding))
        now += _step_s(engine, len(decoding), tokens + output / 2, [(size, request.done) for request, size in pieces])
        for request, size in pieces:
            request.left -= size
            request.done += size
            if not request.left:
                request.times_s.append(now)
        for request in decoding:
            request.times_s.append(now)
    return [_replayed(request.times_s) for request in requests]


def pair(engine: Engine, tokens: int, count: int, output: int, handoff_s: float) -> list[Replayed]:
    """The same with a prefill engine, whose token goes to the client at once, and a decode engine like it."""
    firsts = [replayed.first_s for replayed in alone(engine, tokens, count, 1)]
    coming = [first + handoff_s for first in firsts]
    times = [[first] for first in firsts]
    now = 0.0
    while any(len(mine) < output for mine in times):
        ready = [mine for at, mine in zip(coming, times, strict=True) if at <= now and len(mine) < output]
        if not ready:
            now = min(at for at, mine in zip(coming, times, strict=True) if len(mine) < output)
            continue
        now += engine.step_s(len(ready), tokens + output / 2)
        for mine in ready:
            mine.append(now)
    return [_replayed(mine) for mine in times]


def mean_first_s(found: Sequence[Replayed]) -> float:
    """Of all requests."""
    return statistics.fmean(replayed.first_s for replayed in found)


def mean_gap_s(found: Sequence[Replayed]) -> float:
    """Of all tokens; 0 where there is one per request."""
    gaps = [gap for replayed in found for gap in replayed.gaps_s]
    return statistics.fmean(gaps) if gaps else 0.0


def _pieces(requests: Sequence[_Running], room: int) -> list[tuple[_Running, int]]:
    found = []
    for request in requests:
        size = min(request.left, room)
        if size > 0:
            found.append((request, size))
            room -= size
    return found


def _step_s(engine: Engine, batch: int, context: float, pieces: Sequence[tuple[int, int]]) -> float:
    (size, done), *more = pieces or [(0, 0)]
    extra_s = sum(engine.step_s(0, 0, other, before) - engine.speeds.step_s for other, before in more)
    return engine.step_s(batch, context, size, done) + extra_s


def _replayed(times_s: list[float]) -> Replayed:
    return Replayed(times_s[0], [b - a for a, b in zip(times_s, times_s[1:], strict=False)])
