"""The numbers that people quote, from a `records.Result`, and the goals they are held to. Arithmetic only.

Systems are compared inside a round, because machines are shared and their speed drifts: a ratio is the median over the
rounds of (the other's / ours).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from pdx.bench.records import Request, Result, Trace
from pdx.bench.report import Figure, at_least, at_most, plain

OURS = "pdx"  # the system that goals are about
OTHER = "nixl"  # the one it is compared with
ALONE = "plain"
TO_CLIENT = 10.0
TO_RUNNABLE = 2.5
COPIES, EXTRA_MS = 1.3, 15.0
TTFT = 1.05
TTFT_TOGETHER = 1.5
ITL = 1.0
TOGETHER = 4  # requests at once for which goals hold
OVERHEAD = 1.01
SHARE = 0.01
SMALLEST_MS = 0.1  # a handoff that vanishes counts as this, so that ratios stay finite

Value = Callable[[Request], float | None]


def to_client_ms(request: Request) -> float | None:
    """The client's first token without the prefill engine's work and queue; None: not known.

    HTTP and the tokenizer are in it, for every system alike.
    """
    if request.engines is None or request.decode_first_ms is None:
        return None
    return request.ttft_ms - request.engines.prefill_queue_ms - request.engines.prefill_ms


def to_runnable_ms(request: Request) -> float | None:
    """The decode engine's first token without both engines' work and the prefill engine's queue; None: not known.

    HTTP and the tokenizer are in it, for every system alike.
    """
    if request.engines is None or request.decode_first_ms is None:
        return None
    engines = request.engines
    work_ms = engines.prefill_queue_ms + engines.prefill_ms + engines.decode_first_ms
    return request.decode_first_ms - work_ms


def to_client_with_queue_ms(request: Request) -> float | None:
    """As `to_client_ms`, with the time that the request waited in the prefill engine's queue. Nobody else was there,
    so that is the connector's own doing: it looks chunks up, and asks for room."""
    handoff = to_client_ms(request)
    return None if handoff is None or request.engines is None else handoff + request.engines.prefill_queue_ms


def handoff_ms(trace: Trace) -> float | None:
    """From the end of prefill until the decode engine may run, by PDX's timeline."""
    marks = trace.marks
    return marks["runnable"] - marks["prefill_end"] if marks.keys() >= {"runnable", "prefill_end"} else None


def figures(result: Result) -> list[Figure]:
    """All of them; those without data are missing, see `missing`."""
    found: list[Figure] = []
    for tokens in sorted({request.prompt_tokens for request in result.requests}):
        found += _alone(result, tokens)
        for concurrency in sorted({request.concurrency for request in result.requests} - {1}):
            found += _together(result, tokens, concurrency)
    return found + _answers(result) + _overhead(result)


def missing(result: Result) -> list[str]:
    """Goals that this result says nothing about, and why."""
    ran = {request.system for request in result.requests}
    lacking = [
        f"{what}: {name} did not run ({result.not_run.get(name, 'not asked for')})"
        for name, what in ((OURS, "all goals"), (OTHER, "handoffs, TTFT and ITL against it"), (ALONE, "TTFT, answers"))
        if name not in ran
    ]
    if result.overhead is None:
        lacking.append("the benchmark's own overhead was not measured")
    if TOGETHER not in {request.concurrency for request in result.requests}:
        lacking.append(f"nothing was measured with {TOGETHER} requests at once")
    return lacking


def _alone(result: Result, tokens: int) -> list[Figure]:
    """Of requests that had everything for themselves."""
    rows = {system: _rows(result, system, tokens, 1) for system in _systems(result)}
    head = f"{tokens:,} tokens:"
    found = []
    for system, requests in rows.items():
        for what, value in (
            ("TTFT", _ttft),
            ("handoff to the client's first token", to_client_ms),
            ("the same with the prefill engine's queue", to_client_with_queue_ms),
            ("handoff until the decoder may run", to_runnable_ms),
            ("share of bytes moved when prefill ended", lambda request: request.hidden_share),
        ):
            values = _values(requests, value)
            if values:
                unit = "" if "share" in what else "ms"
                found.append(plain(f"{head} {system}: {what}", statistics.median(values), unit, _spread(values)))
    found += _memcpy(result, tokens, head)
    for system in rows:
        if system.startswith(OURS):
            found += _against(rows, system, head)
    return found


def _against(rows: Mapping[str, list[Request]], system: str, head: str) -> list[Figure]:
    """One PDX system against each other pair and against plain vLLM, request by request."""
    found = []
    for other in rows:
        if other.startswith(OURS):
            continue
        is_goal = (system, other) == (OURS, OTHER)
        for what, value, bound in (
            ("client's first token", lambda request: _positive(to_client_ms(request)), TO_CLIENT),
            ("client's first token with the queue", lambda request: _positive(to_client_with_queue_ms(request)), None),
            ("decoder may run", lambda request: _positive(to_runnable_ms(request)), TO_RUNNABLE),
        ):
            ratios = _ratios(rows[other], rows[system], value)
            name = f"{head} handoff, {other} / {system}, {what}"
            found += _ratio(name, ratios, bound if is_goal else None)
        if other == ALONE:
            ratios = _ratios(rows[system], rows[other], _ttft)
            name = f"{head} TTFT, {system} / prefill alone"
            found += _ratio(name, ratios, TTFT if system == OURS else None, is_upper=True)
    return found


def _memcpy(result: Result, tokens: int, head: str) -> list[Figure]:
    """The handoff by PDX's own timeline, against a copy of the same bytes."""
    nbytes = tokens * int(result.model.get("kv_bytes_per_token", 0))
    copies = [each.copy_ms for each in result.copies if each.nbytes == nbytes]
    if not copies:
        return []
    copy_ms = statistics.median(copies)
    found = [plain(f"{head} one memcpy of its KV", copy_ms, "ms", f"{nbytes:,} B")]
    for system in _systems(result):
        traces = [each for each in result.traces if (each.system, each.prompt_tokens) == (system, tokens)]
        handoffs = [handoff for each in traces if (handoff := handoff_ms(each)) is not None]
        if not handoffs:
            continue
        name = f"{head} {system}: prefill's end until the decoder may run, by its timeline"
        bound, value = round(COPIES * copy_ms + EXTRA_MS, 1), statistics.median(handoffs)
        note = f"1.3 memcpy + 15 ms; {_spread(handoffs)}"
        found.append(at_most(name, value, "ms", bound, note) if system == OURS else plain(name, value, "ms", note))
    return found


def _together(result: Result, tokens: int, concurrency: int) -> list[Figure]:
    """Of requests sent at once: means over those of a round."""
    rows = {system: _rows(result, system, tokens, concurrency) for system in _systems(result)}
    head = f"{tokens:,} tokens, {concurrency} at once:"
    found = []
    for system, requests in rows.items():
        for what, value in (("mean TTFT", _ttft), ("mean ITL", _itl)):
            means = list(_means(requests, value).values())
            if means:
                found.append(plain(f"{head} {system}: {what}", statistics.median(means), "ms", _spread(means)))
    for system in rows:
        for other in rows if system.startswith(OURS) else ():
            if other.startswith(OURS):
                continue
            is_goal = (system, other, concurrency) == (OURS, OTHER, TOGETHER)
            for what, value, bound in (("TTFT", _ttft, TTFT_TOGETHER), ("ITL", _itl, ITL)):
                own, theirs = _means(rows[system], value), _means(rows[other], value)
                ratios = [theirs[round_] / own[round_] for round_ in sorted(own.keys() & theirs.keys())]
                found += _ratio(f"{head} mean {what}, {other} / {system}", ratios, bound if is_goal else None)
    return found


def _answers(result: Result) -> list[Figure]:
    compared = [request.is_same for request in result.requests if request.is_same is not None]
    if not compared:
        return []
    return [at_least("answers equal to plain vLLM's", sum(compared) / len(compared), "", 1.0, f"{len(compared):,}")]


def _overhead(result: Result) -> list[Figure]:
    overhead = result.overhead
    if overhead is None:
        return []
    interval = f"95 %: {overhead.e2e_ratio_low:.4f} to {overhead.e2e_ratio_high:.4f}, {overhead.pairs} pairs"
    direct = f"{overhead.spans_per_request:.0f} spans of {overhead.span_us:.2f} µs in each request"
    return [
        at_most("time with tracing / without", overhead.e2e_ratio, "", OVERHEAD, interval),
        at_most("tracing's share of a request, counted", overhead.span_share, "", SHARE, direct),
        plain("share of the machine that this process used", overhead.bench_cpu_share, "", "while requests ran"),
    ]


def _systems(result: Result) -> list[str]:
    """Those that measured something, in the result's order."""
    ran = {request.system for request in result.requests}
    return [name for name in result.systems if name in ran] + sorted(ran - result.systems.keys())


def _rows(result: Result, system: str, tokens: int, concurrency: int) -> list[Request]:
    key = (system, tokens, concurrency)
    return [each for each in result.requests if (each.system, each.prompt_tokens, each.concurrency) == key]


def _values(requests: Iterable[Request], value: Value) -> list[float]:
    return [found for request in requests if (found := value(request)) is not None]


def _ratios(over: Iterable[Request], under: Iterable[Request], value: Value) -> list[float]:
    """Of requests of the same round that were alone."""
    above, below = ({request.round: value(request) for request in requests} for requests in (over, under))
    pairs = [(above[round_], below[round_]) for round_ in sorted(above.keys() & below.keys())]
    return [upper / lower for upper, lower in pairs if upper is not None and lower]


def _means(requests: Iterable[Request], value: Value) -> dict[int, float]:
    """By round."""
    grouped: dict[int, list[float]] = {}
    for request in requests:
        found = value(request)
        if found is not None:
            grouped.setdefault(request.round, []).append(found)
    return {round_: statistics.fmean(values) for round_, values in grouped.items()}


def _ratio(name: str, ratios: Sequence[float], bound: float | None, *, is_upper: bool = False) -> list[Figure]:
    if not ratios:
        return []
    value, note = statistics.median(ratios), f"median of {len(ratios)}; {_spread(ratios)}"
    if bound is None:
        return [plain(name, value, "×", note)]
    return [(at_most if is_upper else at_least)(name, value, "×", bound, note)]


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.2f} to {max(values):,.2f}"


def _positive(value: float | None) -> float | None:
    return None if value is None else max(value, SMALLEST_MS)


def _ttft(request: Request) -> float:
    return request.ttft_ms


def _itl(request: Request) -> float | None:
    return statistics.fmean(request.itl_ms) if request.itl_ms else None
