"""What it costs to give a prompt to an engine: by turns, by load, by session, or by where its cache is. Pure.

The cache policy estimates the seconds until the engine has the prompt's KV: what it computes for others first, what is
missing of this prompt on its node, and loading the rest, at the rates this proxy has measured for that engine. A node
that lacks chunks is told which node has them; whether to fetch them is the node's decision, because it knows how fast
that peer is (`pdx.node.peers.fetches`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile

import msgspec

from pdx.proxy.config import Routing
from pdx.proxy.engines import Engine
from pdx.proxy.health import Record, Work
from pdx.telemetry.rate import Rate

TICK_S = 0.01  # engines whose costs differ by less take turns
COMPUTES, LOADS = 10_000, 1_000_000  # assumed tokens per second of an engine not yet measured
REQUEST_TOKENS = 500  # what each request in flight costs the next one: its share of steps, and room
MISSING = 2  # weight of missing tokens
APART = 2.0  # an engine that is faster or slower than most by this factor has a rate of its own
MOST_COMING = 32  # chunks remembered per request in flight: computing more keys takes too long
STICKS = 4  # a session moves to an engine that has this many requests fewer


class Prompt(msgspec.Struct, frozen=True):
    """What is known about a prompt before an engine has seen it."""

    tokens: int
    hits: Mapping[str, int] = {}  # leading tokens that each node has, in any tier
    chunk_tokens: int = 0  # 0: the prompt's length is an estimate, and so are the hits
    urls: frozenset[str] = frozenset()  # engines of the session's last turn
    computing: float = 0.0  # tokens per second of most eligible engines, as computed by `pace`; 0: unknown
    loading: float = 0.0

    def missing(self, node: str) -> int:
        return self.tokens - min(self.tokens, self.hits.get(node, 0))

    def work(self, node: str, *, is_timed: bool) -> Work:
        """The work of an engine at this node. `is_timed`: see `Work`."""
        missing = self.missing(node)
        return Work(missing, self.tokens - missing, is_timed)

    def better(self, node: str) -> str:
        """The node that has most of the prompt, if it has more than this one; else empty."""
        best = max(self.hits, key=self.hits.__getitem__, default="")
        return best if best and self.hits[best] > self.hits.get(node, 0) else ""


def cost(policy: Routing, engine: Engine, record: Record, prompt: Prompt | None) -> int:
    """The cost of giving the prompt to this engine: lower is better, and equal costs take turns."""
    if policy is Routing.ROUND_ROBIN:
        return 0
    if policy is Routing.SESSION and prompt is not None:
        return record.load - STICKS * (engine.url in prompt.urls)
    if policy is Routing.PREFIX and prompt is not None:
        return int(seconds(engine, record, prompt) / TICK_S)
    return record.load


def seconds(engine: Engine, record: Record, prompt: Prompt) -> float:
    """Estimated seconds until the engine has the prompt's KV.

    Missing tokens count MISSING times: this request waits for them, and so do those queued behind it.
    """
    missing = prompt.missing(engine.node)
    ahead = record.backlog + record.load * REQUEST_TOKENS + (MISSING - 1) * missing
    found = prompt.tokens - missing
    computing = _per_second(record.computing, prompt.computing, COMPUTES)
    return (ahead + missing) / computing + found / _per_second(record.loading, prompt.loading, LOADS)


def pace(rates: Iterable[Rate]) -> float:
    """The typical rate of engines in tokens per second; 0 if none was measured."""
    known = [rate.gb_s * 1e9 for rate in rates if rate.is_known]
    return statistics.median(known) if known else 0.0


def paced(prompt: Prompt, records: Sequence[Record]) -> Prompt:
    """The prompt, with the typical rate of these engines, which could serve it."""
    computing, loading = pace(each.computing for each in records), pace(each.loading for each in records)
    return msgspec.structs.replace(prompt, computing=computing, loading=loading)


def _per_second(own: Rate, common: float, guess: int) -> float:
    """An engine's rate. A rate close to the others' counts as theirs: measurements depend on what else an engine does,
    and one that seems slightly faster would otherwise get all requests."""
    measured = own.gb_s * 1e9 if own.is_known else common or guess
    return common if common and common / APART < measured < common * APART else measured


class Keys:
    """The keys of a prompt's chunks, computed on demand."""

    def __init__(self, made: Iterator[bytes]) -> None:
        self._made = made
        self._known: list[bytes] = []

    def get(self, at: int) -> bytes | None:
        while len(self._known) <= at:
            if (key := next(self._made, None)) is None:
                return None
            self._known.append(key)
        return self._known[at]

    def __iter__(self) -> Iterator[bytes]:
        return takewhile(lambda key: key is not None, map(self.get, count()))  # type: ignore[arg-type]


class Coming:
    """Chunks that nodes do not report yet but that a request in flight has them compute: of many requests with one
    prompt, the later ones go to the same place."""

    def __init__(self) -> None:
        self._keys: dict[str, Counter[bytes]] = {}  # per node: how many requests compute each key

    def add(self, node: str, keys: Keys, first: int) -> list[bytes]:
        """Add the keys from `first` on, at most MOST_COMING; call `over` when the request ends."""
        found = [key for at in range(first, first + MOST_COMING) if (key := keys.get(at)) is not None]
        if found:
            self._keys.setdefault(node, Counter()).update(found)
        return found

    def is_known(self, key: bytes) -> bool:
        """Whether any node will have the key."""
        return any(key in coming for coming in self._keys.values())

    def over(self, node: str, keys: Sequence[bytes]) -> None:
        known = self._keys.get(node, Counter())  # a node without entries has none
        known.subtract(keys)
        for key in keys:
            if not known[key]:
                del known[key]
        if not known:
            self._keys.pop(node, None)

    def leads(self, keys: Keys, there: Mapping[str, int], has: Callable[[str, bytes], bool]) -> dict[str, int]:
        """How many leading chunks each node has or will have. `there`: how many it has; `has`: whether it has a given
        key."""
        found = dict(there)
        for node, coming in self._keys.items():
            lead = found.get(node, 0)
            while (key := keys.get(lead)) is not None and (key in coming or has(node, key)):
                lead += 1
            found[node] = lead
        return found
