"""What it costs to give a prompt to an engine: by turns, by load, by session, or by where its cache is. Pure.

The last one counts seconds until the engine has the prompt's KV: what it computes for others first, what of this prompt
is missing on its node, and the loading of what is there, each at the pace that this proxy has measured of that engine.
A node that lacks what another one has gets that one's name: whether to fetch it is the node's own question, which knows
how fast the other one is (`pdx.node.peers.fetches`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdx.proxy.config import Routing
from pdx.proxy.engines import Engine
from pdx.proxy.health import Record
from pdx.telemetry.rate import Rate

TICK_S = 0.01  # engines that differ by less take turns
COMPUTES, LOADS = 10_000, 1_000_000  # tokens per second of an engine whose pace is not known yet
STICKS = 4  # a session moves to an engine that has so many requests less


class Prompt(msgspec.Struct, frozen=True):
    """What is known of a prompt before an engine has seen it."""

    tokens: int
    hits: Mapping[str, int] = {}  # how many leading tokens nodes have, in one tier or another
    is_exact: bool = False  # else it is an estimate, and so are the hits
    urls: frozenset[str] = frozenset()  # the engines of its session's last turn

    def missing(self, node: str) -> int:
        return self.tokens - min(self.tokens, self.hits.get(node, 0))

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
        return int(seconds(engine, record, prompt) / TICK_S) + record.load  # each takes its share of the steps
    return record.load


def seconds(engine: Engine, record: Record, prompt: Prompt) -> float:
    """Until the engine would have the prompt's KV. Of its others, those of which nothing is known are like this one."""
    missing = prompt.missing(engine.node)
    ahead = record.backlog + record.others * prompt.tokens
    found = prompt.tokens - missing
    return _takes_s(record.computing, ahead + missing, COMPUTES) + _takes_s(record.loading, found, LOADS)


def _takes_s(rate: Rate, tokens: int, guess: int) -> float:
    return rate.seconds(tokens) if rate.is_known else tokens / guess
