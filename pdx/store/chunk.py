"""One chunk of one shard: its record in the node's index."""

from __future__ import annotations

from collections.abc import Sequence

from pdx.memory.arena import round_up
from pdx.memory.layout import slice_span
from pdx.memory.slot import Slot
from pdx.store.lifecycle import State, Step, advance

NODE = 0  # the session that fills what a copy loads: the node itself


class Chunk:
    """Where a chunk lies and who holds it. Owned by the node's control loop; no other thread touches it."""

    __slots__ = (
        "arenas",
        "before",
        "deadline",
        "filled",
        "key",
        "layers",
        "leases",
        "newer",
        "older",
        "owner",
        "pins",
        "room_bytes",
        "shard",
        "shards",
        "slot",
        "state",
        "tail",
        "transfer",
        "writer",
    )

    def __init__(self, key: bytes, shard: int, slot: Slot, layers: int) -> None:
        self.key = key
        self.shard = shard
        self.shards = 1  # of its key, this one included …
        self.arenas: Sequence[int] = ()  # … and where they lie, see `pdx.store.store.Store`
        self.slot = slot
        self.layers = layers
        self.room_bytes = round_up(slot.nbytes)  # what its slot takes of the arena
        self.filled = 0  # bit l: slice l is filled
        self.state = advance(State.FREE, Step.RESERVE)  # changed by the index alone
        self.leases = 0
        self.pins = 0
        self.tail = False
        self.owner = 0  # session that reserved it
        self.writer = 0  # session whose process fills it
        self.transfer: str | None = None
        self.deadline = 0.0
        self.before: Chunk | None = None  # the chunk before it in its reservation, until it is sealed or gone
        self.older: Chunk | None = None  # its neighbours in `pdx.store.eviction.Lru`; None: it is not there
        self.newer: Chunk | None = None

    def __repr__(self) -> str:
        return f"<Chunk {self.key.hex()[:8]}/{self.shard} {self.state} at {self.slot.offset} leases={self.leases}>"

    @property
    def is_complete(self) -> bool:
        """Whether all slices are filled."""
        return self.filled == (1 << self.layers) - 1

    def span(self, first_layer: int, layers: int) -> tuple[int, int]:
        """Where slices [first_layer, first_layer + layers) lie in the slot: (start, bytes)."""
        return slice_span(self.slot.nbytes, self.layers, first_layer, layers)

    @property
    def is_evictable(self) -> bool:
        """Whether its room may be given to another now."""
        return self.state is State.SEALED and not self.leases and not self.pins
