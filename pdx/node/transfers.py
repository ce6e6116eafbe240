"""Which transfers a node knows: what each still waits for, and whether it was given up.

A transfer is one prefill-to-decode handoff. A decoder that asks for its chunks before they are sealed is told to ask
again for as long as the transfer is under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from pdx.store.chunk import Chunk

KEPT_S = 60.0  # how long a finished transfer's tail and record are kept for a decoder that comes late


class Progress(StrEnum):
    """How far a transfer is."""

    UNDER_WAY = "under way"
    SEALED = "sealed"
    GIVEN_UP = "given up"


class Transfer(msgspec.Struct):
    """One transfer: the slots that are not sealed yet, by offset, and the peers' offers that are not over."""

    pending: set[int]
    progress: Progress
    deadline: float
    offers: int = 0

    def settle(self, now: float) -> None:
        """It is complete as soon as nothing more is expected."""
        if not self.pending and not self.offers and self.progress is Progress.UNDER_WAY:
            self.progress = Progress.SEALED
            self.deadline = now + KEPT_S


class Transfers:
    """All transfers a node knows. Owned by its control loop."""

    def __init__(self) -> None:
        self._transfers: dict[str, Transfer] = {}

    def __len__(self) -> int:
        return sum(transfer.progress is Progress.UNDER_WAY for transfer in self._transfers.values())

    def open(self, name: str, offsets: Iterable[int], deadline: float) -> None:
        """Its chunks are reserved. Calling it again adds chunks; a transfer given up stays given up."""
        transfer = self._transfers.get(name)
        if transfer is None:
            transfer = self._transfers[name] = Transfer(set(), Progress.UNDER_WAY, deadline)
        if transfer.progress is Progress.GIVEN_UP:
            return
        transfer.pending.update(offsets)
        is_complete = not transfer.pending and not transfer.offers
        transfer.progress = Progress.SEALED if is_complete else Progress.UNDER_WAY
        transfer.deadline = max(transfer.deadline, deadline)

    def expect(self, name: str, deadline: float) -> None:
        """A peer offers chunks of it: whether there is room for them or not, whoever asks for it waits."""
        self.open(name, (), deadline)
        transfer = self._transfers[name]
        if transfer.progress is not Progress.GIVEN_UP:
            transfer.offers += 1
            transfer.progress = Progress.UNDER_WAY

    def arrived(self, name: str, now: float) -> None:
        """What the peer offered is here, as far as it was granted."""
        transfer = self._transfers.get(name)
        if transfer is not None and transfer.offers:
            transfer.offers -= 1
            transfer.settle(now)

    def is_under_way(self, name: str) -> bool:
        """Whether more of it may come."""
        transfer = self._transfers.get(name)
        return transfer is not None and transfer.progress is Progress.UNDER_WAY

    def is_given_up(self, name: str) -> bool:
        """Whether somebody cancelled it."""
        transfer = self._transfers.get(name)
        return transfer is not None and transfer.progress is Progress.GIVEN_UP

    def sealed(self, chunks: Iterable[Chunk], now: float) -> None:
        """These chunks are sealed."""
        for chunk in chunks:
            transfer = self._transfers.get(chunk.transfer or "")
            if transfer is None:
                continue
            transfer.pending.discard(chunk.slot.offset)
            transfer.settle(now)

    def aborted(self, chunks: Iterable[Chunk], now: float) -> None:
        """These chunks will not come: what is sealed of their transfers is all there will be."""
        for chunk in chunks:
            if chunk.transfer:
                self.give_up(chunk.transfer, now)

    def give_up(self, name: str, now: float) -> bool:
        """Nothing more of it will come; returns whether that is news. An unknown name is remembered, too:
        a decoder may ask for a transfer whose prefill never reached this node."""
        transfer = self._transfers.get(name)
        if transfer is not None and transfer.progress is Progress.GIVEN_UP:
            return False
        self._transfers[name] = Transfer(set(), Progress.GIVEN_UP, now + KEPT_S)
        return True

    def expire(self, now: float) -> list[str]:
        """Forget transfers whose time is over; returns their names."""
        late = [name for name, transfer in self._transfers.items() if transfer.deadline <= now]
        for name in late:
            del self._transfers[name]
        return late
