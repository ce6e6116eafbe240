"""The records of all chunks: by slot, by key in each shard, and those that somebody may still write."""

from __future__ import annotations

from pdx.store.chunk import Chunk


class Index:
    """Where a chunk's record is found. It changes no chunk and no memory; who does keeps it true.

    `slots` and `writing` are for others to read only.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, Chunk]] = []  # per shard: key -> FILLING or SEALED chunk
        self.slots: dict[int, Chunk] = {}  # offset -> chunk in any state but FREE
        self.writing: dict[int, Chunk] = {}  # offset -> FILLING or QUARANTINED chunk

    def of(self, key: bytes, shards: int | None = None) -> list[Chunk]:
        """The chunks of `key`, filling or sealed, in the first `shards` shards (in all by default) that have one."""
        return [chunk for shard in self._shards[:shards] if (chunk := shard.get(key))]

    def add(self, chunk: Chunk) -> None:
        """A new chunk, to be filled; in its shard its key has no other."""
        while len(self._shards) <= chunk.shard:
            self._shards.append({})
        self._shards[chunk.shard][chunk.key] = chunk
        self.slots[chunk.slot.offset] = chunk
        self.writing[chunk.slot.offset] = chunk

    def written(self, chunk: Chunk) -> None:
        """Nobody may write it any more. Idempotent."""
        self.writing.pop(chunk.slot.offset, None)

    def hide(self, chunk: Chunk) -> None:
        """Its key does not lead to it any more; another chunk may have that key by now. Idempotent."""
        keys = self._shards[chunk.shard]
        if keys.get(chunk.key) is chunk:
            del keys[chunk.key]

    def remove(self, chunk: Chunk) -> None:
        """Forget it altogether; its slot is nobody's."""
        self.hide(chunk)
        self.written(chunk)
        del self.slots[chunk.slot.offset]
