"""One push to a peer: what of it is filled, what was submitted, and the write that goes next. No sockets, no threads.

It counts what changes, chunk by chunk, so that nothing here looks at all of its chunks but its grant and its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

from pdx.errors import ProtocolError
from pdx.memory.layout import slice_span
from pdx.memory.slot import Slot
from pdx.node.peers.job import Job
from pdx.node.peers.push_table import SENDER, SenderState, SenderStep
from pdx.store.chunk import Chunk
from pdx.store.lifecycle import State
from pdx.transports.channel import Piece
from pdx.wire.peer_messages import Granted, LetGo, Offer, Slices

MAX_WRITE_BYTES = 8 << 20  # a write shall not keep the next one waiting for long
MAX_SLICES = 1024  # in one write: its notification has room for their digests


class Way(Protocol):
    """The way to one peer, as pushes need it."""

    name: str

    @property
    def is_usable(self) -> bool:
        """Whether the link is ready and a channel is chosen."""

    def send(self, body: Offer | LetGo) -> None:
        """A message over the link."""

    def submit(self, job: Job) -> None:
        """A write; `Outgoing.written` will be called once."""

    def abort(self, push: int) -> None:
        """End the writes of a push soon."""


class Item:
    """One chunk of one shard on its way to a peer's slot; the `index`-th of its push."""

    __slots__ = ("chunk", "filled", "index", "is_even", "push", "sent", "slice_bytes", "slot")

    def __init__(self, push: Push, index: int, chunk: Chunk, slot: Slot) -> None:
        self.push = push
        self.index = index
        self.chunk = chunk
        self.slot = slot
        self.slice_bytes = max(1, slot.nbytes // chunk.layers)  # where they are not equal, the least of them
        self.is_even = self.slice_bytes * chunk.layers == slot.nbytes
        self.filled = 0  # bit l: slice l is filled, and its push knows
        self.sent = 0  # bit l: slice l was submitted

    @property
    def is_dead(self) -> bool:
        """Whether it will never be whole: its writer gave up."""
        chunk = self.chunk
        return chunk.state is not State.FILLING and not chunk.is_complete

    def nbytes(self, bits: int) -> int:
        """Bytes of these slices."""
        if self.is_even:
            return self.slice_bytes * bits.bit_count()
        return sum(self.chunk.span(first, count)[1] for first, count in _runs(bits))


class Push:
    """One push. `chunks` are held from its start to its end; `items` are those that the peer granted room for."""

    def __init__(self, way: Way, offer: Offer, chunks: list[Chunk], deadline: float) -> None:
        self.way = way
        self.offer = offer
        self.chunks = chunks  # key-major, `offer.shards` each
        self.held_bytes = sum(chunk.slot.nbytes for chunk in chunks)
        self.items: list[Item] = []
        self.state = SenderState.OFFERED
        self.is_offered = False  # the offer has left
        self.deadline = deadline
        self.under_way = 0  # writes submitted and not over
        self.acked_bytes = 0
        self.unfilled_bytes = 0  # that are still to be computed; the push with the fewest goes first
        self.rank: tuple[int, int] | None = None  # its place among those with a write to make
        self.is_granted = False
        self.is_given_up = False
        self.is_lost = False  # the link is gone: there is nobody to tell
        self._ready: list[int] = []  # a heap: the items with slices that are filled and not submitted
        self._ready_bytes = 0
        self._ready_slices = 0
        self._unsent = 0  # slices that were not submitted
        self._unacked = 0

    def __repr__(self) -> str:
        return f"<Push {self.number} to {self.way.name} {self.state} {self.acked_bytes} bytes>"

    @property
    def number(self) -> int:
        """What it is found by, here and at the peer."""
        return self.offer.push

    @property
    def transfer(self) -> str | None:
        """The transfer it is part of."""
        return self.offer.transfer

    @property
    def is_all_sent(self) -> bool:
        """Whether nothing is left to submit, now or later."""
        return not self._unsent

    @property
    def is_complete(self) -> bool:
        """Whether all that the peer granted room for is there."""
        return self.is_granted and not self._unacked

    def step(self, step: SenderStep) -> None:
        """Move on; see `pdx.node.peers.push_table`."""
        self.state = SENDER[self.state, step]

    def grant(self, granted: Granted) -> None:
        """The peer has room for these.

        :raises ProtocolError: it is not an answer to this push's offer; nothing has changed.
        """
        self.items = self._items(granted)
        self.is_granted = True
        self.chunks = [item.chunk for item in self.items]
        self.held_bytes = self.unfilled_bytes = sum(item.slot.nbytes for item in self.items)
        self._unsent = self._unacked = sum(chunk.layers for chunk in self.chunks)
        for item in self.items:
            self.note(item)

    def _items(self, granted: Granted) -> list[Item]:
        shards, keys = self.offer.shards, len(self.offer.keys)
        if len(granted.slots) != len(granted.granted) * shards or len(set(granted.granted)) != len(granted.granted):
            raise ProtocolError(f"{len(granted.slots)} slots for {len(granted.granted)} chunks of {shards} shards")
        items: list[Item] = []
        for number, index in enumerate(granted.granted):
            if index >= keys:
                raise ProtocolError(f"chunk {index} of {keys} granted")
            slots = granted.slots[number * shards : (number + 1) * shards]
            for chunk, slot in zip(self.chunks[index * shards : (index + 1) * shards], slots, strict=True):
                if slot.nbytes != chunk.slot.nbytes:
                    raise ProtocolError(f"{slot} granted for a chunk of {chunk.slot.nbytes} bytes")
                items.append(Item(self, len(items), chunk, slot))
        return items

    # ---- writing ----------------------------------------------------------------------------

    def note(self, item: Item) -> bool:
        """Count what was filled of it since the last look; whether that is anything."""
        new = item.chunk.filled & ~item.filled
        if not new:
            return False
        if item.filled == item.sent:
            heapq.heappush(self._ready, item.index)
        item.filled |= new
        nbytes = item.nbytes(new)
        self.unfilled_bytes -= nbytes
        self._ready_bytes += nbytes
        self._ready_slices += new.bit_count()
        return True

    def is_due(self, group_bytes: int) -> bool:
        """Whether there is a write to make: of `group_bytes`, or as large as a write may be, or the last."""
        is_full = self._ready_bytes >= min(group_bytes, MAX_WRITE_BYTES) or self._ready_slices >= MAX_SLICES
        return bool(self._ready) and (is_full or not self.unfilled_bytes)

    def next_write(self) -> Job:
        """The slices that go next, of the first chunks that have some. It must be due."""
        pieces: list[Piece] = []
        slices: list[Slices] = []
        spans: list[list[tuple[int, int]]] = []
        nbytes = count = 0
        while self._ready:
            item = self.items[self._ready[0]]
            first, layers = _first_run(item.filled & ~item.sent)
            fitting = layers
            if count + layers > MAX_SLICES or nbytes + layers * item.slice_bytes > MAX_WRITE_BYTES:
                fitting = min(MAX_SLICES - count, (MAX_WRITE_BYTES - nbytes) // item.slice_bytes)
            if fitting <= 0:
                if pieces:
                    break
                fitting = 1  # a slice that is larger than a write goes alone
            chunk, remote = item.chunk, item.slot
            start, size = slice_span(remote.nbytes, chunk.layers, first, fitting)
            local = chunk.slot.offset
            pieces.append(Piece(local + start, remote.offset + start, size))
            slices.append(Slices(remote.offset, remote.generation, first, fitting))
            parts = [(start, size)] if fitting == 1 else [chunk.span(at, 1) for at in range(first, first + fitting)]
            spans.append([(local + begin, length) for begin, length in parts])
            item.sent |= ((1 << fitting) - 1) << first
            if item.sent == item.filled:
                heapq.heappop(self._ready)
            nbytes, count = nbytes + size, count + fitting
            if fitting < layers:
                break
        self._ready_bytes -= nbytes
        self._ready_slices -= count
        self._unsent -= count
        return Job(self.number, pieces, slices, spans, nbytes, transfer=self.transfer)

    def written(self, job: Job) -> None:
        """The peer has acknowledged a write of this push."""
        self.acked_bytes += job.nbytes
        self._unacked -= sum(each.layers for each in job.slices)


def _first_run(bits: int) -> tuple[int, int]:
    """The lowest run of ones in `bits`, which are not 0, as (first, length)."""
    first = (bits & -bits).bit_length() - 1
    rest = bits >> first
    return first, (~rest & (rest + 1)).bit_length() - 1


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """All runs of ones in `bits`, lowest first."""
    while bits:
        first, length = _first_run(bits)
        yield first, length
        bits &= ~(((1 << length) - 1) << first)


def alike(found: Sequence[tuple[bytes, list[Chunk]]]) -> Iterator[list[tuple[bytes, list[Chunk]]]]:
    """Runs of chunks that one offer can name: of one size and layer count, but for a tail at the end."""
    run: list[tuple[bytes, list[Chunk]]] = []
    for key, chunks in found:
        chunk = chunks[0]
        same = run and (chunk.slot.nbytes, chunk.layers) == (run[0][1][0].slot.nbytes, run[0][1][0].layers)
        ends = run and run[-1][1][0].tail
        if run and (ends or not (same or (chunk.tail and chunk.layers == run[0][1][0].layers))):
            yield run
            run = []
        run.append((key, chunks))
    if run:
        yield run
