"""Chooses the engines of a request's two legs. Pure.

The prefill engine is one with the lowest cost for this prompt (`pdx.proxy.placing`), the decode engine one with the
fewest outstanding requests among those fit to decode. Among pairs of equal load, a pair on a single node is preferred
to one with a wire between its nodes, and that to one with a wire through which no probe has gone. Remaining ties take
turns. An engine whose node is unknown counts as behind such a wire. Engines of different layouts, which cannot read
each other's KV, are never paired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from pdx.proxy.engines import Engine
from pdx.proxy.health import Health, Record

_Rank = tuple[bool, bool, bool, int]
_NEAR = 2  # best decoders of each kind: the best one may be the prefill engine itself
_LOOKED_AT = 32  # best decoders that are searched for one whose node is reachable
_TRIED = 8  # a request gives up after this many suspect engines without a connection


class Candidate(msgspec.Struct, frozen=True):
    """An engine with what this proxy knows about its load."""

    engine: Engine
    load: int = 0  # all requests, planned ones included; lower is better
    last_used: int = 0  # increases with every leg; breaks ties, so that idle engines take turns
    suspect: bool = False  # or on trial with a request already, or draining
    cost: int = 0  # of prefilling this prompt there, see `pdx.proxy.placing.cost`; lower is better


class Pair(msgspec.Struct, frozen=True):
    """The engines of the two legs, chosen before the first one starts."""

    prefiller: Engine
    decoder: Engine

    @property
    def wire(self) -> str:
        """The decoder's node if the KV has to travel between two known nodes; else empty."""
        here, there = self.prefiller.node, self.decoder.node
        return there if here and there and here != there else ""


def serving(engines: Sequence[Engine], health: Health, model: str | None) -> list[Engine]:
    """The engines that have this model. None: the model that the first decoder's own clients get by default.

    If none is known to have it: the engines of which nothing is known, if one of them decodes; else those of one model,
    which then refuse the request. Legs of one request never go to two models: one would continue the other's text.
    """
    known = {each.url: health.of(each.url).models for each in engines}
    if model is None:
        model = next((next(iter(models)) for each in engines if each.decodes and (models := known[each.url])), None)
        if model is None:
            return list(engines)
    found = [each for each in engines if (models := known[each.url]) is not None and (not models or model in models)]
    unknown = [each for each in engines if known[each.url] is None]
    return found or (unknown if any(each.decodes for each in unknown) else serving(engines, health, None))


def candidates(
    engines: Iterable[Engine], health: Health, cost: Callable[[Engine, Record], int], *, is_alone: bool
) -> list[Candidate]:
    """`is_alone`: the engine that decodes also computes the prompt."""
    return [
        Candidate(
            engine=engine,
            load=costs if is_alone else record.load,
            cost=costs,
            last_used=record.last_used,
            suspect=record.avoided or engine.draining,
        )
        for engine in engines
        for record in (health.of(engine.url),)
        for costs in (cost(engine, record),)
    ]


def pair(candidates: Sequence[Candidate], *, shares_kv: bool = True) -> Pair | None:
    """The engines for a request in two legs; None if a second leg gains nothing. Linear in the number of candidates.
    `shares_kv`: without it, the choice as if all had one layout.

    A single decoder serves alone: sending it the same prompt twice gains nothing. If the command line names one engine
    for both roles, it gets both legs, as the user asked.
    """
    ranked = sorted(candidates, key=lambda each: (_decoder_rank(each, ""), each.last_used))
    nearest = _Nearest(ranked, shares_kv=shares_kv)
    able = [(first, last) for first in _prefillers(candidates) if (last := nearest.to(first)) is not None]
    if not able:
        return None
    least = min(first.cost for first, _ in able)
    pairs = [each for each in able if each[0].cost == least]
    first, last = min(pairs, key=lambda found: (_pair_rank(*found), found[0].last_used, found[1].last_used))
    return Pair(first.engine, last.engine)


class _Nearest:
    """The best decoder for a prefill engine is one of a few: the best ones overall, and on its node."""

    def __init__(self, ranked: Sequence[Candidate], *, shares_kv: bool) -> None:
        """`ranked`: best decoder first."""
        self._ranked = ranked
        self._shares_kv = shares_kv
        self._best: dict[tuple[bytes | None, str | None], list[Candidate]] = {}  # by layout and node; None: any
        for each in ranked:
            for layout in {each.engine.layout, None}:
                for node in {each.engine.node, None}:
                    best = self._best.setdefault((layout, node), [])
                    if len(best) < _NEAR:
                        best.append(each)

    def to(self, first: Candidate) -> Candidate | None:
        engine = first.engine
        layouts = {engine.layout, b""} if self._shares_kv and engine.layout else {None}
        near = [
            each for layout in layouts for node in {engine.node, None} for each in self._best.get((layout, node), ())
        ]
        if engine.reaches and not any(_is_reached(engine, each.engine) for each in near):
            some = self._ranked[:_LOOKED_AT]
            near += [each for each in some if _is_reached(engine, each.engine) and engine.shares_with(each.engine)]
        last = min(near, key=lambda each: (*_pair_rank(first, each), each.last_used), default=None)
        if last is None or last.engine.url != engine.url:
            return last
        # A prefill-only engine is not sent the same prompt again as the decoder of last resort.
        return last if engine.decodes and engine.named else None


def prefiller(candidates: Sequence[Candidate], *, planned: Pair, tried: Collection[str]) -> Engine | None:
    """The engine to prefill for the planned decoder: the planned one first, then others; None if all were tried."""
    if planned.prefiller.url not in tried:
        return planned.prefiller
    last = planned.decoder
    able = [
        each
        for each in _prefillers(candidates)
        if each.engine.url not in {*tried, last.url} and each.engine.shares_with(last)
    ]

    def rank(each: Candidate) -> tuple[int, bool, int]:
        return (each.cost, not last.node or each.engine.node != last.node, each.last_used)

    return min(able, key=rank).engine if able else None


def decoder(
    candidates: Sequence[Candidate],
    *,
    planned: Pair | None = None,
    tried: Collection[str] = (),
    only_prefill: bool = False,
) -> Engine | None:
    """The engine to decode, excluding `tried`; None if no eligible engine is left.

    `only_prefill`: it generates a single token.

    The planned engine, as long as it is listed and healthy: the KV is on its way to it. Roles are per request, so a
    prefill-only engine is asked when no healthy decoder is left, before one that just refused a connection. At equal
    load, an engine on a node that has the KV is preferred.
    """
    able = [each for each in candidates if each.engine.url not in tried]
    chosen = planned.decoder.url if planned is not None else ""
    prefilled_by = planned.prefiller.url if planned is not None else ""
    near = {planned.prefiller.node, planned.decoder.node} - {""} if planned is not None else set()

    def rank(each: Candidate) -> tuple[bool, bool, _Rank, bool, int]:
        return (
            each.suspect,
            each.engine.url != chosen,
            _decoder_rank(each, prefilled_by, only_prefill=only_prefill),
            each.engine.node not in near,
            each.last_used,
        )

    best = min(able, key=rank, default=None)
    return None if best is None or (best.suspect and len(tried) >= _TRIED) else best.engine


def _prefillers(candidates: Sequence[Candidate]) -> list[Candidate]:
    decoders = [each for each in candidates if each.engine.decodes and not each.suspect]
    only = decoders[0].engine.url if len(decoders) == 1 else ""
    able = [each for each in candidates if each.engine.prefills and not each.suspect and not each.engine.detached]
    return [each for each in able if each.engine.url != only] or [each for each in able if each.engine.named]


def _decoder_rank(each: Candidate, prefilled_by: str, *, only_prefill: bool = False) -> _Rank:
    is_apt = each.engine.prefills if only_prefill else each.engine.decodes
    return (each.suspect, not is_apt, each.engine.url == prefilled_by, each.load)


def _pair_rank(first: Candidate, last: Candidate) -> tuple[_Rank, bool, bool]:
    same_node = bool(first.engine.node) and first.engine.node == last.engine.node
    is_reached = same_node or _is_reached(first.engine, last.engine)
    return (_decoder_rank(last, first.engine.url), not is_reached, not same_node)


def _is_reached(first: Engine, last: Engine) -> bool:
    return last.node in first.reaches
