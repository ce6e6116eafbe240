"""Chunks without a store."""

from pdx.memory.arena import round_up
from pdx.memory.slot import Slot
from pdx.store.chunk import Chunk, Reservation


def chunk(
    key: bytes, slot: Slot, layers: int = 1, *, blocks: bytes = b"", parent: bytes = b"", **of_all: object
) -> Chunk:
    """One of one shard; `of_all`: see `Reservation`."""
    reservation = Reservation(**{"layers": layers, "owner": 1, "writers": (1,), **of_all})
    return Chunk(slot, reservation, key=key, room_bytes=round_up(slot.nbytes), blocks=blocks, parent=parent)
