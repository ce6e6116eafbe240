"""What somebody asks room for."""

from __future__ import annotations

from collections.abc import Sequence

from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Slot
from pdx.store.chunk import NO_HINTS, Chunk, Reservation
from pdx.wire.hints import Hints


class Claim(Reservation, kw_only=True, eq=False):
    """A reservation, and what it is for: `nbytes` per chunk, one slot per shard and key."""

    keys: Sequence[bytes]
    nbytes: int
    tail_nbytes: int = 0  # not 0: the last key is a tail of so many bytes
    blocks: bytes = b""  # names of the full blocks of all of it, from the first key's first on; empty: not told …
    chunk_blocks: int = 0  # … and how many a chunk has
    parent: bytes = b""  # the key that leads up to the first one
    partial: bool = False
    hints: Hints = NO_HINTS  # of the request, for whoever decides what is kept
    who: str = ""  # wants them, for the explanation of what goes for that

    def sizes(self, indices: Sequence[int]) -> list[int]:
        """Bytes of the slots of these keys."""
        tail = len(self.keys) - 1 if self.tail_nbytes else -1
        return [self.tail_nbytes if index == tail else self.nbytes for index in indices]

    def chunks(self, granted: Sequence[int], slots: Sequence[Slot]) -> list[Chunk]:
        """The records of these keys, to be filled in these slots, one for each of their shards."""
        reservation = Reservation(**{name: getattr(self, name) for name in Reservation.__struct_fields__})
        tail = len(self.keys) - 1 if self.tail_nbytes else -1
        keys, hints, shards, width = self.keys, self.hints, len(self.writers), self.chunk_blocks * KEY_BYTES
        rooms = {nbytes: -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES for nbytes in (self.nbytes, self.tail_nbytes)}
        made: list[Chunk] = []
        before: list[Chunk | None] = [None] * shards
        for at, index in enumerate(granted):
            parent = keys[index - 1] if index else self.parent
            blocks = self.blocks[index * width : (index + 1) * width]
            for shard in range(shards):
                slot = slots[at * shards + shard]
                chunk = Chunk(
                    keys[index], shard, slot, reservation, rooms[slot.nbytes], hints, index == tail, blocks, parent
                )
                chunk.before = before[shard]
                before[shard] = chunk
                made.append(chunk)
        return made
