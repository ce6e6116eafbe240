"""One chunk of one shard: its record in the node's index; and what somebody asks room for."""

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

NODE = 0  # the session that fills what a copy loads: the node itself


class Origin(msgspec.Struct, gc=False):
    """Where the bytes of chunks came from: one for all chunks of a reservation, or of a load."""

    name: str
    kind: str = ""  # that of a tier, `peer`; empty: an engine or a client
    sealed_at: float = 0.0  # of the last one, the store's clock
    nbytes: int = 0  # of a load: what was moved …
    start_ns: int = 0  # … from when …
    end_ns: int = 0  # … until when (CLOCK_MONOTONIC)
    blended: float | None = None  # as its blender has said: see `pdx.wire.messages.Fill`

    def moved(self, nbytes: int, start_ns: int, end_ns: int) -> None:
        self.nbytes += nbytes
        self.start_ns = min(self.start_ns or start_ns, start_ns)
        self.end_ns = max(self.end_ns, end_ns)

    @property
    def gb_s(self) -> float:
        """Of the load as a whole; 0: not known."""
        return self.nbytes / (self.end_ns - self.start_ns) if self.end_ns > self.start_ns else 0.0


def from_node(name: str) -> Origin:
    """Of what this peer has written here."""
    return Origin(f"node {name}", "peer")


class Reservation(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What is the same for all chunks that were reserved together, or loaded by one copy."""

    layers: int
    owner: int  # session that answers for it
    writers: Sequence[int]  # session whose process fills shard 0, 1, …
    arenas: Sequence[int] = ()  # where shard 0, 1, … lies; the first arena of the node by default
    is_named: bool = False  # the keys are a client's names, which say nothing of the bytes
    transfer: str | None = None
    deadline: float = float("inf")
    block_tokens: int = 0  # that a block has; 0: not known
    origin: Origin = msgspec.field(default_factory=lambda: Origin(""))  # of the bytes
    layout: bytes = b""  # the KV layout of the engine that fills them; empty: not known

    @property
    def shards(self) -> int:
        return len(self.writers)


class Chunk(Evictable, eq=False, gc=False):
    """Where a chunk lies and who holds it. Owned by the node's control loop; no other thread touches it."""

    slot: Slot
    reservation: Reservation
    tail: bool = False  # fewer blocks than a chunk has: the end of a prompt
    blocks: bytes = b""  # names of its full blocks (`pdx.store.siblings`), where the engine has told them …
    parent: bytes = b""  # … and the key of the chunk that leads up to it
    state: State = State.FILLING  # changed by the index alone
    filled: int = 0  # bit l: slice l is filled
    leases: int = 0
    is_shared: bool = False  # a prompt was found that begins as it does
    is_found: bool = False  # a request has found it since it is here
    is_stored: bool = False  # the tiers below were given it, or it came from one
    is_stored_again: bool = False  # they were, a second time, and no request has found it since
    before: Chunk | None = None  # the chunk before it in its reservation, until it is sealed or gone

    def __repr__(self) -> str:
        return f"<Chunk {self.key.hex()[:8]}/{self.shard} {self.state} at {self.slot.offset} leases={self.leases}>"

    @property
    def writer(self) -> int:
        """The session whose process fills it."""
        return self.reservation.writers[self.shard]

    @property
    def layers(self) -> int:
        return self.reservation.layers

    @property
    def block_tokens(self) -> int:
        return self.reservation.block_tokens

    @property
    def is_named(self) -> bool:
        """Whether a client's name is its key, which says nothing of the bytes."""
        return self.reservation.is_named or is_named(self.key)

    @property
    def is_complete(self) -> bool:
        return self.filled == (1 << self.reservation.layers) - 1

    def span(self, first_layer: int, layers: int) -> tuple[int, int]:
        """Where slices [first_layer, first_layer + layers) lie in the slot: (start, bytes)."""
        return slice_span(self.slot.nbytes, self.reservation.layers, first_layer, layers)

    @property
    def is_for_one(self) -> bool:
        """Whether it goes with its only reader: nobody else could find it."""
        return self.tail and not self.blocks

    @property
    def is_spare(self) -> bool:
        """Whether it is the end of a prompt that nobody is known to read."""
        return self.tail and self.reservation.transfer is None

    @property
    def is_evictable(self) -> bool:
        """Whether its room may be given to another now."""
        return self.state is State.SEALED and not self.leases and not self.is_kept

    @property
    def is_kept(self) -> bool:
        """Whether a pin or a tenant's lease keeps it from being evicted, though nobody reads it."""
        keep = self.keep
        return keep is not ORDINARY and bool(keep.pins or keep.leased_until)


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
    rule: Rule | None = None  # of several cache groups, that of theirs; None: they are not a whole prompt's …
    chunks_before: int = 0  # … behind the first so many chunks
    passed: Collection[int] = ()  # indices of those that leave first until a request finds them

    def sizes(self, indices: Sequence[int]) -> list[int]:
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
    """What a request asks for, or will, and by whom explanations name it; `is_named`: the keys are a client's names.

    `rules`: of several cache groups, the keys of which follow each other, each as many; `has_tail`: their last ones are
    the prompt's tail. `is_whole`: of several cache groups, what one length of a prompt needs: all of them or none.
    """

    keys: Sequence[bytes]
    shards: int
    arenas: Sequence[int] = ()
    is_named: bool = False
    who: str = ""
    rules: Sequence[Rule] = ()
    has_tail: bool = False
    is_whole: bool = False
