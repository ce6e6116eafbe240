"""The format of a chunk outside memory: in a file, or under a key of a remote store.

A header is followed by the chunk's bytes as they lie in the arena, or by its slices, each encoded separately, without
gaps.

The header names the chunk and has a digest of each slice as stored; for an encoded chunk also the codec and the
size of each encoded slice:

    magic (8 bytes) | version (4) | bytes of the body (4) | digest of the body (8) | body, msgpack | zeros to 4 KiB
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, NamedTuple, NoReturn

import msgspec
import xxhash
from msgspec import Meta

from pdx.errors import CodecError, LayoutError, StaleSlot, TierError
from pdx.memory.arena import GRANULE_BYTES, Arena, round_up
from pdx.memory.layout import slice_span
from pdx.memory.slot import Bytes
from pdx.store.codecs.codec import LOSSLESS, NONE, codec_of, decode_slice, encode_slice
from pdx.store.tier import Job, Part
from pdx.wire.base import MAX_LAYERS, Key, LayerCount, Shard

MAGIC = b"PDXCHUNK"
VERSION = 4
HEADER_BYTES = 4096  # for fewer than about 320 slices; more slices need further whole blocks
_DIGEST_BYTES = 8
_SIZE = struct.Struct("<I")  # of an encoded slice
_MAX_SLICE_BYTES = 1 << 31  # larger ones are not encoded
_MAX_BODY_BYTES = (_DIGEST_BYTES + _SIZE.size) * MAX_LAYERS + 384
_PREFIX = struct.Struct("<8sIIQ")
_PIECE_BYTES = 8 << 20  # processed between two checks for cancellation
Over = Callable[[], bool]


class Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The header's body: which chunk follows, and how it is stored."""

    key: Key
    shard: Shard
    nbytes: Bytes
    layers: LayerCount
    digests: Annotated[bytes, Meta(max_length=_DIGEST_BYTES * MAX_LAYERS)]
    codec: Annotated[str, Meta(min_length=1, max_length=128)] = NONE  # see `pdx.store.codecs.codec.codec_of`
    sizes: Annotated[bytes, Meta(max_length=_SIZE.size * MAX_LAYERS)] = b""  # per slice, if the chunk is encoded

    @property
    def of(self) -> tuple[bytes, int, int, int]:
        """The chunk's identity: key, shard, slices, bytes."""
        return self.key, self.shard, self.layers, self.nbytes

    @property
    def coded(self) -> int:
        """Bytes after the header of an encoded chunk; 0: it is not encoded."""
        return sum(size for (size,) in _SIZE.iter_unpack(self.sizes))

    @property
    def stored(self) -> int:
        """Bytes after the header."""
        return self.coded or self.nbytes

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and bytes of each slice as stored; starts count from the end of the header."""
        if self.codec == NONE:
            yield from (slice_span(self.nbytes, self.layers, layer, 1) for layer in range(self.layers))
            return
        first = 0
        for (size,) in _SIZE.iter_unpack(self.sizes):
            yield first, size
            first += size


_decoder = msgspec.msgpack.Decoder(Header)


def header_bytes(layers: int) -> int:
    """Size of the header, with padding, of a chunk with so many slices."""
    return round_up(_PREFIX.size + 256 + (_DIGEST_BYTES + _SIZE.size) * layers)


def aligned(nbytes: int) -> memoryview:
    """New zeroed memory that is page-aligned for direct I/O, like that of an arena."""
    return memoryview(mmap.mmap(-1, nbytes))


class Packed(NamedTuple):
    """A chunk as stored: header and body. The body holds `nbytes` bytes, padded to whole granules if its source was."""

    head: memoryview
    body: memoryview
    nbytes: int
    is_encoded: bool = False

    @property
    def data(self) -> memoryview:
        # A new view of all of it would keep its arena mapped as long as an error's traceback refers to it.
        return self.body if len(self.body) == self.nbytes else self.body[: self.nbytes]

    @property
    def coded(self) -> int:
        """The size of the body if it is encoded, else 0."""
        return self.nbytes * self.is_encoded


def packed(part: Part, data: memoryview, codec: str, is_over: Over) -> Packed:
    """Pack the whole chunk at the beginning of `data`: encoded if it then takes fewer granules, else as it is, with
    `data` itself as the body.

    :raises TierError: the codec cannot encode such chunks, or `is_over`.
    """
    if codec != NONE and (found := _encoded(part, data, codec, is_over)) is not None:
        return found
    digests = bytearray()
    for first, nbytes in spans(part.slot.nbytes, part.layers, is_over):
        digests += xxhash.xxh3_64_digest(data[first : first + nbytes])
    head = _head(Header(part.key, part.shard, part.slot.nbytes, part.layers, bytes(digests)))
    return Packed(head, data, part.slot.nbytes)


def _encoded(part: Part, data: memoryview, codec: str, is_over: Over) -> Packed | None:
    nbytes, layers = part.slot.nbytes, part.layers
    if nbytes // layers >= _MAX_SLICE_BYTES or nbytes <= GRANULE_BYTES:
        return None
    body, used, sizes, digests = aligned(round_up(nbytes) - GRANULE_BYTES), 0, bytearray(), bytearray()
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
    head = _head(Header(part.key, part.shard, nbytes, layers, bytes(digests), codec, bytes(sizes)))
    return Packed(head, body[: round_up(used)], used, is_encoded=True)


def unpacked(
    header: Header, data: memoryview, path: object, is_over: Over, into: memoryview | None = None
) -> memoryview:
    """The bytes of a chunk, given its header and the `data` after it, read from `path`: decoded into `into` (new memory
    by default) if the chunk is encoded, else `data` itself. The digests are compared first.

    :raises TierError: the data is not what was written, this release does not know the codec, or `is_over`.
    """
    compare(header, data, path, is_over)
    if header.codec == NONE:
        return data
    into = aligned(round_up(header.nbytes)) if into is None else into
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
    return into


Read = Callable[[Sequence[memoryview]], "int | None"]  # see `pdx.store.remote.backend.Backend.read`


def load(job: Job, arena: Arena, path: object, read: Read, is_over: Over, coded: int | None = None) -> None:
    """Read the one chunk of a job from `path` into its slot, verify it, and decode it. `coded`: its bytes after the
    header if it is encoded, 0 if it is not; None: take that from its header.

    :raises TierError: the chunk is missing, damaged or another one, `read` failed, `is_over`, or the slot has been
        given to another owner. The slot's content is then undefined.
    """
    [part], slot = job.parts, job.parts[0].slot
    job.start_ns = time.monotonic_ns()
    try:
        arena.check(slot)
        with arena.data[slot.offset : slot.offset + round_up(slot.nbytes)] as room:
            head = aligned(header_bytes(part.layers))
            data = aligned(round_up(coded)) if coded else room
            size = read([head, data])
            if size is None:
                raise TierError(f"{path} is not there any more", "missing")
            header = parsed(head[:size], size, path)
            job.coded_bytes = header.coded
            own = part.key, part.shard, part.layers, slot.nbytes, header.coded if coded is None else coded
            if (*header.of, header.coded) != own or size > len(head) + len(data):
                raise TierError(f"{path} has another chunk", "corrupt")
            if coded is None and header.coded:  # it was read into the slot itself, which is larger: move it away
                data = memoryview(bytes(data[: header.coded]))
            arena.check(slot)
            unpacked(header, data, path, is_over, room[: slot.nbytes])
            arena.check(slot)
            if header.codec not in (NONE, LOSSLESS):
                job.form = header.codec
    except (StaleSlot, LayoutError) as error:
        raise TierError(f"{path} is not loaded: {error}", "stale") from error
    job.end_ns = time.monotonic_ns()


def _head(header: Header) -> memoryview:
    body = msgspec.msgpack.encode(header)
    whole = _PREFIX.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body
    head = aligned(header_bytes(header.layers))
    head[: len(whole)] = whole
    return head


def whole_header(head: memoryview) -> int:
    """The size of the header that begins with `head`, without padding; 0: it is not a header."""
    if len(head) < _PREFIX.size:
        return 0
    magic, _, body_bytes, _ = _PREFIX.unpack_from(head)
    return _PREFIX.size + body_bytes if magic == MAGIC and body_bytes <= _MAX_BODY_BYTES else 0


def parsed(data: memoryview, size: int, path: object) -> Header:
    """Parse the header at the beginning of `data`, which was read from `path`; that has `size` bytes in all.

    :raises TierError: the header is damaged, of another version, or does not fit `size`.
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
    num_sizes = header.layers if header.codec != NONE else 0
    has_sizes = len(header.sizes) == _SIZE.size * num_sizes and (not num_sizes or 0 < header.coded < header.nbytes)
    if not (header.nbytes and has_sizes):  # a slot of no bytes does not exist
        _damaged(path)
    whole = header_bytes(header.layers) + header.stored
    if len(header.digests) != _DIGEST_BYTES * header.layers or size > whole:
        _damaged(path)
    if size < whole:
        raise TierError(f"{path} has {size} bytes, not {whole}", "truncated")
    return header


def _damaged(path: object) -> NoReturn:
    raise TierError(f"{path} has a damaged header", "corrupt")


def compare(header: Header, data: memoryview, path: object, is_over: Over) -> None:
    """Check `data` against the header's digests.

    :raises TierError: a slice's digest differs, or `is_over`.
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
