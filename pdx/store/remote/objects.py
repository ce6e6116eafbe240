"""The objects of a remote store: what they are called, what a header says of one, how its bytes come to memory, and how
they get another form. For the threads of `pdx.store.remote.tier`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pdx.errors import TierError
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.store.chunk_format import (
    EncodedHeader,
    Header,
    Over,
    compare,
    decode,
    end_if,
    header_bytes,
    is_encoded,
    packed,
    parsed,
    whole_header,
)
from pdx.store.codecs.codec import NONE
from pdx.store.recoding import Pair
from pdx.store.remote.backend import Backend, Found
from pdx.store.tier import Held, Part
from pdx.wire.base import MAX_LAYERS


def placed(backend: Backend, arena: Arena, part: Part, name: str, is_over: Over) -> Header:
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


def recode(backend: Backend, pair: Pair, shards: int, codec: str, is_over: Over, *, most_bytes: int) -> None:
    """Store all shards of a chunk in another form. Each object is replaced at once. Where the key changes, the old ones
    are removed when all of the new are there; if one cannot be written, the new ones are. `most_bytes`: of a chunk of
    one shard that this node could load.

    :raises TierError: the chunk is not there, not good, or not to be stored so, or the store failed.
    """
    old, new = pair
    written: list[str] = []
    try:
        for shard in range(shards):
            end_if(is_over)
            whole = _anew(backend, name_of(old, shard), (new, shard), codec, is_over, most_bytes)
            if whole is not None:
                end_if(is_over)
                backend.write(name_of(new, shard), whole)
                written.append(name_of(new, shard))
    except TierError:
        if old != new and written:
            with contextlib.suppress(TierError):  # they are whole, and only take room
                backend.remove(written)
        raise
    if old != new:
        backend.remove([name_of(old, shard) for shard in range(shards)])


def _anew(
    backend: Backend, name: str, to: tuple[bytes, int], codec: str, is_over: Over, most_bytes: int
) -> list[memoryview] | None:
    """The object in its new form; None: it has that form."""
    [found] = backend.heads([name], header_bytes(MAX_LAYERS, is_encoded=True))
    if found is None:
        raise TierError(f"{name} is not there", "missing")
    header = parsed(found.head[: whole_header(found.head)], found.nbytes, name)
    if header.nbytes > most_bytes:
        raise TierError(f"{name} has {header.nbytes} bytes, more than any arena of this node", "too_large")
    if (header.codec if isinstance(header, EncodedHeader) else NONE) == codec and header.key == to[0]:
        return None
    head, data = (memoryview(bytearray(nbytes)) for nbytes in (header.start, header.stored))
    if backend.read(name, [head, data]) != found.nbytes or parsed(head, found.nbytes, name) != header:
        raise TierError(f"{name} was replaced meanwhile", "missing")
    raw = data
    if isinstance(header, EncodedHeader):
        raw = memoryview(bytearray(header.nbytes))
        decode(header, data, raw, name, is_over)
    else:
        compare(header, raw, name, is_over)
    part = Part(*to, header.layers, 0, header.layers, Slot(0, header.nbytes, 0))
    return packed(part, raw, codec, is_over)[0]
