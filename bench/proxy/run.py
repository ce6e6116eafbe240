"""A run of `pdx bench proxy`: latencies at the engines' pace, then engines that answer at once; and CPU time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from pdx.bench.harness import interrupts
from pdx.bench.harness.ask import Answer, AskFailed, ask, completion, gather_or_cancel, session
from pdx.bench.harness.commands import Step
from pdx.bench.harness.report import Figure, at_most, plain
from pdx.bench.harness.timing import CpuClock, Spread, spread_ms
from pdx.bench.proxy.stage import Front, Stage
from pdx.bench.proxy.stand_in_engine import MODEL, Pace

if TYPE_CHECKING:
    from pdx.bench.harness.commands import Run

FORWARD, SAMPLED = "forward", "sampled"
MODES = (FORWARD, SAMPLED)
DIRECT, PROXY, EXAMPLE = "direct", "proxy", "example"
TURNS = 8  # per way, so that disturbances on the machine affect all of them
REQUEST_MS, EVENT_US, OF_EXAMPLE = 1.5, 60.0, 0.5  # goals: CPU time of the proxy, or this share of the example's
AT_ONCE = Pace(0.0, 0.0)
PATHS = {FORWARD: "/v1/completions", SAMPLED: "/v1/chat/completions"}  # typical routes of the modes


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one kind. `requests`: per way."""

    mode: str
    concurrency: int
    prompt_tokens: int
    tokens: int
    requests: int

    @property
    def in_block(self) -> int:
        """Requests of one turn: enough to reach the concurrency."""
        return max(-(-self.requests // TURNS), self.concurrency)


@dataclass(frozen=True, slots=True)
class Way:
    """Latencies seen by clients of one way, and its cost."""

    ttft: Spread
    itl: Spread
    requests_per_s: float
    cpu_ms: float  # of the proxy, per request; 0: without a proxy
    exposed: Spread | None  # from the prefill leg's end to the first token; None: unknown


@dataclass(frozen=True, slots=True)
class Row:
    """One case."""

    mode: str
    concurrency: int
    prompt_tokens: int
    tokens: int
    requests: int  # per way
    direct: Way
    proxy: Way
    example: Way | None  # vLLM's
    added_ttft_p50_ms: float  # differences between the two ways
    added_ttft_p99_ms: float
    added_itl_p50_ms: float
    added_itl_p99_ms: float


def measure(stage: Stage, case: Case, *, is_saturated: bool = False) -> Row:
    """Measure one case; `is_saturated`: engines answer at once, and clients send the next request at once.

    :raises AskFailed: a request failed. :raises RuntimeError: the proxy changed an answer, or used another mode.
    """
    return interrupts.run(_Load(stage, case).run(AT_ONCE if is_saturated else stage.pace))


def exposed_ms(answer: Answer, ended: Mapping[str, float]) -> float:
    """Milliseconds from the prefill leg's end, by request id, to the client's first token, on the same machine's clock.

    :raises RuntimeError: there was no such leg, or it has not ended.
    """
    if answer.request_id not in ended:
        raise RuntimeError(f"request {answer.request_id} was answered, and no prefill leg of it has ended")
    return answer.sent_ns / 1e6 + answer.ttft_ms - ended[answer.request_id] * 1e3


class _Load:
    """One case in progress."""

    def __init__(self, stage: Stage, case: Case) -> None:
        self._stage = stage
        self._case = case
        self._numbers = itertools.count()
        self._text = "".join(random.Random(0).choices("abcdefgh ", k=2 * case.prompt_tokens))
        self._fronts = {DIRECT: None, PROXY: stage.proxy} | ({EXAMPLE: stage.example} if stage.example else {})
        self._answers: dict[str, list[Answer]] = {way: [] for way in self._fronts}
        self._took_s = dict.fromkeys(self._fronts, 0.0)
        self._cpu_s = dict.fromkeys(self._fronts, 0.0)  # of the proxy
        self._ended: dict[str, float] = {}  # when each prefill leg ended, by request id

    async def run(self, pace: Pace) -> Row:
        stage, case = self._stage, self._case
        async with session() as http:
            async with http.post(f"{stage.decode_url}/pace", json=asdict(pace), raise_for_status=True):
                pass
            for front in self._fronts.values():  # warm up; each request comes on its own connection
                await self._block(http, front, min(case.concurrency, case.in_block))
            for turn in range(TURNS):
                ways = list(self._fronts.items())
                for way, front in ways if turn % 2 else reversed(ways):
                    since, cpu_s = time.monotonic(), _cpu_s(front)
                    self._answers[way] += await self._block(http, front, case.in_block)
                    self._took_s[way] += time.monotonic() - since
                    self._cpu_s[way] += _cpu_s(front) - cpu_s
            async with http.get(f"{stage.decode_url}/ended", raise_for_status=True) as response:
                self._ended = await response.json()
            await self._check(http)
        return self._row()

    async def _block(self, http: aiohttp.ClientSession, front: Front | None, count: int) -> list[Answer]:
        """Send `count` requests with the case's concurrency. `front`: None: directly to the decode engine."""
        url = self._stage.decode_url if front is None else front.url
        left = iter(range(count))
        clients = min(self._case.concurrency, count)
        return sum(await gather_or_cancel(self._client(http, url, left) for _ in range(clients)), [])

    async def _client(self, http: aiohttp.ClientSession, url: str, left: Iterator[int]) -> list[Answer]:
        """Send requests one after the other while any are `left`."""
        path = PATHS[self._case.mode]
        return [await ask(http, url, self._body(), f"bench-{next(self._numbers)}", path=path) for _ in left]

    def _body(self) -> dict[str, Any]:
        number = f"{next(self._numbers):08d}"  # makes every prompt unique
        prompt = (number + self._text)[: 2 * self._case.prompt_tokens]
        body = completion(MODEL, prompt, self._case.tokens)
        if self._case.mode == SAMPLED:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": prompt}]
        return body

    async def _check(self, http: aiohttp.ClientSession) -> None:
        texts = {way: {answer.text for answer in answers} for way, answers in self._answers.items()}
        for way, front in self._fronts.items():
            if texts[way] != texts[DIRECT] or len(texts[DIRECT]) != 1:
                raise RuntimeError(f"an answer through the proxy ({way}) is not the engine's")
            if front is not None and front.admin_url:
                await self._check_mode(http, front, self._answers[way][-1].transfer)

    async def _check_mode(self, http: aiohttp.ClientSession, front: Front, transfer: str) -> None:
        try:
            async with http.get(f"{front.admin_url}/pdx/requests/{transfer}", raise_for_status=True) as response:
                found = (await response.json())["mode"]
        except aiohttp.ClientError as error:
            raise AskFailed(f"the proxy does not tell what it did with transfer {transfer!r}: {error}") from error
        if found != self._case.mode:
            raise RuntimeError(f"the proxy served a request in mode {found} that was made for {self._case.mode}")

    def _way(self, way: str) -> Way:
        answers = self._answers[way]
        has_legs = way not in (DIRECT, EXAMPLE)  # the example's legs have other names
        exposed = spread_ms([exposed_ms(answer, self._ended) for answer in answers]) if has_legs else None
        return Way(
            ttft=spread_ms([answer.ttft_ms for answer in answers]),
            itl=spread_ms([gap for answer in answers for gap in answer.itl_ms]),
            requests_per_s=round(len(answers) / self._took_s[way], 2),
            cpu_ms=round(self._cpu_s[way] * 1e3 / len(answers), 4),
            exposed=exposed,
        )

    def _row(self) -> Row:
        case = self._case
        ways = {way: self._way(way) for way in self._fronts}
        direct, proxy = ways[DIRECT], ways[PROXY]
        return Row(
            **asdict(case) | {"requests": len(self._answers[PROXY])},
            direct=direct,
            proxy=proxy,
            example=ways.get(EXAMPLE),
            added_ttft_p50_ms=round(proxy.ttft.p50_ms - direct.ttft.p50_ms, 3),
            added_ttft_p99_ms=round(proxy.ttft.p99_ms - direct.ttft.p99_ms, 3),
            added_itl_p50_ms=round(proxy.itl.p50_ms - direct.itl.p50_ms, 3),
            added_itl_p99_ms=round(proxy.itl.p99_ms - direct.itl.p99_ms, 3),
        )


def _cpu_s(front: Front | None) -> float:
    """CPU time of a proxy so far; 0 without a proxy."""
    return 0.0 if front is None else CpuClock(front.pid).seconds()


def steps_of(
    run: Run,
    stage: Stage,
    *,
    modes: Sequence[str],
    concurrency: Sequence[int],
    prompt_tokens: Sequence[int],
    tokens: Sequence[int],
    requests: int,
) -> list[Step]:
    """Each case at the engines' pace, with the most tokens, and with the fewest to get the cost of a single token; then
    with engines that answer at once, with the most clients, whose tokens arrive together."""
    alone = sorted(concurrency)[len(concurrency) // 2]
    at_pace = [(count, max(tokens)) for count in concurrency] + [(alone, each) for each in tokens if each < max(tokens)]
    cases = [
        (Case(mode, count, length, most, requests), is_saturated)
        for is_saturated, kinds in ((False, at_pace), (True, [(max(concurrency), each) for each in tokens]))
        for mode in modes
        for length in prompt_tokens
        for count, most in kinds
    ]
    rows: dict[tuple[str, int, int, bool], list[Row]] = {}  # rows that differ only in their number of tokens

    def step(case: Case, *, is_saturated: bool) -> list[Figure]:
        row = measure(stage, case, is_saturated=is_saturated)
        run.details["rows"].append({"is_saturated": is_saturated, **asdict(row)})
        alike = rows.setdefault((case.mode, case.prompt_tokens, case.concurrency, is_saturated), [])
        alike.append(row)
        found = saturated_figures(row) if is_saturated else figures(row)
        if len(alike) == len(set(tokens)) > 1:
            fewest, *_, most = sorted(alike, key=lambda row: row.tokens)
            found += cost_figures(fewest, most, alone=not is_saturated)
        return found

    return [
        Step(case_title(case) + (", saturated" if is_saturated else ""), partial(step, case, is_saturated=is_saturated))
        for case, is_saturated in cases
    ]


def figures(row: Row) -> list[Figure]:
    """What the proxy adds at the engines' pace."""
    name, exposed = case_title(row), row.proxy.exposed
    assert exposed is not None
    directly = f"{row.proxy.ttft.p50_ms:.2f}, directly {row.direct.ttft.p50_ms:.2f}"
    return [
        plain(f"{name}: added TTFT, p50", row.added_ttft_p50_ms, "ms", directly),
        plain(f"{name}: added TTFT, p99", row.added_ttft_p99_ms, "ms"),
        plain(f"{name}: exposed, prefill's end → first token, p50", exposed.p50_ms, "ms"),
        plain(f"{name}: exposed, prefill's end → first token, p99", exposed.p99_ms, "ms"),
        plain(f"{name}: added inter-token latency, p50", row.added_itl_p50_ms, "ms"),
        plain(f"{name}: added inter-token latency, p99", row.added_itl_p99_ms, "ms"),
        plain(f"{name}: CPU of the proxy per request", row.proxy.cpu_ms, "ms"),
    ]


def saturated_figures(row: Row) -> list[Figure]:
    """Requests per second with engines that answer at once."""
    name = f"{case_title(row)}, saturated"
    note = f"directly {row.direct.requests_per_s:,.1f}"
    return [
        plain(f"{name}: requests", row.proxy.requests_per_s, "1/s", note),
        plain(f"{name}: CPU of the proxy per request", row.proxy.cpu_ms, "ms"),
    ]


def cost_figures(fewer: Row, more: Row, *, alone: bool) -> list[Figure]:
    """CPU time of the proxy and of vLLM's example, from two rows that differ in their number of tokens. `alone`: tokens
    arrive one at a time; arriving together, they cost too little to be compared."""
    name = f"{more.mode}, prompts of {more.prompt_tokens:,}, tokens {'alone' if alone else 'together'}"
    token_us, request_ms = _cost(fewer.proxy, more.proxy, fewer.tokens, more.tokens)
    found = [
        at_most(f"{name}: CPU of the proxy per request, without its tokens", request_ms, "ms", REQUEST_MS),
        at_most(f"{name}: CPU of the proxy per token", token_us, "µs", EVENT_US),
    ]
    if fewer.example is not None and more.example is not None:
        theirs_us, theirs_ms = _cost(fewer.example, more.example, fewer.tokens, more.tokens)
        pairs = {"request": (request_ms, theirs_ms, "ms")} | ({"token": (token_us, theirs_us, "µs")} if alone else {})
        for what, (here, theirs, unit) in pairs.items():
            note = f"{here:.3g} / {theirs:.3g} {unit}"
            found.append(at_most(f"{name}: CPU per {what}, of the example's", here / theirs, "", OF_EXAMPLE, note))
    return found


def _cost(fewer: Way, more: Way, fewer_tokens: int, more_tokens: int) -> tuple[float, float]:
    """µs per token, and ms per request without tokens."""
    token_ms = (more.cpu_ms - fewer.cpu_ms) / (more_tokens - fewer_tokens)
    return token_ms * 1e3, fewer.cpu_ms - token_ms * fewer_tokens


def case_title(case: Case | Row) -> str:
    return f"{case.mode}, {case.concurrency} at once, {case.prompt_tokens:,} + {case.tokens} tokens"
