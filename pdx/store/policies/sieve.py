"""SIEVE: a queue with one hand that spares what was used since it last came by.

Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI 2024,
algorithm 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pdx.store.chunk import Chunk, Rank
from pdx.store.policies.policy import EvictionPolicy
from pdx.store.policies.ranks import MAX_CHANCES, Ranks


class Sieve(EvictionPolicy):
    """Chunks stay where they came in; the hand goes from the oldest to the newest, and begins anew.

    What was found since the hand last passed is spared, once. New chunks are swept away soon unless they are found.
    """

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._hand: Rank | None = None  # the last place it has passed

    def insert(self, chunk: Chunk, before: Chunk | None = None) -> None:
        """See `EvictionPolicy.insert`."""
        if chunk.rank is None:
            chunk.rank = self._ranks.new(before)
        self._ranks.add(chunk)

    def hold(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.hold`."""
        self._ranks.discard(chunk)

    def access(self, chunk: Chunk) -> None:
        """See `EvictionPolicy.access`."""
        chunk.uses = 1

    def victims(self, start: Chunk | None) -> Iterator[Chunk]:
        """See `EvictionPolicy.victims`; the hand goes on from where it is."""
        left, chances = 2 * len(self._ranks), MAX_CHANCES  # what was used comes in its second turn
        while left:
            chunk = self._ranks.behind(self._hand)
            if chunk is None:
                self._hand = None
                continue
            self._hand = chunk.rank
            if chunk.uses and chances:
                chunk.uses = 0
                chances -= 1
                continue
            left -= 1
            yield chunk

    def peek(self) -> Iterator[Chunk]:
        """See `EvictionPolicy.peek`: what the hand would not spare in its next turn."""
        hand = self._hand
        behind = self._ranks.within(None) if hand is None else self._ranks.between(hand, None)
        before = iter(()) if hand is None else self._ranks.between(None, hand)
        return (chunk for chunk in itertools.chain(behind, before) if not chunk.uses)
