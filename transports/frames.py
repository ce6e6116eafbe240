"""What travels over a stream, as bytes: greeting and answer, the head of a write, acknowledgements. No I/O.

    writer → reader   Greeting, then for each part of a write: head with a short body in it, or head, body; payload
    reader → writer   Answer, an Ack; UNREACHABLE has a reason of `number` bytes behind it; then for each write that is
                      over: Ack

Every frame carries the session's token. All sizes are bounded here, before anything is allocated for them. A large
write travels in parts, over several streams; all its parts carry the same body, so any of them may be the first to
arrive, and the whole write is checked before a byte of it lands.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.transports.channel import MAX_NOTIFY_BYTES, MAX_PIECES, TOKEN_BYTES, Piece, Token, merged

VERSION = 1
MAX_STREAMS = 16  # of one channel
MIN_PART_BYTES = 1 << 20  # a write is cut into parts no smaller than this: below, waking two threads costs more

_MAGIC = b"PDX" + bytes([VERSION])
_LENGTH = struct.Struct("!4sI")
_HEAD = struct.Struct(f"!4s{TOKEN_BYTES}sQHHI")
_ACK = struct.Struct(f"!4s{TOKEN_BYTES}sQB")
GREETING_HEAD_BYTES = _LENGTH.size
MAX_GREETING_BYTES = 256
HEAD_BYTES = 256  # the rest of it is room for a body, so that most writes are one receive and their payload
INLINE_BYTES = HEAD_BYTES - _HEAD.size
ACK_BYTES = _ACK.size
MAX_REASON_BYTES = 1024
MAX_BODY_BYTES = MAX_NOTIFY_BYTES + MAX_PIECES * 32 + 64

# Answers to a greeting and to a write.
OK, UNKNOWN, UNREACHABLE, REFUSED = range(4)

GroupId = Annotated[bytes, Meta(min_length=16, max_length=16)]
StreamCount = Annotated[int, Meta(ge=1, le=MAX_STREAMS)]
StreamIndex = Annotated[int, Meta(ge=0, lt=MAX_STREAMS)]


class Greeting(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of a stream: whose it is, and which of the streams of one channel (a group)."""

    token: Token
    group: GroupId
    index: StreamIndex
    streams: StreamCount


class Body(msgspec.Struct, array_like=True, frozen=True):
    """A write: the same bytes in each of its parts."""

    pieces: Annotated[list[Piece], Meta(min_length=1, max_length=MAX_PIECES)]
    notify: Annotated[bytes, Meta(max_length=MAX_NOTIFY_BYTES)]


class Head(msgspec.Struct, frozen=True):
    """Part `part` of `parts` of the write `number`. A body of at most INLINE_BYTES is in the head, a longer one behind
    it; then comes the part's payload."""

    token: bytes
    number: int
    part: int
    parts: int
    body_bytes: int


class Ack(msgspec.Struct, frozen=True):
    """The write `number` has landed (OK) or not (REFUSED)."""

    token: bytes
    number: int
    status: int


_greetings = msgspec.msgpack.Decoder(Greeting)
_bodies = msgspec.msgpack.Decoder(Body)


def pack_greeting(greeting: Greeting) -> bytes:
    """With its length in front."""
    packed = msgspec.msgpack.encode(greeting)
    return _LENGTH.pack(_MAGIC, len(packed)) + packed


def greeting_bytes(head: bytes | bytearray) -> int:
    """How many bytes follow these GREETING_HEAD_BYTES.

    :raises ProtocolError: this is none of ours, another version, or too long.
    """
    magic, length = _LENGTH.unpack(head)
    _check_magic(magic)
    if length > MAX_GREETING_BYTES:
        raise ProtocolError(f"a greeting of {length} bytes; at most {MAX_GREETING_BYTES} are possible")
    return int(length)


def unpack_greeting(packed: bytes | bytearray) -> Greeting:
    """:raises ProtocolError: it is none."""
    try:
        greeting = _greetings.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a greeting: {error}") from error
    if greeting.index >= greeting.streams:
        raise ProtocolError(f"stream {greeting.index} of {greeting.streams}")
    return greeting


def pack_body(pieces: Sequence[Piece], notify: bytes) -> bytes:
    """What all parts of a write carry."""
    return msgspec.msgpack.encode([pieces, notify])


def unpack_body(packed: bytes | bytearray) -> Body:
    """:raises ProtocolError: it is none."""
    try:
        return _bodies.decode(packed)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not the body of a write: {error}") from error


def pack_part(head: Head, packed_body: bytes) -> list[bytes]:
    """All of a part but its payload."""
    packed = _HEAD.pack(_MAGIC, head.token, head.number, head.part, head.parts, head.body_bytes)
    if len(packed_body) <= INLINE_BYTES:
        return [(packed + packed_body).ljust(HEAD_BYTES, b"\0")]
    return [packed.ljust(HEAD_BYTES, b"\0"), packed_body]


def unpack_head(packed: bytes | bytearray) -> Head:
    """:raises ProtocolError: it is none, or a number in it is out of bounds."""
    magic, token, number, part, parts, body_bytes = _HEAD.unpack_from(packed)
    _check_magic(magic)
    if not part < parts <= MAX_STREAMS:
        raise ProtocolError(f"part {part} of {parts}; at most {MAX_STREAMS} are possible")
    if not 0 < body_bytes <= MAX_BODY_BYTES:
        raise ProtocolError(f"a body of {body_bytes} bytes; 1 to {MAX_BODY_BYTES} are possible")
    return Head(token, number, part, parts, body_bytes)


def inline_body(head: Head, packed: bytearray) -> bytes | None:
    """The body inside these bytes of a head; None if it follows."""
    if head.body_bytes > INLINE_BYTES:
        return None
    return bytes(packed[_HEAD.size : _HEAD.size + head.body_bytes])


def pack_ack(ack: Ack) -> bytes:
    """ACK_BYTES bytes."""
    return _ACK.pack(_MAGIC, ack.token, ack.number, ack.status)


def unpack_ack(packed: bytes | bytearray | memoryview) -> Ack:
    """:raises ProtocolError: it is none."""
    magic, token, number, status = _ACK.unpack(packed)
    _check_magic(magic)
    if status not in (OK, UNKNOWN, UNREACHABLE, REFUSED):
        raise ProtocolError(f"an acknowledgement of kind {status}")
    return Ack(token, number, status)


def pack_answer(token: bytes, status: int, reason: str = "") -> bytes:
    """To a greeting; only UNREACHABLE has a reason."""
    text = reason.encode(errors="replace")[:MAX_REASON_BYTES]
    return pack_ack(Ack(token, len(text), status)) + text


def reason_bytes(answer: Ack) -> int:
    """How many bytes of a reason follow.

    :raises ProtocolError: too many.
    """
    if answer.number > MAX_REASON_BYTES:
        raise ProtocolError(f"a reason of {answer.number} bytes; at most {MAX_REASON_BYTES} are possible")
    return answer.number


def unpack_reason(packed: bytes | bytearray) -> str:
    """One line that may be logged, whatever the peer has sent."""
    return "".join(letter if letter.isprintable() else "?" for letter in packed.decode(errors="replace"))


def parts_of(nbytes: int, streams: int) -> int:
    """Into how many parts a write of `nbytes` is cut."""
    return max(1, min(streams, nbytes // MIN_PART_BYTES))


def cut(pieces: Sequence[Piece], part: int, parts: int) -> list[Piece]:
    """The pieces of one part, in order. Both sides cut alike; neighbours become one piece, so that each is one copy."""
    if parts == 1:
        return merged(pieces)
    total = sum(piece.nbytes for piece in pieces)
    start, end = _border(total, part, parts), _border(total, part + 1, parts)
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        low, high = max(start, at), min(end, at + piece.nbytes)
        if low < high:
            found.append(Piece(piece.local + low - at, piece.remote + low - at, high - low))
        at += piece.nbytes
    return merged(found)


def _border(total: int, part: int, parts: int) -> int:
    """Where a part begins; on a whole page of the payload, but for the ends."""
    return total if part == parts else total * part // parts & ~4095


def _check_magic(magic: bytes) -> None:
    if magic != _MAGIC:
        raise ProtocolError(f"begins with {magic!r}, not {_MAGIC!r}")
