"""The form of a chunk that is kept outside of memory, in a file or under a key.

It is a header, then the bytes of the chunk as they lie in the arena (version 3), or its slices, each encoded by itself,
one behind the other (version 4).

The header says what the bytes are for and has a digest of each slice, as it stands there; of an encoded chunk also the
codec, and how many bytes each slice takes:

    magic (8 bytes) | version (4) | bytes of the body (4) | digest of the body (8) | body, msgpack | zeros to 4 KiB

Releases before version 4 take an encoded chunk for an outdated one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, NamedTuple, NoReturn

import msgspec
import xxhash
from msgspec import Meta

from pdx.errors import CodecError, TierError
from pdx.memory.arena import GRANULE_BYTES, round_up
from pdx.memory.layout import slice_span
from pdx.memory.slot import Bytes
from pdx.store.codecs.codec import NONE, codec_of, decode_slice, encode_slice
from pdx.store.tier import Part
from pdx.wire.base import MAX_LAYERS, Key, LayerCount, Shard

MAGIC = b"PDXCHUNK"
PLAIN, ENCODED = 3, 4  # versions
HEADER_BYTES = 4096  # of a chunk with fewer than about 320 slices; more slices need whole further blocks
_DIGEST_BYTES = 8
_SIZE = struct.Struct("<I")  # of a slice that is encoded
_MAX_SLICE_BYTES = 1 << 31  # larger ones are not encoded
_MAX_BODY_BYTES = (_DIGEST_BYTES + _SIZE.size) * MAX_LAYERS + 384
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

    @property
    def stored(self) -> int:
        """Bytes behind the header."""
        return self.nbytes

    @property
    def start(self) -> int:
        """Bytes of the header."""
        return header_bytes(self.layers)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and bytes of each slice, as it stands behind the header."""
        return (slice_span(self.nbytes, self.layers, layer, 1) for layer in range(self.layers))


class EncodedHeader(Header, frozen=True):
    """What an encoded chunk says of itself."""

    codec: Annotated[str, Meta(min_length=1, max_length=128)]  # see `pdx.store.codecs.codec.codec_of`
    sizes: Annotated[bytes, Meta(max_length=_SIZE.size * MAX_LAYERS)]

    @property
    def stored(self) -> int:
        """Bytes behind the header."""
        return sum(size for (size,) in _SIZE.iter_unpack(self.sizes))

    @property
    def start(self) -> int:
        """Bytes of the header."""
        return header_bytes(self.layers, is_encoded=True)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and bytes of each slice, as it stands behind the header."""
        first = 0
        for (size,) in _SIZE.iter_unpack(self.sizes):
            yield first, size
            first += size


_decoders: dict[int, msgspec.msgpack.Decoder[Header]] = {
    PLAIN: msgspec.msgpack.Decoder(Header),
    ENCODED: msgspec.msgpack.Decoder(EncodedHeader),
}


def header_bytes(layers: int, *, is_encoded: bool = False) -> int:
    """What comes before the bytes of a chunk with so many slices."""
    if is_encoded:
        return round_up(_PREFIX.size + 256 + (_DIGEST_BYTES + _SIZE.size) * layers)
    return round_up(_PREFIX.size + 128 + _DIGEST_BYTES * layers)


def aligned(nbytes: int) -> memoryview:
    """Empty memory that a disk can read and write itself, as it can that of an arena."""
    return memoryview(mmap.mmap(-1, nbytes))


class Kept(NamedTuple):
    """An encoded chunk: header and body, each `aligned`, of whole granules; the body has `nbytes` bytes."""

    head: memoryview
    body: memoryview
    nbytes: int

    @property
    def data(self) -> memoryview:
        """The body itself."""
        return self.body[: self.nbytes]


def encoded(part: Part, data: memoryview, codec: str, is_over: Over) -> Kept | None:
    """A whole chunk, whose bytes are `data`, by a codec; None: it would not take fewer granules.

    :raises TierError: the codec is not for such chunks; `is_over`.
    """
    nbytes, layers = part.slot.nbytes, part.layers
    if nbytes // layers >= _MAX_SLICE_BYTES or nbytes <= GRANULE_BYTES:
        return None
    most = round_up(nbytes) - GRANULE_BYTES + header_bytes(layers) - header_bytes(layers, is_encoded=True)
    if most <= 0:
        return None
    body, used, sizes, digests = aligned(most), 0, bytearray(), bytearray()
    on_piece = partial(end_if, is_over)
    try:
        by = codec_of(codec)
        for first, count in spans(nbytes, layers, is_over):
            size = encode_slice(by, data[first : first + count], body[used:], on_piece)
            if count and not size:
                return None
            sizes += _SIZE.pack(size)
            digests += xxhash.xxh3_64_digest(body[used : used + size])
            used += size
    except CodecError as error:
        raise TierError(f"chunk {part.key.hex()[:8]} cannot be encoded: {error}", "not_encoded") from error
    head = aligned(header_bytes(layers, is_encoded=True))
    header = EncodedHeader(part.key, part.shard, nbytes, layers, bytes(digests), codec, bytes(sizes))
    _write_header(ENCODED, header, head)
    return Kept(head, body[: round_up(used)], used)


def packed(part: Part, data: memoryview, codec: str, is_over: Over) -> tuple[list[memoryview], int]:
    """A whole chunk, whose bytes are `data`, behind its header: by the codec where it then takes less, else `data`
    itself. And its bytes behind the header, if they are encoded; else 0.

    :raises TierError: the codec is not for such chunks; `is_over`.
    """
    kept = encoded(part, data, codec, is_over) if codec != NONE else None
    if kept is not None:
        return [kept.head, kept.data], kept.nbytes
    head = memoryview(bytearray(header_bytes(part.layers)))
    encode(part, data, head, is_over)
    return [head, data], 0


def decode(header: EncodedHeader, data: memoryview, into: memoryview, path: object, is_over: Over) -> None:
    """Decode the slices of an encoded chunk, whose header and bytes were read of `path`. The digests are compared
    first.

    :raises TierError: they are not what was written; this release knows no such codec; `is_over`.
    """
    compare(header, data, path, is_over)
    on_piece = partial(end_if, is_over)
    try:
        by = codec_of(header.codec)
    except CodecError as error:
        raise TierError(f"{path}: {error}", "outdated") from error
    try:
        raw = spans(header.nbytes, header.layers, is_over)
        for (first, size), (start, count) in zip(header.spans(), raw, strict=True):
            decode_slice(by, data[first : first + size], into[start : start + count], on_piece)
    except CodecError as error:
        raise TierError(f"{path} cannot be decoded: {error}", "corrupt") from error


def _write_header(version: int, header: Header, into: memoryview) -> None:
    body = msgspec.msgpack.encode(header)
    whole = _PREFIX.pack(MAGIC, version, len(body), xxhash.xxh3_64_intdigest(body)) + body
    into[: len(whole)] = whole


def encode(part: Part, data: memoryview, into: memoryview, is_over: Over) -> None:
    """Make the header of a whole chunk, whose bytes are `data`.

    :raises TierError: `is_over`.
    """
    digests = bytearray()
    for first, nbytes in spans(part.slot.nbytes, part.layers, is_over):
        digests += xxhash.xxh3_64_digest(data[first : first + nbytes])
    _write_header(PLAIN, Header(part.key, part.shard, part.slot.nbytes, part.layers, bytes(digests)), into)


def whole_header(head: memoryview) -> int:
    """So many bytes have to be read for the header that begins so; 0: it is none."""
    if len(head) < _PREFIX.size:
        return 0
    magic, _, body_bytes, _ = _PREFIX.unpack_from(head)
    return _PREFIX.size + body_bytes if magic == MAGIC and body_bytes <= _MAX_BODY_BYTES else 0


def is_encoded(head: memoryview) -> bool:
    """Whether a header that begins so is that of an encoded chunk."""
    return len(head) >= _PREFIX.size and _PREFIX.unpack_from(head)[1] == ENCODED


def parsed(data: memoryview, size: int, path: object) -> Header:
    """The header at the beginning of `data`, of `path` with `size` bytes in all.

    :raises TierError: there is none.
    """
    if len(data) < _PREFIX.size:
        raise TierError(f"{path} ends in its header", "truncated")
    magic, version, body_bytes, digest = _PREFIX.unpack_from(data)
    if magic != MAGIC or body_bytes > _MAX_BODY_BYTES:
        _damaged(path)
    if version not in _decoders:
        raise TierError(f"{path} has format {version}; this is {ENCODED}", "outdated")
    body = data[_PREFIX.size : _PREFIX.size + body_bytes]
    if size < _PREFIX.size + body_bytes:
        raise TierError(f"{path} ends in its header", "truncated")
    if len(body) < body_bytes or xxhash.xxh3_64_intdigest(body) != digest:
        _damaged(path)
    try:
        header: Header = _decoders[version].decode(body)
    except msgspec.MsgspecError:
        _damaged(path)
    if isinstance(header, EncodedHeader) and (
        len(header.sizes) != _SIZE.size * header.layers or header.stored >= header.nbytes
    ):
        _damaged(path)
    whole = header.start + header.stored
    if len(header.digests) != _DIGEST_BYTES * header.layers or size > whole:
        _damaged(path)
    if size < whole:
        raise TierError(f"{path} has {size} bytes, not {whole}", "truncated")
    return header


def _damaged(path: object) -> NoReturn:
    raise TierError(f"{path} has a damaged header", "corrupt")


def compare(header: Header, data: memoryview, path: object, is_over: Over) -> None:
    """Whether `data` are the bytes that stand behind that header.

    :raises TierError: a slice has not the digest that was written with it; `is_over`.
    """
    due = 0
    for number, (first, nbytes) in enumerate(header.spans()):
        if first >= due:
            end_if(is_over)
            due = first + _PIECE_BYTES
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
