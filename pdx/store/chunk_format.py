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
    def of(self) -> tuple[bytes, int, int, int]:
        """Which chunk it is: key, shard, slices, bytes."""
        return self.key, self.shard, self.layers, self.nbytes

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
        return sum(size for (size,) in _SIZE.iter_unpack(self.sizes))

    @property
    def start(self) -> int:
        return header_bytes(self.layers, is_encoded=True)

    def spans(self) -> Iterator[tuple[int, int]]:
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


class Packed(NamedTuple):
    """A chunk as it is kept: header and body, of whole granules if its data were; the body has `nbytes` bytes."""

    head: memoryview
    body: memoryview
    nbytes: int
    is_encoded: bool = False

    @property
    def data(self) -> memoryview:
        # A view of it would keep an arena mapped that it lies in, for as long as an error remembers who has it.
        return self.body if len(self.body) == self.nbytes else self.body[: self.nbytes]

    @property
    def coded(self) -> int:
        """The bytes of the body if it is encoded, else 0."""
        return self.nbytes * self.is_encoded


def packed(part: Part, data: memoryview, codec: str, is_over: Over) -> Packed:
    """A whole chunk, which `data` begin with, behind its header: by the codec where it then takes fewer granules, else
    `data` themselves.

    :raises TierError: the codec is not for such chunks; `is_over`.
    """
    if codec != NONE and (found := _encoded(part, data, codec, is_over)) is not None:
        return found
    digests = bytearray()
    for first, nbytes in spans(part.slot.nbytes, part.layers, is_over):
        digests += xxhash.xxh3_64_digest(data[first : first + nbytes])
    head = aligned(header_bytes(part.layers))
    _write_header(PLAIN, Header(part.key, part.shard, part.slot.nbytes, part.layers, bytes(digests)), head)
    return Packed(head, data, part.slot.nbytes)


def _encoded(part: Part, data: memoryview, codec: str, is_over: Over) -> Packed | None:
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
    return Packed(head, body[: round_up(used)], used, is_encoded=True)


def unpacked(
    header: Header, data: memoryview, path: object, is_over: Over, into: memoryview | None = None
) -> memoryview:
    """The bytes of a chunk whose header was read of `path`, and `data` behind it: decoded, `into` the place for them,
    if it is encoded, else `data` themselves. The digests are compared first.

    :raises TierError: they are not what was written; this release knows no such codec; `is_over`.
    """
    compare(header, data, path, is_over)
    if not isinstance(header, EncodedHeader):
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
    """Have the one chunk of a job read from `path` into its place, see that it is good, and decode it. `coded`: its
    bytes behind the header if it is encoded, 0 if it is not; None: its header says so.

    :raises TierError: nothing is there, or something else, or it is damaged, or `read` failed; `is_over`; or its place
        is another's by now. Anything may be in its place then.
    """
    [part], slot = job.parts, job.parts[0].slot
    job.start_ns = time.monotonic_ns()
    try:
        arena.check(slot)
        with arena.data[slot.offset : slot.offset + round_up(slot.nbytes)] as room:
            head = aligned(header_bytes(part.layers, is_encoded=bool(coded)))
            data = aligned(round_up(coded)) if coded else room
            size = read([head, data])
            if size is None:
                raise TierError(f"{path} is not there any more", "missing")
            most = len(head) + len(data)
            if coded is None and (is_encoded(head) or whole_header(head) > len(head)):
                whole = memoryview(b"".join((head, room)))[:size]  # it takes no more than one that is not encoded
                start = header_bytes(part.layers, is_encoded=True)
                head, data = whole[:start], whole[start:]
            header = parsed(head[:size], size, path)
            job.coded_bytes = header.stored if isinstance(header, EncodedHeader) else 0
            own = part.key, part.shard, part.layers, slot.nbytes, job.coded_bytes if coded is None else coded
            if (*header.of, job.coded_bytes) != own or size > most:
                raise TierError(f"{path} has another chunk", "corrupt")
            arena.check(slot)
            unpacked(header, data, path, is_over, room[: slot.nbytes])
            arena.check(slot)
            if isinstance(header, EncodedHeader) and header.codec != LOSSLESS:
                job.form = header.codec
    except (StaleSlot, LayoutError) as error:
        raise TierError(f"{path} is not loaded: {error}", "stale") from error
    job.end_ns = time.monotonic_ns()


def _write_header(version: int, header: Header, into: memoryview) -> None:
    body = msgspec.msgpack.encode(header)
    whole = _PREFIX.pack(MAGIC, version, len(body), xxhash.xxh3_64_intdigest(body)) + body
    into[: len(whole)] = whole


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
