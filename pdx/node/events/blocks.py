"""From changes by chunk to events by block: which blocks are in which tiers. Pure; one thread.

A chunk is told of when its blocks' names are known. A block may be in several chunks, as in the end of one prompt and
in a whole chunk of a longer one: it is gone when the last of them is. Such chunks begin with the same block, because a
block's name covers all that leads up to it; so a look at the neighbours of a chunk in the order of names is enough.
(Not where engines of one model have chunks of different lengths: then a block is told as gone though a chunk of the
other length has it, which costs a router a hit.)
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pdx.memory.keys import KEY_BYTES
from pdx.node.events.log import Change
from pdx.store.siblings import Siblings
from pdx.wire.kv_events import BlockRemoved, BlockStored, Hash, KvEvent

PIECE_KEYS = 1024


class _Known(msgspec.Struct, gc=False):
    """One key: the tiers that have it, as bits, and what it is to its engine."""

    tiers: int = 0
    parent: bytes = b""
    blocks: bytes = b""
    block_tokens: int = 0


class Blocks:
    """What all changes so far amount to."""

    def __init__(self, *, as_bytes: bool = False) -> None:
        """`as_bytes`: hashes are told as 16 bytes, else as their last 64 bits in a number."""
        self._as_bytes = as_bytes
        self._known: dict[bytes, _Known] = {}
        self._bits: dict[str, int] = {}  # by tier
        # By a tier's bit and the name of a first block: the key there that begins so, or several keys.
        self._alike: defaultdict[int, dict[bytes, bytes | Siblings]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._known)

    def begin(self) -> None:
        """What was told is void, but for the names of blocks: all that is there is told anew, until `end`."""
        for known in self._known.values():
            known.tiers = 0
        self._alike.clear()

    def end(self) -> None:
        """It has been told: what was not is nowhere."""
        for key in list(self._known):
            if not self._known[key].tiers:
                del self._known[key]

    def apply(self, changes: Iterable[Change]) -> list[KvEvent]:
        """Take these in; what they are by block."""
        events: list[KvEvent] = []
        for change in changes:
            bit = self._bits.setdefault(change.tier, 1 << len(self._bits))
            if change.is_stored:
                events += self._stored(change, bit)
            else:
                hashes = [each for key in change.keys for each in self._removed(key, bit)]
                if hashes:
                    events.append(BlockRemoved(hashes, change.tier))
        return events

    def _stored(self, change: Change, bit: int) -> list[KvEvent]:
        late: dict[bytes, int] = {}  # tiers that had what is told only now
        for named in change.named:
            known = self._known.setdefault(named.key, _Known())
            if not known.blocks:
                known.parent, known.blocks, known.block_tokens = (
                    named.parent,
                    named.blocks,
                    named.block_tokens,
                )
                late[named.key] = known.tiers & ~bit
        for key in change.keys:
            self._known.setdefault(key, _Known()).tiers |= bit
        events = self._told(change.keys, change.tier)
        for tier, other in self._bits.items():
            events += self._told([key for key, tiers in late.items() if tiers & other], tier)
        return events

    def _removed(self, key: bytes, bit: int) -> Sequence[Hash]:
        known = self._known.get(key)
        if known is None or not known.tiers & bit:
            return ()
        known.tiers &= ~bit
        if not known.tiers:
            del self._known[key]
        if not known.blocks:
            return ()
        alike, first, left = self._alike[bit], known.blocks[:KEY_BYTES], 0
        others = alike[first]
        if isinstance(others, Siblings):
            others.discard(key)
            left = next((count for _, count in others.like(b"", known.blocks)), 0)
        if not left:
            del alike[first]
        return self._hashes(known.blocks[left * KEY_BYTES :])

    def _note(self, alike: dict[bytes, bytes | Siblings], key: bytes, blocks: bytes) -> None:
        """It is in the tier. Idempotent."""
        first = blocks[:KEY_BYTES]
        others = alike.setdefault(first, key)
        if isinstance(others, bytes):
            if others == key:
                return  # as nearly always
            alone, others = others, Siblings()
            others.add(b"", self._known[alone].blocks, alone)
            alike[first] = others
        if key not in others:
            others.add(b"", blocks, key)

    def _told(self, keys: Iterable[bytes], tier: str) -> list[KvEvent]:
        """These are in a tier, which is noted: those that follow one another in one event."""
        alike = self._alike[self._bits[tier]]
        events: list[KvEvent] = []
        before, block_tokens = b"", 0
        run: list[Hash] = []  # of the last event
        for key in keys:
            known = self._known[key]
            if not known.blocks:
                continue
            if not events or known.parent != before or known.block_tokens != block_tokens:
                run, block_tokens = [], known.block_tokens
                events.append(BlockStored(run, self._parent(known), [], block_tokens, medium=tier))
            run += self._hashes(known.blocks)
            before = key
            self._note(alike, key, known.blocks)
        return events

    def _parent(self, known: _Known) -> Hash | None:
        parent = self._known.get(known.parent)
        return self._hashes(parent.blocks[-KEY_BYTES:])[0] if parent is not None and parent.blocks else None

    def _hashes(self, names: bytes) -> Sequence[Hash]:
        if self._as_bytes:
            return [names[at : at + KEY_BYTES] for at in range(0, len(names), KEY_BYTES)]
        return struct.unpack(">" + "8xQ" * (len(names) // KEY_BYTES), names)

    def everything(self) -> Iterator[list[KvEvent]]:
        """What is where now, in pieces. Nothing may be taken in meanwhile."""
        keys = list(self._known)
        for at in range(0, len(keys), PIECE_KEYS):
            piece = keys[at : at + PIECE_KEYS]
            for tier, bit in self._bits.items():
                yield self._told([key for key in piece if self._known[key].tiers & bit], tier)
