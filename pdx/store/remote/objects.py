"""The objects of a remote store: what they are called, what a header says of one, and how its bytes come to memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdx.errors import TierError
from pdx.memory.arena import Arena
from pdx.store.chunk_format import EncodedHeader, Header, compare, decode, header_bytes, parsed
from pdx.store.remote.backend import Found
from pdx.store.tier import Held, Part


def placed(whole: memoryview, arena: Arena, part: Part, name: str, is_over: Callable[[], bool]) -> Header:
    """Put the bytes of a chunk in its place, if that is what was read; what was not encoded, only if it is good.

    :raises TierError: it is something else, or damaged.
    :raises StaleSlot, LayoutError: its place is another's by now.
    """
    header = parsed(whole[: header_bytes(part.layers, is_encoded=True)], len(whole), name)
    if name_of(header.key, header.shard) != name or Held(header.nbytes, header.layers) != size_of(part):
        raise TierError(f"{name} has another chunk", "corrupt")
    data = whole[header.start :]
    if not isinstance(header, EncodedHeader):
        compare(header, data, name, is_over)
    arena.check(part.slot)
    room = arena.data[part.slot.offset : part.slot.offset + part.slot.nbytes]
    if isinstance(header, EncodedHeader):
        decode(header, data, room, name, is_over)
    else:
        room[:] = data
    arena.check(part.slot)
    return header


def name_of(key: bytes, shard: int) -> str:
    """Under which a chunk of one shard lies there."""
    return f"v3/{key.hex()}-{shard}"


def size_of(part: Part) -> Held:
    """What is found of a chunk that is stored from this part, or loaded into it."""
    return Held(part.slot.nbytes, part.layers)


def held_of(found: Found | None, name: str) -> Held | None:
    """What was found under a name, by its header; None: no such chunk."""
    if found is None:
        return None
    try:
        header = parsed(found.head, found.nbytes, name)
    except TierError:
        return None
    return Held(header.nbytes, header.layers) if name_of(header.key, header.shard) == name else None


def held_in_all(of_shards: Sequence[Held | None]) -> Held | None:
    """What there is of a key, if all of its shards are alike."""
    return of_shards[0] if len(set(of_shards)) == 1 else None
