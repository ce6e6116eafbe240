"""The form of a chunk that is kept outside of memory, in a file or under a key.

It is a header, then the bytes of the chunk as they lie in the arena.

The header says what the bytes are for and has a digest of each slice:

    magic (8 bytes) | version (4) | bytes of the body (4) | digest of the body (8) | body, msgpack | zeros to 4 KiB
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Annotated, NoReturn

import msgspec
import xxhash
from msgspec import Meta

from pdx.errors import TierError
from pdx.memory.arena import round_up
from pdx.memory.layout import slice_span
from pdx.memory.slot import Bytes
from pdx.store.tier import Part
from pdx.wire.messages import MAX_LAYERS, Key, LayerCount, Shard

MAGIC = b"PDXCHUNK"
VERSION = 3
HEADER_BYTES = 4096  # of a chunk with fewer than about 500 slices; more slices need whole further blocks
_DIGEST_BYTES = 8
_MAX_BODY_BYTES = _DIGEST_BYTES * MAX_LAYERS + 256
_PREFIX = struct.Struct("<8sIIQ")
_PIECE_BYTES = 8 << 20  # looked at before somebody may end it
Over = Callable[[], bool]


class Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What it says of itself."""

    key: Key
    shard: Shard
    nbytes: Bytes
    layers: LayerCount
    digests: Annotated[bytes, Meta(max_length=_DIGEST_BYTES * MAX_LAYERS)]


_decoder = msgspec.msgpack.Decoder(Header)


def header_bytes(layers: int) -> int:
    """What comes before the bytes of a chunk with so many slices."""
    return round_up(_PREFIX.size + 128 + _DIGEST_BYTES * layers)


def encode(part: Part, data: memoryview, into: memoryview, is_over: Over) -> None:
    """Make the header of a whole chunk, whose bytes are `data`.

    :raises TierError: `is_over`.
    """
    digests = bytearray()
    for first, nbytes in spans(part.slot.nbytes, part.layers, is_over):
        digests += xxhash.xxh3_64_digest(data[first : first + nbytes])
    body = msgspec.msgpack.encode(Header(part.key, part.shard, part.slot.nbytes, part.layers, bytes(digests)))
    whole = _PREFIX.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body
    into[: len(whole)] = whole


def whole_header(head: memoryview) -> int:
    """So many bytes have to be read for the header that begins so; 0: it is none."""
    if len(head) < _PREFIX.size:
        return 0
    magic, _, body_bytes, _ = _PREFIX.unpack_from(head)
    return _PREFIX.size + body_bytes if magic == MAGIC and body_bytes <= _MAX_BODY_BYTES else 0


def parsed(data: memoryview, size: int, path: object) -> Header:
    """The header at the beginning of `data`, of `path` with `size` bytes in all.

    :raises TierError: there is none.
    """
    if len(data) < _PREFIX.size:
        raise TierError(f"{path} ends in its header", "truncated")
    magic, version, body_bytes, digest = _PREFIX.unpack_from(data)
    if magic != MAGIC or body_bytes > _MAX_BODY_BYTES:
        _damaged(path)
    if version != VERSION:
        raise TierError(f"{path} has format {version}; this is {VERSION}", "outdated")
    body = data[_PREFIX.size : _PREFIX.size + body_bytes]
    if size < _PREFIX.size + body_bytes:
        raise TierError(f"{path} ends in its header", "truncated")
    if len(body) < body_bytes or xxhash.xxh3_64_intdigest(body) != digest:
        _damaged(path)
    try:
        header = _decoder.decode(body)
    except msgspec.MsgspecError:
        _damaged(path)
    start = header_bytes(header.layers)
    if len(header.digests) != _DIGEST_BYTES * header.layers or size > start + header.nbytes:
        _damaged(path)
    if size < start + header.nbytes:
        raise TierError(f"{path} has {size} bytes, not {start + header.nbytes}", "truncated")
    return header


def _damaged(path: object) -> NoReturn:
    raise TierError(f"{path} has a damaged header", "corrupt")


def compare(header: Header, data: memoryview, path: object, is_over: Over) -> None:
    """Whether `data` are the bytes of that header.

    :raises TierError: a slice has not the digest that was written with it; `is_over`.
    """
    for number, (first, nbytes) in enumerate(spans(header.nbytes, header.layers, is_over)):
        expected = header.digests[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)]
        if xxhash.xxh3_64_digest(data[first : first + nbytes]) != expected:
            raise TierError(f"{path} has other bytes than were written", "corrupt")


def spans(chunk_bytes: int, layers: int, is_over: Over) -> Iterator[tuple[int, int]]:
    """Start and bytes of each slice in the chunk."""
    due = 0
    for layer in range(layers):
        first, nbytes = slice_span(chunk_bytes, layers, layer, 1)
        if first >= due:
            end_if(is_over)
            due = first + _PIECE_BYTES
        yield first, nbytes


def end_if(is_over: Over) -> None:
    """:raises TierError: `is_over`."""
    if is_over():
        raise TierError("cancelled", "cancelled")
