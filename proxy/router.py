"""Which engines get a request's two legs. Pure.

The prefill engine is one for which this prompt costs least (`pdx.proxy.placing`), and the decode engine one with the
fewest outstanding requests among those fit to decode. Among pairs of equal load, one on a single node is taken before
one with a wire between them, and that before one with a wire through which no probe has gone; what is equal even then
takes turns. An engine whose node is not known counts as beyond such a wire. Engines of different layouts, which can
read none of each other's KV, are never a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from pdx.proxy.engines import Engine
from pdx.proxy.health import Health, Record

_Rank = tuple[bool, bool, bool, int]
_NEAR = 2  # of the best decoders of each kind: the best one may be the prefill engine itself
_LOOKED_AT = 32  # of the best decoders, for one to whose node there is a way
_TRIED = 8  # where all engines are suspect, a request has tried enough of them, though no connection stood


class Candidate(msgspec.Struct, frozen=True):
    """An engine and what this proxy knows about its load."""

    engine: Engine
    load: int = 0  # requests of anybody, those that are planned included; less is better
    last_used: int = 0  # grows with every leg; breaks ties, so that idle engines take turns
    suspect: bool = False  # or on trial, with a request already; or it is to be drained
    cost: int = 0  # of having it prefill this prompt, see `pdx.proxy.placing.cost`; likewise


class Pair(msgspec.Struct, frozen=True):
    """The engines of the two legs, chosen before the first one starts."""

    prefiller: Engine
    decoder: Engine

    @property
    def wire(self) -> str:
        """The decoder's node, where the KV has to travel from one known node to another; else empty."""
        here, there = self.prefiller.node, self.decoder.node
        return there if here and there and here != there else ""


def serving(engines: Sequence[Engine], health: Health, model: str | None) -> list[Engine]:
    """Those that have the model of this name; None: the model of which the first decoder's own clients get that.

    Where none is known to have it: those of which nothing is known, if one of them decodes; else those of one model,
    which then refuse it. Legs of one request never go to two models: one would continue the other's text.
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
    """`is_alone`: the engine that decodes computes the prompt, too."""
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
    """The engines for a request in two legs; None: a second leg would gain nothing. Linear in the candidates.
    `shares_kv`: without it, what would be chosen if all had one layout.

    The only decoder is left alone: sending it the same prompt twice gains nothing. Where the command line names
    one engine for both roles, that is what the user wants.
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
    """The best decoder for a prefill engine is one of a few: the best ones of all, and of its node."""

    def __init__(self, ranked: Sequence[Candidate], *, shares_kv: bool) -> None:
        """`ranked`: the best decoder is first."""
        self._ranked = ranked
        self._shares_kv = shares_kv
        self._best: dict[tuple[bytes | None, str | None], list[Candidate]] = {}  # of a layout and a node; None: of all
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
        # An engine that only prefills is not sent the same prompt again as the decoder of last resort.
        return last if engine.decodes and engine.named else None


def prefiller(candidates: Sequence[Candidate], *, planned: Pair, tried: Collection[str]) -> Engine | None:
    """The engine to prefill for the planned decoder: the planned one, then others; None: nobody is left."""
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
    """The engine to decode, not among the `tried` ones; None: nobody is left who may serve.

    `only_prefill`: it has one token to make.

    The planned one, as long as it is there and well: the KV is on its way to it. Roles are per request, so an engine
    that only prefills is asked when no healthy decoder is left, and before a decoder that just refused a connection.
    At equal load, one on a node that has the KV is taken before others.
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
