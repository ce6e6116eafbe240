"""Runs a trace through simulated nodes and their engines: what was found, where, and the time and cost."""

from __future__ import annotations

import heapq
import math
import statistics
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from pdx.bench.plan.machines import Engine as Model
from pdx.bench.sim.clock import Clock
from pdx.bench.sim.engine import Served, Settings, SimulatedEngine
from pdx.bench.sim.node import TICK_S, SimulatedNode
from pdx.bench.sim.oracle import Belady, Future
from pdx.bench.sim.replay import BELADY
from pdx.bench.sim.requests import Request, Trace, possible_hits
from pdx.bench.sim.routing import Router
from pdx.bench.sim.tier import Device, ModelledTier
from pdx.config import StoreChoice
from pdx.errors import ConfigError, PdxError
from pdx.memory.arena import GRANULE_BYTES
from pdx.proxy.config import Routing

HOST = "host"
PEER_S = 0.001  # until another node sends the first bytes of a fetch


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """US dollars per hour."""

    gpu: float = 5.0  # per GPU
    host_gb: float = 0.0088
    disk_gb: float = 0.000082
    remote_gb: float = 0.00003


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is simulated except the trace."""

    model: Model
    nodes: int = 1
    engines: int = 1  # per node
    routing: Routing = Routing.LEAST_LOADED
    peer_bytes_s: float = 0.0  # between two nodes; 0: they do not fetch from each other
    settings: Settings
    host_bytes: int
    devices: Sequence[Device] = ()
    policy: str = "lru"
    disk_policy: str = "lru"
    store: StoreChoice = "all"
    window: float = 0.1
    queue: int = 0  # a closed loop: requests arrive while fewer than this wait; 0: they arrive when the trace says
    warm_up: int = 0  # the number of leading requests that are not counted
    pays: bool = True  # skip loads that take longer than computing
    prices: Prices = Prices()


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles of times in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles are by rank; without values all are 0."""
        ranked = sorted(values)
        if not ranked:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (ranked[min(len(ranked) - 1, int(len(ranked) * share))] for share in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(ranked), p50, p90, p99)


class TierUse(msgspec.Struct, frozen=True):
    """What one tier did. Tokens of prompts, real bytes."""

    name: str
    hit_tokens: int  # of a tier below, those loaded after their request's turn came; of host memory, the others
    loaded_bytes: float
    stored_bytes: float
    evicted_blocks: int
    most_bytes: float  # the most it held at a time
    busy_share: float  # of the time; of loads and stores, the busier


class Result(msgspec.Struct, frozen=True):
    """The result of a simulation. Shares are of the tokens of all counted prompts."""

    trace: str
    policy: str
    requests: int
    tokens: int
    output_tokens: int
    hit_share: float
    possible_share: float  # that a store without evictions would find
    request_hit_share: float  # of the requests for which hits are possible, those that had some
    early_share: float  # of the tokens found, those that were in host memory when their request arrived
    tiers: list[TierUse]
    ttft_s: Spread
    wait_s: Spread  # until a turn
    seconds: float
    gpu_s: float  # busy time of the engines, times the GPUs of each
    prefill_gpu_s: float
    dollars: float
    dollars_per_million: float  # tokens, of prompts and answers
    counters: dict[str, int]

    @property
    def host_share(self) -> float:
        """The share of the tokens found that no tier below loaded after their request's turn had come."""
        total = sum(tier.hit_tokens for tier in self.tiers)
        return self.tiers[0].hit_tokens / total if total else 0.0


def block_bytes(case: Case, trace: Trace) -> float:
    """Real bytes of one block's KV."""
    return case.model.kv_token_bytes * trace.block_tokens


def simulate(trace: Trace, case: Case, on_progress: Callable[[int], None] = lambda count: None) -> Result:
    """`on_progress`: called from time to time with the number of requests that have ended since.

    :raises ConfigError: the case makes no sense.
    """
    blocks = int(case.host_bytes / block_bytes(case, trace))
    longest = max(len(request.keys) + len(request.answer_keys) for request in trace.requests)
    if blocks < max(256, longest):
        size = max(256, longest) * block_bytes(case, trace) / 1e9
        raise ConfigError(f"--host: {blocks} blocks are too few to simulate a node; give at least {size:.3g}GB")
    if case.warm_up >= len(trace.requests):
        raise ConfigError(
            f"--warm-up: of {len(trace.requests)} requests {case.warm_up} are not to be counted, and so none would be"
        )
    future = Future(trace.requests) if case.policy == BELADY else None
    if future is not None and case.nodes > 1:
        raise ConfigError(f"--policy {BELADY} knows one node's future, and --nodes is {case.nodes}")
    clock = Clock()
    with ExitStack() as stack:
        nodes = []
        for _ in range(case.nodes):
            node = SimulatedNode(
                Path(stack.enter_context(tempfile.TemporaryDirectory())),
                clock,
                blocks=blocks,
                block_bytes=block_bytes(case, trace),
                devices=case.devices,
                policy="lru" if future is not None else case.policy,
                disk_policy=case.disk_policy,
                maker=(lambda _: Belady(future)) if future is not None else None,
                wanted=future,
                store=case.store,
                window=case.window,
            )
            stack.callback(node.close)
            nodes.append(node)
        for node in nodes if case.peer_bytes_s else ():
            network = Device(
                name="peers",
                kind="peers",
                room_bytes=0,
                load_bytes_s=case.peer_bytes_s,
                store_bytes_s=case.peer_bytes_s,
                latency_s=PEER_S,
            )
            node.add_peers([each for each in nodes if each is not node], network)
        run = _Run(trace, case, clock, nodes, future, on_progress)
        run.run()
        return run.result()


class _Run:
    def __init__(
        self,
        trace: Trace,
        case: Case,
        clock: Clock,
        nodes: Sequence[SimulatedNode],
        future: Future | None,
        on_progress: Callable[[int], None],
    ) -> None:
        self._trace = trace
        self._case = case
        self._clock = clock
        self._nodes = nodes
        self._future = future
        self._on_progress = on_progress
        self._served: list[Served] = []
        self._num_ended = 0
        self._next = 0  # the index of the next request in the trace
        self._is_timed = False  # whether its arrival is scheduled
        self._talking: dict[str, deque[int]] = {}  # session with a turn in flight -> its turns that wait for the end
        self._ready: deque[int] = deque()  # turns that have waited and may arrive now
        self._counted_at = 0.0  # when counting began …
        self._before: dict[str, float] = {}  # … and the totals then
        # With a hundred nodes, an event concerns one of them: only nodes with something to do take a turn.
        self._touched: dict[int, SimulatedNode] = {}
        self._events: dict[SimulatedEngine, None] = {}
        self._ticks = [(0.0, number) for number in range(len(nodes))]  # a heap: when to check each node for a due tick
        self._due_at = [math.inf] * len(nodes)  # per node, when its next late answer is due …
        self._late: list[tuple[float, int]] = []  # … and a heap of these times, some of them out of date
        numbers = {id(node): number for number, node in enumerate(nodes)}
        for node in nodes:
            node.on_touched = lambda node: self._touched.update({numbers[id(node)]: node})
        self._engines = [
            SimulatedEngine(
                case.model,
                case.settings,
                clock,
                node,
                trace.block_tokens,
                on_event=self._has_event,
                on_turn=self._has_turn,
                on_over=self._ended,
            )
            for node in nodes
            for _ in range(case.engines)
        ]
        self._router = Router(case.routing, nodes, self._engines, trace.block_tokens)
        for node in nodes if case.pays else ():
            node.report_pace(case.model.prefill_s(trace.block_tokens * 16) / 16)

    def run(self) -> None:
        self._start_due()
        while True:
            self._settle()
            if self._num_ended == len(self._trace.requests):
                return
            if self._late and self._late[0][0] < self._clock.next_at:
                self._clock.call_at(self._late[0][0], lambda: None)
            if not self._clock.step():
                raise PdxError("the simulation stands still, though requests are not over")
            while self._clock.next_at <= self._clock.now:
                self._clock.step()

    def _has_event(self, engine: SimulatedEngine) -> None:
        self._events[engine] = None

    def _settle(self) -> None:
        """Let nodes and engines act on the last events, until nothing more follows at this moment."""
        now = self._clock.now
        while self._ticks[0][0] <= now:
            number = heapq.heappop(self._ticks)[1]
            node = self._nodes[number]
            if node.tick_at <= now:
                self._touched[number] = node
            heapq.heappush(self._ticks, (max(node.tick_at, now + TICK_S), number))
        while self._late and self._late[0][0] <= now:
            number = heapq.heappop(self._late)[1]
            self._touched[number] = self._nodes[number]
        while True:
            touched, self._touched = self._touched, {}
            for number, node in sorted(touched.items()):
                node.turn()
                if (due_at := node.due_at) != self._due_at[number]:
                    self._due_at[number] = due_at
                    heapq.heappush(self._late, (due_at, number))
            events, self._events = self._events, {}
            for engine in events:
                engine.advance()
            if self._case.queue:
                self._start_due()
            if not (self._touched or self._events):
                return

    def _start_due(self) -> None:
        """Let requests arrive that are due or, in a closed loop, that the queues have room for. A session's next turn
        arrives only when the one before is over."""
        requests, queue = self._trace.requests, self._case.queue
        while self._next < len(requests) or self._ready:
            if queue and sum(engine.num_waiting for engine in self._engines) >= queue:
                return
            if self._ready:
                self._arrive(self._ready.popleft())
                continue
            request = requests[self._next]
            if not queue and request.at_s > self._clock.now:
                if not self._is_timed:
                    self._is_timed = True
                    self._clock.call_at(request.at_s, self._on_due)
                return
            number, self._next = self._next, self._next + 1
            if request.session in self._talking:
                self._talking[request.session].append(number)
            else:
                self._arrive(number)

    def _on_due(self) -> None:
        self._is_timed = False
        self._start_due()

    def _arrive(self, number: int) -> None:
        request = self._trace.requests[number]
        if request.session:
            self._talking.setdefault(request.session, deque())
        served = Served(number, request, self._clock.now)
        if len(self._served) == self._case.warm_up:
            self._counted_at, self._before = self._clock.now, self._totals()
        if self._future is not None:
            self._future.mark_arrived(number)
            self._nodes[0].refresh(request.keys)
        self._served.append(served)
        self._router.place(served).arrive(served)

    def _has_turn(self, served: Served) -> None:
        if self._future is not None:
            self._future.mark_turn(served.number)
            self._nodes[0].refresh(served.request.keys)

    def _ended(self, served: Served) -> None:
        self._num_ended += 1
        self._router.end(served)
        session = served.request.session
        if session and self._talking[session]:
            self._ready.append(self._talking[session].popleft())
            self._clock.call_at(self._clock.now, self._start_due)
        elif session:
            del self._talking[session]
        if self._future is not None:
            self._nodes[0].refresh(served.request.keys)
        if not self._num_ended % 64 or self._num_ended == len(self._trace.requests):
            self._on_progress((self._num_ended - 1) % 64 + 1)

    # ---- results ----------------------------------------------------------------------------

    def _totals(self) -> dict[str, float]:
        scale = block_bytes(self._case, self._trace)
        counters = [node.service.store.counters for node in self._nodes]
        found: defaultdict[str, float] = defaultdict(
            float,
            {
                "gpu": sum(engine.busy_s for engine in self._engines) * self._case.model.tp,
                "prefill": sum(engine.prefill_s for engine in self._engines) * self._case.model.tp,
                "engine blocks": sum(engine.loaded_blocks for engine in self._engines),
                "sealed": sum(each["sealed"] for each in counters),
                "evicted": sum(each["evicted"] for each in counters),
            },
        )
        for tier in self._tiers:
            found[f"{tier.name} loads"] += tier.tally.loads * scale
            found[f"{tier.name} stores"] += tier.tally.stores * scale
            found[f"{tier.name} removed"] += tier.removed
            busy_s = max(pipe.busy_by(self._clock.now) for pipe in (tier.loads, tier.stores))
            found[f"{tier.name} busy"] += busy_s / len(self._nodes)
        return found

    @property
    def _tiers(self) -> list[ModelledTier]:
        return [tier for node in self._nodes for tier in node.tiers]

    def result(self) -> Result:
        case, trace = self._case, self._trace
        served = self._served[case.warm_up :]
        names = [HOST, *dict.fromkeys(tier.name for tier in self._tiers)]
        hits: Counter[str] = Counter()
        early = possible = with_possible = with_hits = 0
        bounds = possible_hits(each.request for each in self._served)
        for count, (each, bound) in enumerate(zip(self._served, bounds, strict=True)):
            request = each.request
            if count < case.warm_up:
                continue
            possible += self._tokens(request, 0, bound)
            with_possible += bound > 0
            with_hits += bound > 0 and each.hits > 0
            early += self._tokens(request, 0, min(each.in_memory, each.hits))
            for at, origin in enumerate(each.origins):
                is_late = at >= each.in_memory_at_turn and origin in names
                hits[origin if is_late else HOST] += self._tokens(request, at, at + 1)
        now = {name: value - self._before.get(name, 0.0) for name, value in self._totals().items()}
        seconds = max(self._clock.now - self._counted_at, 1e-9)
        tokens = sum(each.request.tokens for each in served)
        output = sum(each.request.output for each in served)
        tiers, scale = [self._host_use(hits, now, seconds)], block_bytes(case, trace)
        for name in names[1:]:
            loads, stores = now[f"{name} loads"], now[f"{name} stores"]
            removed, busy = int(now[f"{name} removed"]), now[f"{name} busy"] / seconds
            most = sum(tier.most_bytes for tier in self._tiers if tier.name == name) / GRANULE_BYTES * scale
            tiers.append(TierUse(name, hits[name], loads, stores, removed, most, busy))
        dollars = self._dollars(seconds)
        counters = sum((Counter(node.service.counters) for node in self._nodes), Counter[str]())
        return Result(
            trace.name,
            case.policy,
            len(served),
            tokens,
            output,
            sum(hits.values()) / tokens,
            possible / tokens,
            with_hits / with_possible if with_possible else 0.0,
            early / max(1, sum(hits.values())),
            tiers,
            Spread.of([each.first_at - each.arrived_at for each in served]),
            Spread.of([each.turn_at - each.arrived_at for each in served]),
            seconds,
            now["gpu"],
            now["prefill"],
            dollars,
            dollars / (tokens + output) * 1e6,
            {name: count for name, count in sorted(counters.items()) if count and not name.endswith("_ns")},
        )

    def _tokens(self, request: Request, first: int, end: int) -> int:
        """The number of tokens in blocks [first, end) of a prompt."""
        size = self._trace.block_tokens
        return max(0, min(end * size, request.tokens) - first * size)

    def _host_use(self, hits: Counter[str], now: dict[str, float], seconds: float) -> TierUse:
        case, scale = self._case, block_bytes(self._case, self._trace)
        loaded = now["engine blocks"] * scale
        busy = loaded / case.settings.host_bytes_s / len(self._engines) / seconds
        most = sum(node.most_blocks for node in self._nodes)
        return TierUse(HOST, hits[HOST], loaded, now["sealed"] * scale, int(now["evicted"]), most * scale, busy)

    def _dollars(self, seconds: float) -> float:
        """The cost of the GPUs and of all capacity for this time."""
        case, prices = self._case, self._case.prices
        each_hour = case.nodes * (case.engines * case.model.tp * prices.gpu + case.host_bytes / 1e9 * prices.host_gb)
        for device in case.devices:
            room_gb = device.room_bytes / 1e9
            each_hour += room_gb * (prices.disk_gb * case.nodes if device.kind == "disk" else prices.remote_gb)
        return each_hour * seconds / 3600
