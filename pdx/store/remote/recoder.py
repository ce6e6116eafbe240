"""Objects of a remote store that are written anew in another form. For the threads of `pdx.store.remote.tier`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from pdx.errors import TierError
from pdx.memory.slot import Slot
from pdx.store.chunk_format import (
    EncodedHeader,
    Over,
    compare,
    decode,
    end_if,
    header_bytes,
    packed,
    parsed,
    whole_header,
)
from pdx.store.codecs.codec import NONE
from pdx.store.recoding import Pair
from pdx.store.remote.backend import Backend
from pdx.store.tier import Part
from pdx.wire.base import MAX_LAYERS

Name = Callable[[bytes, int], str]  # of a key and a shard


def recode(
    backend: Backend, pair: Pair, shards: int, codec: str, name: Name, is_over: Over, *, most_bytes: int
) -> None:
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
            whole = _anew(backend, name(old, shard), (new, shard), codec, is_over, most_bytes)
            if whole is not None:
                end_if(is_over)
                backend.write(name(new, shard), whole)
                written.append(name(new, shard))
    except TierError:
        if old != new and written:
            with contextlib.suppress(TierError):  # they are whole, and only take room
                backend.remove(written)
        raise
    if old != new:
        backend.remove([name(old, shard) for shard in range(shards)])


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
