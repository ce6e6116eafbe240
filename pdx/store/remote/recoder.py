"""Objects of a remote store that are written anew in another form. For the threads of `pdx.store.remote.tier`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from pdx.errors import TierError
from pdx.memory.slot import Slot
from pdx.store.chunk_format import EncodedHeader, Over, compare, decode, end_if, packed, parsed, whole_header
from pdx.store.codecs.codec import NONE
from pdx.store.recoding import Pair
from pdx.store.remote.backend import Backend
from pdx.store.tier import Part

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
) -> bytes | None:
    """The object in its new form; None: it has that form."""
    whole = backend.read(name)
    if whole is None:
        raise TierError(f"{name} is not there", "missing")
    header = parsed(whole[: whole_header(whole)], len(whole), name)
    if header.nbytes > most_bytes:
        raise TierError(f"{name} has {header.nbytes} bytes, more than any arena of this node", "too_large")
    if (header.codec if isinstance(header, EncodedHeader) else NONE) == codec and header.key == to[0]:
        return None
    data = whole[header.start :]
    if isinstance(header, EncodedHeader):
        raw = memoryview(bytearray(header.nbytes))
        decode(header, data, raw, name, is_over)
    else:
        raw = data
        compare(header, raw, name, is_over)
    part = Part(*to, header.layers, 0, header.layers, Slot(0, header.nbytes, 0))
    return packed(part, raw, codec, is_over)[0]
