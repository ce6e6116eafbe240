"""Which engine gets a leg: the one with the fewest outstanding requests. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from pdx.proxy.roster import Engine


class Candidate(msgspec.Struct, frozen=True):
    """An engine and what this proxy knows about its load."""

    engine: Engine
    in_flight: int = 0  # legs of this proxy
    last_used: int = 0  # grows with every leg; breaks ties, so that idle engines take turns
    suspect: bool = False

    def load(self) -> tuple[int, int, int]:
        """Less is better."""
        return (self.in_flight, self.engine.running, self.last_used)


def prefiller(candidates: Sequence[Candidate]) -> Engine | None:
    """The engine to prefill; None: there is none that would not hurt.

    The only decoder is left alone: sending it the same prompt twice gains nothing. Where the command line names
    one engine for both roles, that is what the user wants.
    """
    decoders = [each for each in candidates if each.engine.decodes and not each.suspect]
    only = decoders[0].engine.url if len(decoders) == 1 else ""
    able = [each for each in candidates if each.engine.prefills and not each.suspect]
    free = [each for each in able if each.engine.url != only] or [each for each in able if each.engine.named]
    return min(free, key=Candidate.load).engine if free else None


def decoder(candidates: Sequence[Candidate], *, prefilled_by: str = "", tried: Collection[str] = ()) -> Engine | None:
    """The engine to decode, not among the `tried` ones; None: nobody is left.

    Roles are per request, so an engine that only prefills is asked when no healthy decoder is left, and
    before a decoder that just refused a connection.
    """
    able = [each for each in candidates if each.engine.url not in tried]

    def rank(each: Candidate) -> tuple[bool, bool, bool, tuple[int, int, int]]:
        return (each.suspect, not each.engine.decodes, each.engine.url == prefilled_by, each.load())

    return min(able, key=rank).engine if able else None
