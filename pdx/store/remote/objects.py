"""The objects of a remote store: what they are called, what a header says of one, and how its bytes come to memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdx.errors import TierError
from pdx.memory.arena import Arena
from pdx.store.chunk_format import (
    EncodedHeader,
    Header,
    compare,
    decode,
    header_bytes,
    is_encoded,
    parsed,
    whole_header,
)
from pdx.store.remote.backend import Backend, Found
from pdx.store.tier import Held, Part


def placed(backend: Backend, arena: Arena, part: Part, name: str, is_over: Callable[[], bool]) -> Header:
    """Have a chunk read into its place, and see that it is good. Where it is not, anything may be there.

    :raises TierError: there is nothing of that name, or something else, or it is damaged, or the store failed.
    :raises StaleSlot, LayoutError: its place is another's by now.
    """
    head = memoryview(bytearray(header_bytes(part.layers)))
    arena.check(part.slot)
    with arena.data[part.slot.offset : part.slot.offset + part.slot.nbytes] as room:
        size = backend.read(name, [head, room])
        if size is None:
            raise TierError(f"{name} is not there any more", "missing")
        whole = head
        if whole_header(head) > len(head) or is_encoded(head):  # it takes no more than a chunk that is not encoded
            whole = memoryview(b"".join((head, room)))[: min(size, len(head) + len(room))]
        header = parsed(whole[: min(size, header_bytes(part.layers, is_encoded=True))], size, name)
        is_other = name_of(header.key, header.shard) != name or Held(header.nbytes, header.layers) != size_of(part)
        if is_other or size > len(head) + len(room):
            raise TierError(f"{name} has another chunk", "corrupt")
        arena.check(part.slot)
        if isinstance(header, EncodedHeader):
            decode(header, whole[header.start :], room, name, is_over)
        else:
            compare(header, room, name, is_over)
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
