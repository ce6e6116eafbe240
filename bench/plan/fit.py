"""A machine's speeds from what `pdx bench breakdown` measured on it, in place of a data sheet's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.breakdown import records
from pdx.bench.plan.machines import INF, Engine, Speeds
from pdx.bench.plan.shapes import PRESETS, Shapes
from pdx.errors import ConfigError

BUDGET = 2048  # prompt tokens in a step, of vLLM on CPUs where nothing else is said
_BUDGET_FLAG = "--max-num-batched-tokens"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One system at one length and concurrency: medians over rounds. Seconds; None: not measured."""

    system: str
    tokens: int
    concurrency: int
    output_tokens: int
    prefill_s: float | None
    wire_s: float | None
    scatter_s: float | None
    handoff_s: float | None
    ttft_s: float
    itl_s: float | None  # mean of all gaps
    step_s: float | None  # median of the gaps after the first
    hidden_share: float | None
    moved_bytes: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What one system did on one machine, as parameters of the model."""

    system: str
    at_tokens: list[int]  # the lengths that it was taken from
    engine: Engine
    is_wired: bool  # the KV goes from node to node, layer by layer
    wire_bytes_s: float
    scatter_bytes_s: float  # of what moves after prefill: for systems other than PDX, the whole transfer
    control_s: float  # of a handoff, what is not scatter: with a wire also what of it did not hide
    request_s: float  # of TTFT, what is not prefill


def load_result(path: Path) -> records.Result:
    """:raises ConfigError: it cannot be read, is no such result, or nothing in it was measured."""
    try:
        result = records.load(path)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not the result.json of `pdx bench breakdown`: {error}") from error
    if result.kind != records.KIND or not result.requests:
        raise ConfigError(f"{path} (kind {result.kind!r}) has no requests of `pdx bench breakdown` in it")
    return result


def shapes_measured(result: records.Result, given: Shapes | None) -> Shapes:
    """The model that ran: `given`, or found by its name or its KV.

    :raises ConfigError: it is not known, or `given` has another KV than what was measured.
    """
    said = result.model
    shapes = given or PRESETS.get(str(said.get("name", "")).lower())
    if shapes is None:
        fitting = (one for one in PRESETS.values() if one.kv_token_bytes == said.get("kv_bytes_per_token"))
        shapes = next((one for one in fitting if one.layers == said.get("layers")), None)
    if shapes is None:
        raise ConfigError(f"model {said.get('name')!r} of that result is not known; give its config.json by --model")
    if said.get("kv_bytes_per_token") not in (None, shapes.kv_token_bytes):
        raise ConfigError(
            f"{shapes.name} has {shapes.kv_token_bytes:,.0f} bytes of KV per token, that result was measured with "
            f"{said['kv_bytes_per_token']:,}; give the right config.json by --model"
        )
    return shapes


def budget_measured(result: records.Result) -> int:
    """Prompt tokens in a step, from the flags that the engines got."""
    flags = [str(flag) for value in result.settings.values() if isinstance(value, list) for flag in value]
    if _BUDGET_FLAG in flags[:-1]:
        text = flags[flags.index(_BUDGET_FLAG) + 1]
        return int(text) if text.isdigit() and int(text) else BUDGET
    return BUDGET


def points(result: records.Result, system: str) -> list[Measured]:
    """All of one system, shortest first."""
    mine = [request for request in result.requests if request.system == system]
    cases = sorted({(request.concurrency, request.prompt_tokens) for request in mine})
    return [
        _point([request for request in mine if (request.concurrency, request.prompt_tokens) == case]) for case in cases
    ]


def choose_system(result: records.Result, wanted: str) -> str:
    """`wanted`, or the first of PDX's systems that measured parts, or any system.

    :raises ConfigError: `wanted` is not in the result.
    """
    found = list(dict.fromkeys(request.system for request in result.requests))
    if wanted:
        if wanted not in found:
            raise ConfigError(f"system {wanted!r} measured nothing in that result; there are {', '.join(found)}")
        return wanted
    return min(found, key=lambda name: (not name.startswith("pdx"), found.index(name)))


def calibrate(
    result: records.Result, measured: Sequence[Measured], shapes: Shapes, *, at: int = 0, room_bytes: float = INF
) -> Calibration:
    """From the length `at` alone, or (0) from all lengths that were measured one request at a time.

    :raises ConfigError: there is no such measurement.
    """
    single = [point for point in measured if point.concurrency == 1 and point.prefill_s]
    used = [point for point in single if at in (0, point.tokens)]
    if not used:
        there = ", ".join(f"{point.tokens:,}" for point in single) or "none"
        wanted = f"{at:,} tokens" if at else "any length"
        raise ConfigError(f"no prefill of {wanted} was measured with one request at a time; there is: {there}")
    flops, attention_flops = fit_flops(shapes, [(point.tokens, point.prefill_s or 0.0) for point in used])
    memory_bytes = _median([_read_rate(shapes, point) for point in used]) or INF
    speeds = Speeds(
        flops=flops,
        attention_flops=attention_flops,
        memory_bytes=memory_bytes,
        room_bytes=room_bytes,
        reduce_bytes=INF,
    )
    system = used[0].system
    is_layered = system.startswith("pdx")
    afters = [point.scatter_s if is_layered else point.wire_s for point in used]
    handoffs = [
        point.handoff_s - (after_s or 0.0)
        for point, after_s in zip(used, afters, strict=True)
        if point.handoff_s is not None
    ]
    return Calibration(
        system=system,
        at_tokens=[point.tokens for point in used],
        engine=Engine(shapes, speeds, budget=budget_measured(result)),
        is_wired=is_layered and any(point.wire_s for point in used),
        wire_bytes_s=_median([_rate(shapes, point, point.wire_s) for point in used if is_layered]) or INF,
        scatter_bytes_s=_median([_rate(shapes, point, each) for point, each in zip(used, afters, strict=True)]) or INF,
        control_s=max(0.0, _median(handoffs) or 0.0),
        request_s=max(0.0, _median([point.ttft_s - (point.prefill_s or 0.0) for point in used]) or 0.0),
    )


def fit_flops(shapes: Shapes, times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Operations per second of matrices and of attention: seconds = linear(n) / a + attention(n) / b.

    From one length, one speed for both. From more, both by least squares of relative errors; one where the two do not
    both come out positive (lengths too close together, or too noisy).
    """
    rows = [(shapes.linear_flops(tokens), shapes.attention_flops(tokens, 0), seconds) for tokens, seconds in times]
    together = _median([(linear + attention) / seconds for linear, attention, seconds in rows]) or INF
    if len({tokens for tokens, _ in times}) < 2:
        return together, together
    scaled = [(linear / seconds, attention / seconds) for linear, attention, seconds in rows]
    xx, xy = sum(x * x for x, _ in scaled), sum(x * y for x, y in scaled)
    yy, x1, y1 = sum(y * y for _, y in scaled), sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    if determinant <= 1e-9 * xx * yy:
        return together, together
    a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    return (1 / a, 1 / b) if a > 0 and b > 0 else (together, together)


def _point(requests: Sequence[records.Request]) -> Measured:
    first = requests[0]

    def median(value: Callable[[records.Request], float | None], scale: float = 1e-3) -> float | None:
        """Of the rounds' means."""
        rounds: dict[int, list[float]] = {}
        for request in requests:
            if (found := value(request)) is not None:
                rounds.setdefault(request.round, []).append(found * scale)
        return statistics.median(statistics.fmean(values) for values in rounds.values()) if rounds else None

    def part(name: str) -> float | None:
        return median(lambda request: getattr(request.parts, name).total_ms if request.parts else None)

    return Measured(
        system=first.system,
        tokens=first.prompt_tokens,
        concurrency=first.concurrency,
        output_tokens=max(request.output_tokens for request in requests),
        prefill_s=median(_prefill_ms),
        wire_s=part("wire"),
        scatter_s=part("scatter"),
        handoff_s=median(_handoff_ms),
        ttft_s=median(lambda request: request.ttft_ms) or 0.0,
        itl_s=median(lambda request: statistics.fmean(request.itl_ms) if request.itl_ms else None),
        step_s=median(lambda request: _median(request.itl_ms[1:])),
        hidden_share=median(lambda request: request.hidden_share, 1.0),
        moved_bytes=median(lambda request: request.moved_bytes, 1.0) or 0.0,
    )


def _prefill_ms(request: records.Request) -> float | None:
    """Scheduled to first token, by the engine's own account; else by the timeline's."""
    if request.engines is not None and request.engines.prefill_ms > 0:
        return request.engines.prefill_ms
    return request.parts.prefill.total_ms + request.parts.gather.exposed_ms if request.parts else None


def _handoff_ms(request: records.Request) -> float | None:
    """Prefill has ended -> the decode engine may run, as docs/bench.md defines it."""
    if request.decode_first_ms is None or request.engines is None:
        return None
    engines = request.engines
    return request.decode_first_ms - engines.prefill_queue_ms - engines.prefill_ms - engines.decode_first_ms


def _read_rate(shapes: Shapes, point: Measured) -> float | None:
    """Bytes of weights and KV per second while one request decodes."""
    if not point.step_s:
        return None
    context = point.tokens + point.output_tokens / 2
    return (shapes.touched_params(1) * shapes.weight_bytes + context * shapes.kv_token_bytes) / point.step_s


def _rate(shapes: Shapes, point: Measured, seconds: float | None) -> float | None:
    return (point.moved_bytes or point.tokens * shapes.kv_token_bytes) / seconds if seconds else None


def _median(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.median(known) if known else None
