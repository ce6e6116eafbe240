"""Records of the store: a chunk of one shard, its reservation, and what a request asks for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.keys import KEY_BYTES, is_named
from pdx.memory.layout import slice_span
from pdx.memory.rules import Rule
from pdx.memory.slot import Slot
from pdx.store.lifecycle import State
from pdx.store.policies.policy import ORDINARY, Evictable
from pdx.wire.hints import NO_HINTS, Hints

NODE = 0  # the node's own session, which fills the chunks that copies load


class Origin(msgspec.Struct, gc=False):
    """Where the bytes of chunks came from. All chunks of a reservation, or of a load, share one."""

    name: str
    kind: str = ""  # a tier's kind or `peer`; empty: an engine or a client
    sealed_at: float = 0.0  # when the last chunk was sealed (the store's clock)
    nbytes: int = 0  # moved by the load …
    start_ns: int = 0  # … from here …
    end_ns: int = 0  # … to here (CLOCK_MONOTONIC)
    blended: float | None = None  # as the blender has reported: see `pdx.wire.messages.Fill`

    def moved(self, nbytes: int, start_ns: int, end_ns: int) -> None:
        self.nbytes += nbytes
        self.start_ns = min(self.start_ns or start_ns, start_ns)
        self.end_ns = max(self.end_ns, end_ns)

    @property
    def gb_s(self) -> float:
        """Rate of the whole load; 0: not known."""
        return self.nbytes / (self.end_ns - self.start_ns) if self.end_ns > self.start_ns else 0.0


def from_node(name: str) -> Origin:
    return Origin(f"node {name}", "peer")


class Reservation(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What chunks have in common that were reserved together, or loaded by one copy."""

    layers: int
    owner: int  # the session that made it; when that ends, it is aborted
    writers: Sequence[int]  # per shard, the session whose process fills it
    arenas: Sequence[int] = ()  # per shard, the arena; the node's first by default
    is_named: bool = False  # the keys are a client's names, not derived from content
    transfer: str | None = None
    deadline: float = float("inf")
    block_tokens: int = 0  # tokens per block; 0: not known
    origin: Origin = msgspec.field(default_factory=lambda: Origin(""))
    layout: bytes = b""  # the KV layout of the engine that fills the chunks; empty: not known

    @property
    def shards(self) -> int:
        return len(self.writers)


class Chunk(Evictable, eq=False, gc=False):
    """Where a chunk lies and what holds it. Owned by the node's control loop; no other thread touches it."""

    slot: Slot
    reservation: Reservation
    tail: bool = False  # a partial chunk: the end of a prompt
    blocks: bytes = b""  # names of its full blocks (`pdx.store.siblings`), if the engine has told them …
    parent: bytes = b""  # … and the key of the chunk before it in its prompt
    state: State = State.FILLING  # changed by the index only
    filled: int = 0  # bit l: slice l is filled
    leases: int = 0
    is_shared: bool = False  # another prompt was found to share its beginning
    is_found: bool = False  # a request has found it since it came here
    is_stored: bool = False  # it was given to the tiers below, or came from one
    is_stored_again: bool = False  # it was given to them a second time, and no request has found it since
    before: Chunk | None = None  # the chunk before it in its reservation, until it is sealed or gone

    def __repr__(self) -> str:
        return f"<Chunk {self.key.hex()[:8]}/{self.shard} {self.state} at {self.slot.offset} leases={self.leases}>"

    @property
    def writer(self) -> int:
        """The session whose process fills the chunk."""
        return self.reservation.writers[self.shard]

    @property
    def layers(self) -> int:
        return self.reservation.layers

    @property
    def block_tokens(self) -> int:
        return self.reservation.block_tokens

    @property
    def is_named(self) -> bool:
        """Whether the key is a client's name, not derived from content."""
        return self.reservation.is_named or is_named(self.key)

    @property
    def is_complete(self) -> bool:
        return self.filled == (1 << self.reservation.layers) - 1

    def span(self, first_layer: int, layers: int) -> tuple[int, int]:
        """Start and bytes of slices [first_layer, first_layer + layers) within the slot."""
        return slice_span(self.slot.nbytes, self.reservation.layers, first_layer, layers)

    @property
    def is_for_one(self) -> bool:
        """Whether only one reader can find the chunk; it is freed when that reader is done."""
        return self.tail and not self.blocks

    @property
    def is_spare(self) -> bool:
        """Whether the chunk is the end of a prompt without a known reader."""
        return self.tail and self.reservation.transfer is None

    @property
    def is_evictable(self) -> bool:
        """Whether the chunk may be evicted now."""
        return self.state is State.SEALED and not self.leases and not self.is_kept

    @property
    def is_kept(self) -> bool:
        """Whether a pin or a tenant's lease keeps the chunk from eviction even while it has no reader."""
        keep = self.keep
        return keep is not ORDINARY and bool(keep.pins or keep.leased_until)


class Claim(Reservation, kw_only=True, eq=False):
    """A request for a reservation: `nbytes` per chunk, one slot per shard and key."""

    keys: Sequence[bytes]
    nbytes: int
    tail_nbytes: int = 0  # bytes of the last key's chunk if that is a tail, else 0
    blocks: bytes = b""  # names of all its full blocks, from the first key's first on; empty: not told …
    chunk_blocks: int = 0  # … and the number of blocks per chunk
    parent: bytes = b""  # the key before the first one in the prompt
    partial: bool = False
    hints: Hints = NO_HINTS  # of the request, used by eviction
    who: str = ""  # the requester, for the explanation of evictions
    rule: Rule | None = None  # with several cache groups, the rule of its group; None: not a whole prompt …
    chunks_before: int = 0  # … after its first so many chunks
    passed: Collection[int] = ()  # indices of chunks that are evicted first until a request finds them

    def sizes(self, indices: Sequence[int]) -> list[int]:
        tail = len(self.keys) - 1 if self.tail_nbytes else -1
        return [self.tail_nbytes if index == tail else self.nbytes for index in indices]

    def chunks(self, granted: Sequence[int], slots: Sequence[Slot]) -> list[Chunk]:
        """New records for the granted indices, one per shard, to be filled in `slots`."""
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
                room, is_tail = rooms[slot.nbytes], index == tail
                chunk = Chunk(
                    slot,
                    reservation,
                    is_tail,
                    blocks,
                    parent,
                    key=keys[index],
                    shard=shard,
                    room_bytes=room,
                    hints=hints,
                    is_passed=index in self.passed,
                )
                chunk.before = before[shard]
                before[shard] = chunk
                made.append(chunk)
        return made


class Wanted(msgspec.Struct, frozen=True):
    """What a request asks for, now or later. `who` names it in explanations; `is_named`: the keys are a client's names.

    `rules`: one per cache group if there are several; `keys` has the same number of keys for each, group after group.
    `has_tail`: the last key of each group is the prompt's tail. `is_whole`: with several cache groups, the keys that
    one length of a prompt needs: all of them or none.
    """

    keys: Sequence[bytes]
    shards: int
    arenas: Sequence[int] = ()
    is_named: bool = False
    who: str = ""
    rules: Sequence[Rule] = ()
    has_tail: bool = False
    is_whole: bool = False
