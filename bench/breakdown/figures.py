"""The figures to quote from a `records.Result`, and their goals. Arithmetic only.

Systems are compared within a round, because the speed of a shared machine drifts: a ratio is the median over the
rounds of (the other's / ours).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pdx.bench.breakdown.records import Request, Result, Trace
from pdx.bench.harness.report import Figure, at_least, at_most, plain

OURS = "pdx"  # the system that goals are about
OTHER = "nixl"  # the system it is compared with
ALONE = "plain"
KEEPING = "pdx-both"  # one engine that stores all KV it computes
TO_CLIENT = 10.0
TO_RUNNABLE = 2.5
COPIES, EXTRA_MS = 0.4, 15.0  # a load begins before prefill ends, and may end so many memcpys and ms after it
TTFT = 1.05
TTFT_TOGETHER = 1.5
ITL = 1.0
HIDDEN = 0.95
SLOWED = 1.03
TOGETHER = 4  # concurrent requests for which goals hold
SMALLEST_MS = 1.0  # the error of two clocks and a metric; a shorter handoff counts as this
RECOMPUTED = 256  # prompt tokens: a decode engine that computes more than a last block or chunk did not get their KV

MOVED = "share of bytes moved when prefill ended"
COPYING = "with the copying inside prefill"

Value = Callable[[Request], float | None]


def to_client_ms(request: Request) -> float | None:
    """Time to the client's first token without the prefill engine's work and queue; None: unknown.

    It includes the path of that token: for PDX, which sends the prefill engine's, one engine's API and tokenizer; for
    the others, those of both engines and the decode engine's first step.
    """
    if request.engines is None or request.decode_first_ms is None:
        return None
    return request.ttft_ms - request.engines.prefill_queue_ms - request.engines.prefill_ms


def to_runnable_ms(request: Request) -> float | None:
    """Time to the decode engine's first token without both engines' work and the prefill queue; None: unknown.

    It includes HTTP and the tokenizer for every system, and the decode engine's first step if the engine computed
    prompt tokens whose KV it should have been handed.
    """
    if request.engines is None or request.decode_first_ms is None:
        return None
    engines = request.engines
    first_ms = engines.decode_first_ms if engines.computed_tokens <= RECOMPUTED else 0.0
    work_ms = engines.prefill_queue_ms + engines.prefill_ms + first_ms
    return request.decode_first_ms - work_ms


def with_copying(handoff: Value) -> Value:
    """The same handoff plus the time that the prefill engine's forward pass stopped for copying, which the engine's
    metrics count as prefill. For copies inside the forward pass only, as on a CPU."""

    def value(request: Request) -> float | None:
        found = handoff(request)
        return None if found is None or request.parts is None else found + request.parts.gather.exposed_ms

    return value


def handoff_ms(trace: Trace) -> float | None:
    """From the end of prefill until the decode engine may run, by PDX's timeline; None: unknown."""
    marks = trace.marks
    return marks["runnable"] - marks["prefill_end"] if marks.keys() >= {"runnable", "prefill_end"} else None


def figures(result: Result) -> list[Figure]:
    """All figures for which the result has data."""
    found: list[Figure] = []
    for tokens in sorted({request.prompt_tokens for request in result.requests}):
        found += _alone(result, tokens)
        for concurrency in sorted({request.concurrency for request in result.requests} - {1}):
            found += _together(result, tokens, concurrency)
    return found + _answers(result)


def _alone(result: Result, tokens: int) -> list[Figure]:
    """Figures of requests that ran alone."""
    rows = {system: _rows(result, system, tokens, 1) for system in _systems(result)}
    head = f"{tokens:,} tokens:"
    copying = _with_copying(result)
    found = []
    for system, requests in rows.items():
        for what, unit, value in (
            ("TTFT", "ms", _ttft),
            ("handoff to the client's first token", "ms", to_client_ms),
            ("handoff until the decoder may run", "ms", to_runnable_ms),
            *((f"{what}, {COPYING}", "ms", value) for what, value in copying.items() if system.startswith(OURS)),
            (MOVED, "", _hidden),
            ("prompt tokens that the decoder computed", "", _computed),
        ):
            values = _values(requests, value)
            if not values:
                continue
            name, middle = f"{head} {system}: {what}", statistics.median(values)
            if (system, what) == (OURS, MOVED):
                found.append(at_least(name, middle, unit, HIDDEN, _spread(values)))
            else:
                found.append(plain(name, middle, unit, _spread(values)))
    for system, requests in rows.items():
        if system != ALONE:
            ratios = _ratios(requests, rows.get(ALONE, []), _prefill)
            bound = SLOWED if system == KEEPING else None
            name = f"{head} prefill by its engine's metrics, {system} / {ALONE}"
            found += _ratio(name, ratios, bound, is_upper=True)
    found += _memcpy(result, tokens, head)
    for system in rows:
        if system.startswith(OURS):
            found += _against(result, rows, system, head)
    return found


def _with_copying(result: Result) -> dict[str, Value]:
    """Handoffs to which copying is added, where the engines' metrics count it as prefill; else none."""
    if result.settings.get("is_gather_beside"):  # missing in older results, which are all from CPUs
        return {}
    return {
        "handoff to the client's first token": with_copying(to_client_ms),
        "handoff until the decoder may run": with_copying(to_runnable_ms),
    }


def _against(result: Result, rows: Mapping[str, list[Request]], system: str, head: str) -> list[Figure]:
    """Ratios of one PDX system to each system that is not PDX, request by request."""
    found = []
    copying = [
        (f"{what.partition(' the ')[2]}, {COPYING}", value, None) for what, value in _with_copying(result).items()
    ]
    for other in rows:
        if other.startswith(OURS):
            continue
        is_goal = (system, other) == (OURS, OTHER)
        for what, value, bound in (
            ("client's first token", to_client_ms, TO_CLIENT),
            ("decoder may run", to_runnable_ms, TO_RUNNABLE),
            *copying,
        ):
            ratios = _ratios(rows[other], rows[system], value, smallest=SMALLEST_MS)
            name = f"{head} handoff, {other} / {system}, {what}"
            found += _ratio(name, ratios, bound if is_goal else None)
        if other == ALONE:
            ratios = _ratios(rows[system], rows[other], _ttft)
            name = f"{head} TTFT, {system} / prefill alone"
            found += _ratio(name, ratios, TTFT if system == OURS else None, is_upper=True)
    return found


def _memcpy(result: Result, tokens: int, head: str) -> list[Figure]:
    """The handoff by PDX's own timeline, compared with a memcpy of the same size."""
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
        note = f"{COPIES} memcpy + 15 ms; {_spread(handoffs)}"
        found.append(at_most(name, value, "ms", bound, note) if system == OURS else plain(name, value, "ms", note))
    return found


def _together(result: Result, tokens: int, concurrency: int) -> list[Figure]:
    """Figures of concurrent requests, as means per round."""
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
                values = [theirs[round_] / own[round_] for round_ in sorted(own.keys() & theirs.keys())]
                ratios = _Ratios(values, len({each.round for each in (*rows[system], *rows[other])}))
                found += _ratio(f"{head} mean {what}, {other} / {system}", ratios, bound if is_goal else None)
    return found


def _answers(result: Result) -> list[Figure]:
    compared = [request.is_same for request in result.requests if request.is_same is not None]
    if not compared:
        return []
    note = f"{len(compared):,} of {sum(request.system != ALONE for request in result.requests):,} compared"
    return [at_least("answers equal to plain vLLM's", sum(compared) / len(compared), "", 1.0, note)]


def _systems(result: Result) -> list[str]:
    """The systems with measured requests, in the result's order."""
    ran = {request.system for request in result.requests}
    return [name for name in result.systems if name in ran] + sorted(ran - result.systems.keys())


def _rows(result: Result, system: str, tokens: int, concurrency: int) -> list[Request]:
    key = (system, tokens, concurrency)
    return [each for each in result.requests if (each.system, each.prompt_tokens, each.concurrency) == key]


def _values(requests: Iterable[Request], value: Value) -> list[float]:
    return [found for request in requests if (found := value(request)) is not None]


class _Ratios(NamedTuple):
    values: list[float]
    rounds: int  # in which either side was measured
    raised: int = 0  # values with a side raised to SMALLEST_MS


def _ratios(over: Iterable[Request], under: Iterable[Request], value: Value, *, smallest: float = 0.0) -> _Ratios:
    """Ratios of requests that ran alone, by round; a value below `smallest` counts as `smallest`."""
    above, below = ({request.round: value(request) for request in requests} for requests in (over, under))
    pairs = [(above[round_], below[round_]) for round_ in sorted(above.keys() & below.keys())]
    known = [(upper, lower) for upper, lower in pairs if upper is not None and lower is not None]
    raised = sum(min(pair) < smallest for pair in known)
    clamped = [(max(upper, smallest), max(lower, smallest)) for upper, lower in known]
    values = [upper / lower for upper, lower in clamped if lower]
    return _Ratios(values, len(above.keys() | below.keys()), raised)


def _means(requests: Iterable[Request], value: Value) -> dict[int, float]:
    grouped: dict[int, list[float]] = {}
    for request in requests:
        found = value(request)
        if found is not None:
            grouped.setdefault(request.round, []).append(found)
    return {round_: statistics.fmean(values) for round_, values in grouped.items()}


def _ratio(name: str, ratios: _Ratios, bound: float | None, *, is_upper: bool = False) -> list[Figure]:
    values = ratios.values
    if not values or (bound is None and 2 * ratios.raised >= len(values)):  # a ratio to SMALLEST_MS says nothing
        return []
    of = f" of {ratios.rounds} rounds" if len(values) < ratios.rounds else ""
    below = f"; {ratios.raised} below {SMALLEST_MS:g} ms counted as that" if ratios.raised else ""
    value, note = statistics.median(values), f"median of {len(values)}{of}; {_spread(values)}{below}"
    if bound is None:
        return [plain(name, value, "×", note)]
    return [(at_most if is_upper else at_least)(name, value, "×", bound, note)]


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.2f} to {max(values):,.2f}"


def _ttft(request: Request) -> float:
    return request.ttft_ms


def _itl(request: Request) -> float | None:
    return request.mean_itl_ms


def _hidden(request: Request) -> float | None:
    return request.hidden_share


def _prefill(request: Request) -> float | None:
    return request.engines.prefill_ms if request.engines is not None else None


def _computed(request: Request) -> float | None:
    if request.engines is None or request.decode_first_ms is None:
        return None
    return request.engines.computed_tokens
