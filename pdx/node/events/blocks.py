"""Turns changes by chunk into events by block: which blocks are in which places. No I/O; not thread-safe.

A chunk is reported once the names of its blocks are known. A block may be in several chunks, as in the end of one
prompt and in a whole chunk of a longer one, and a chunk in several tiers of one place: a block is reported as stored
with the first of them and as removed with the last, for readers that count both. Such chunks begin with the same block,
because a block's name covers all blocks before it; so a look at a chunk's neighbors in the order of names is enough.
(If engines of one model have chunks of different lengths, a block is reported as removed though a chunk of the other
length has it, which costs a router a hit.)
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from pdx.memory.keys import KEY_BYTES
from pdx.node.events.log import Change, Place
from pdx.store.siblings import Siblings
from pdx.wire.kv_events import BlockRemoved, BlockStored, Hash, KvEvent

PIECE_KEYS = 1024
# Only engines with one cache group, which is of this kind, name blocks.
GROUP, KIND = 0, "full_attention"
# By the name of a first block: the reported key, or several, in one place whose chunk begins with that block.
_Alike = dict[bytes, bytes | Siblings]


class _Known(msgspec.Struct, gc=False):
    """One key: the tiers that have it, as bits, and the blocks that its engine named."""

    tiers: int = 0
    parent: bytes = b""
    blocks: bytes = b""
    block_tokens: int = 0


class Blocks:
    """The blocks in each place, as of all changes so far."""

    def __init__(self, places: Mapping[str, Place] = MappingProxyType({}), *, as_bytes: bool = False) -> None:
        """`places`: how tiers are reported; others are by their own names. `as_bytes`: hashes are reported as 16 bytes,
        else as a number, their last 64 bits."""
        self._places = places
        self._as_bytes = as_bytes
        self._known: dict[bytes, _Known] = {}
        self._bits: dict[str, int] = {}  # by tier
        self._masks: dict[Place, int] = {}  # the bits of its tiers
        self._alike: defaultdict[Place, _Alike] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._known)

    def begin(self) -> None:
        """Forget where chunks are, but not the names of blocks: all of it is applied anew, until `end`."""
        for known in self._known.values():
            known.tiers = 0
        self._alike.clear()

    def end(self) -> None:
        """Forget the chunks that were not applied since `begin`: they are in no tier."""
        for key in list(self._known):
            if not self._known[key].tiers:
                del self._known[key]

    def apply(self, changes: Iterable[Change]) -> list[KvEvent]:
        """Apply these changes; return the events by block."""
        events: list[KvEvent] = []
        for change in changes:
            bit = self._bits.setdefault(change.tier, 1 << len(self._bits))
            place = self._places.get(change.tier) or Place(change.tier)
            mask = self._masks[place] = self._masks.get(place, 0) | bit
            if change.is_stored:
                events += self._stored(change, bit, place)
            else:
                alike = self._alike[place]
                hashes = [each for key in change.keys for each in self._removed(key, bit, mask, alike)]
                if hashes:
                    events.append(BlockRemoved(hashes, place.medium, GROUP, place.locality))
        return events

    def _stored(self, change: Change, bit: int, place: Place) -> list[KvEvent]:
        late: dict[bytes, int] = {}  # by key named only now, the tiers that had it
        for named in change.named:
            known = self._known.setdefault(named.key, _Known())
            if not known.blocks:
                known.parent, known.blocks, known.block_tokens = (
                    named.parent,
                    named.blocks,
                    named.block_tokens,
                )
                late[named.key] = known.tiers
        for key in change.keys:
            self._known.setdefault(key, _Known()).tiers |= bit
        events = self._told(change.keys, place)
        for other, mask in self._masks.items():
            events += self._told([key for key, tiers in late.items() if tiers & mask], other)
        return events

    def _removed(self, key: bytes, bit: int, mask: int, alike: _Alike) -> Sequence[Hash]:
        known = self._known.get(key)
        if known is None or not known.tiers & bit:
            return ()
        known.tiers &= ~bit
        if not known.tiers:
            del self._known[key]
        if not known.blocks or known.tiers & mask:
            return ()
        first, left = known.blocks[:KEY_BYTES], 0
        others = alike[first]
        if isinstance(others, Siblings):
            others.discard(key)
            left = _like(others, known.blocks)
        if not left:
            del alike[first]
        return self._hashes(known.blocks[left * KEY_BYTES :])

    def _note(self, alike: _Alike, key: bytes, blocks: bytes) -> int:
        """Note that a chunk is in the place; return how many of its leading blocks were reported there. Idempotent."""
        first = blocks[:KEY_BYTES]
        others = alike.get(first)
        if others is None:
            alike[first] = key
            return 0  # the usual case
        if isinstance(others, bytes):
            if others == key:
                return len(blocks) // KEY_BYTES
            alone, others = others, Siblings()
            others.add(b"", self._known[alone].blocks, alone)
            alike[first] = others
        told = _like(others, blocks)
        if key not in others:
            others.add(b"", blocks, key)
        return told

    def _told(self, keys: Iterable[bytes], place: Place) -> list[KvEvent]:
        """Note that these keys are in a place; return events of blocks not reported yet, one per run of keys."""
        alike = self._alike[place]
        events: list[KvEvent] = []
        before, block_tokens = b"", 0
        run: list[Hash] = []  # of the last event
        for key in keys:
            known = self._known[key]
            if not known.blocks:
                continue
            at = self._note(alike, key, known.blocks) * KEY_BYTES
            if at == len(known.blocks):
                continue
            if at or not events or known.parent != before or known.block_tokens != block_tokens:
                run, block_tokens = [], known.block_tokens
                parent = self._hashes(known.blocks[at - KEY_BYTES : at])[0] if at else self._parent(known)
                where = (place.medium, None, GROUP, KIND, place.locality)
                events.append(BlockStored(run, parent, [], block_tokens, None, *where))
            run += self._hashes(known.blocks[at:])
            before = key
        return events

    def _parent(self, known: _Known) -> Hash | None:
        parent = self._known.get(known.parent)
        return self._hashes(parent.blocks[-KEY_BYTES:])[0] if parent is not None and parent.blocks else None

    def _hashes(self, names: bytes) -> Sequence[Hash]:
        if self._as_bytes:
            return [names[at : at + KEY_BYTES] for at in range(0, len(names), KEY_BYTES)]
        return struct.unpack(">" + "8xQ" * (len(names) // KEY_BYTES), names)

    def everything(self) -> Iterator[list[KvEvent]]:
        """Events of all blocks in all places, in pieces. Nothing may be applied meanwhile."""
        self._alike.clear()  # the readers know of no block yet
        keys = list(self._known)
        for at in range(0, len(keys), PIECE_KEYS):
            piece = keys[at : at + PIECE_KEYS]
            for place, mask in self._masks.items():
                yield self._told([key for key in piece if self._known[key].tiers & mask], place)


def _like(others: Siblings, blocks: bytes) -> int:
    """The most leading blocks that one of these has in common with `blocks`."""
    return next((count for _, count in others.like(b"", blocks)), 0)
