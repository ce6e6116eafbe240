"""What it costs to give a prompt to an engine: by turns, by load, by session, or by where its cache is. Pure.

The last one counts seconds until the engine has the prompt's KV: what it computes for others first, what of this prompt
is missing on its node, and the loading of what is there, each at the pace that this proxy has measured of that engine.
A node that lacks what another one has gets that one's name: whether to fetch it is the node's own question, which knows
how fast the other one is (`pdx.node.peers.fetches`).
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

TICK_S = 0.01  # engines that differ by less take turns
COMPUTES, LOADS = 10_000, 1_000_000  # tokens per second of an engine whose pace is not known yet
REQUEST_TOKENS = 500  # as computing so many, each request under way delays the next: its share of steps, and room
MISSING = 2  # times
APART = 2.0  # an engine so much faster or slower than most has a pace of its own
MOST_COMING = 32  # chunks of a request that are remembered until it is over: to make more keys takes too long
STICKS = 4  # a session moves to an engine that has so many requests less


class Prompt(msgspec.Struct, frozen=True):
    """What is known of a prompt before an engine has seen it."""

    tokens: int
    hits: Mapping[str, int] = {}  # how many leading tokens nodes have, in one tier or another
    chunk_tokens: int = 0  # 0: it is an estimate, and so are the hits
    urls: frozenset[str] = frozenset()  # the engines of its session's last turn
    computing: float = 0.0  # tokens per second of most engines that could have it, as `pace` tells; 0: not known
    loading: float = 0.0

    def missing(self, node: str) -> int:
        return self.tokens - min(self.tokens, self.hits.get(node, 0))

    def work(self, node: str, *, is_timed: bool) -> Work:
        """What an engine there would do with it. `is_timed`: see `Work`."""
        missing = self.missing(node)
        return Work(missing, self.tokens - missing, is_timed)

    def better(self, node: str) -> str:
        """The node that has most of it, where this one has less; else empty."""
        best = max(self.hits, key=self.hits.__getitem__, default="")
        return best if best and self.hits[best] > self.hits.get(node, 0) else ""


def cost(policy: Routing, engine: Engine, record: Record, prompt: Prompt | None) -> int:
    """Of giving the prompt to this engine: less is better, and what is equal takes turns."""
    if policy is Routing.ROUND_ROBIN:
        return 0
    if policy is Routing.SESSION and prompt is not None:
        return record.load - STICKS * (engine.url in prompt.urls)
    if policy is Routing.PREFIX and prompt is not None:
        return int(seconds(engine, record, prompt) / TICK_S)
    return record.load


def seconds(engine: Engine, record: Record, prompt: Prompt) -> float:
    """Until the engine would have the prompt's KV.

    What is missing counts MISSING times: this request waits for it, and so do those that come behind it.
    """
    missing = prompt.missing(engine.node)
    ahead = record.backlog + record.load * REQUEST_TOKENS + (MISSING - 1) * missing
    found = prompt.tokens - missing
    computing = _per_second(record.computing, prompt.computing, COMPUTES)
    return (ahead + missing) / computing + found / _per_second(record.loading, prompt.loading, LOADS)


def pace(rates: Iterable[Rate]) -> float:
    """Tokens per second of most engines; 0: of none it is known."""
    known = [rate.gb_s * 1e9 for rate in rates if rate.is_known]
    return statistics.median(known) if known else 0.0


def paced(prompt: Prompt, records: Sequence[Record]) -> Prompt:
    """With the pace of most of these engines, which could have it."""
    computing, loading = pace(each.computing for each in records), pace(each.loading for each in records)
    return msgspec.structs.replace(prompt, computing=computing, loading=loading)


def _per_second(own: Rate, common: float, guess: int) -> float:
    """An engine's pace. One much like the others' counts as theirs: what is measured depends on what else an engine
    does, and the one that seems a little faster would get all requests."""
    measured = own.gb_s * 1e9 if own.is_known else common or guess
    return common if common and common / APART < measured < common * APART else measured


class Keys:
    """The keys of a prompt's chunks, each made when somebody asks for it."""

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
    """Chunks that nodes do not tell of yet, because a request under way has them computed there: of many requests with
    one prompt, the others go to the same place."""

    def __init__(self) -> None:
        self._keys: dict[str, Counter[bytes]] = {}  # by node, of how many requests

    def add(self, node: str, keys: Keys, first: int) -> list[bytes]:
        """From the `first` of these keys on, MOST_COMING at most; they are `over` when the request is."""
        found = [key for at in range(first, first + MOST_COMING) if (key := keys.get(at)) is not None]
        if found:
            self._keys.setdefault(node, Counter()).update(found)
        return found

    def is_known(self, key: bytes) -> bool:
        """Whether any node will have it."""
        return any(key in coming for coming in self._keys.values())

    def over(self, node: str, keys: Sequence[bytes]) -> None:
        known = self._keys.get(node, Counter())  # of none there is nothing
        known.subtract(keys)
        for key in keys:
            if not known[key]:
                del known[key]
        if not known:
            self._keys.pop(node, None)

    def leads(self, keys: Keys, there: Mapping[str, int], has: Callable[[str, bytes], bool]) -> dict[str, int]:
        """How many leading chunks nodes have or will have. `there`: how many they have; `has`: whether one has this."""
        found = dict(there)
        for node, coming in self._keys.items():
            lead = found.get(node, 0)
            while (key := keys.get(lead)) is not None and (key in coming or has(node, key)):
                lead += 1
            found[node] = lead
        return found
