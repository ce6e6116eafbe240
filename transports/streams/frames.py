"""The frames of a stream, as bytes: greeting and answer, the head of a write, acknowledgements. No I/O.

    writer → reader   Greeting; then each write, one behind the other: head with a short body in it, or head, body;
                      payload
    reader → writer   Ack of the greeting; UNREACHABLE has a reason of `number` bytes behind it; then an Ack of each
                      write, in their order

The greeting carries the session's token; the stream is the session's from then on. All sizes are bounded here, before
anything is allocated for them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.transports.channel import MAX_NOTIFY_BYTES, MAX_PIECES, TOKEN_BYTES, Piece, decoded

VERSION = 2

_MAGIC = b"PDX" + bytes([VERSION])
_GREETING = struct.Struct(f"!4s{TOKEN_BYTES}s")
_HEAD = struct.Struct("!4sQI")
_ACK = struct.Struct("!4sQB")
GREETING_BYTES = _GREETING.size
HEAD_BYTES = 256  # the rest is room for a body, so that most writes need one receive before their payload
INLINE_BYTES = HEAD_BYTES - _HEAD.size
ACK_BYTES = _ACK.size
MAX_REASON_BYTES = 1024
MAX_BODY_BYTES = MAX_NOTIFY_BYTES + MAX_PIECES * 32 + 64

# Answers to a greeting and to a write.
OK, UNKNOWN, UNREACHABLE, REFUSED = range(4)


class Body(msgspec.Struct, array_like=True, frozen=True):
    """A write: where its bytes go, and its notification. `is_coded`: its payload is that of
    `pdx.transports.streams.coded`, which is sent only to a reader that says it can decode it."""

    pieces: Annotated[list[Piece], Meta(min_length=1, max_length=MAX_PIECES)]
    notify: Annotated[bytes, Meta(max_length=MAX_NOTIFY_BYTES)]
    is_coded: bool = False


_bodies = msgspec.msgpack.Decoder(Body)


def pack_greeting(token: bytes) -> bytes:
    """GREETING_BYTES bytes: the first of a stream."""
    return _GREETING.pack(_MAGIC, token)


def unpack_greeting(packed: bytes | bytearray) -> bytes:
    """The token. :raises ProtocolError: it is no greeting of PDX, or of another version."""
    magic, token = _GREETING.unpack(packed)
    _check_magic(magic)
    return bytes(token)


def pack_body(pieces: Sequence[Piece], notify: bytes, *, is_coded: bool = False) -> bytes:
    return msgspec.msgpack.encode([pieces, notify, True] if is_coded else [pieces, notify])


def unpack_body(packed: bytes | bytearray) -> Body:
    """:raises ProtocolError: it is no body."""
    return decoded(_bodies, packed, ProtocolError, "the body of a write")


def pack_write(number: int, packed_body: bytes) -> list[bytes]:
    """Everything of a write except its payload."""
    packed = _HEAD.pack(_MAGIC, number, len(packed_body))
    if len(packed_body) <= INLINE_BYTES:
        return [(packed + packed_body).ljust(HEAD_BYTES, b"\0")]
    return [packed.ljust(HEAD_BYTES, b"\0"), packed_body]


def unpack_head(packed: bytes | bytearray) -> tuple[int, int, bytes | bytearray | None]:
    """The number of a write on its stream, counted from 0; the size of its body, which is in the head if it has at most
    INLINE_BYTES, else behind it; and the body, if it is in there.

    :raises ProtocolError: it is no head, or a number in it is out of bounds.
    """
    magic, number, body_bytes = _HEAD.unpack_from(packed)
    _check_magic(magic)
    if not 0 < body_bytes <= MAX_BODY_BYTES:
        raise ProtocolError(f"a body of {body_bytes} bytes; 1 to {MAX_BODY_BYTES} are possible")
    is_inside = body_bytes <= INLINE_BYTES
    return number, body_bytes, bytes(packed[_HEAD.size : _HEAD.size + body_bytes]) if is_inside else None


def pack_ack(number: int, status: int) -> bytes:
    """The write `number` has landed (OK) or not (REFUSED): ACK_BYTES bytes."""
    return _ACK.pack(_MAGIC, number, status)


def unpack_ack(packed: bytes | bytearray | memoryview) -> tuple[int, int]:
    """The number and the status. :raises ProtocolError: it is no acknowledgement."""
    magic, number, status = _ACK.unpack(packed)
    _check_magic(magic)
    if status not in (OK, UNKNOWN, UNREACHABLE, REFUSED):
        raise ProtocolError(f"an acknowledgement of kind {status}")
    return number, status


def pack_answer(status: int, reason: str = "") -> bytes:
    """The answer to a greeting; only UNREACHABLE has a reason."""
    text = reason.encode(errors="replace")[:MAX_REASON_BYTES]
    return pack_ack(len(text), status) + text


def unpack_reason(packed: bytes | bytearray) -> str:
    """The reason as one line that is safe to log."""
    return "".join(letter if letter.isprintable() else "?" for letter in packed.decode(errors="replace"))


def _check_magic(magic: bytes) -> None:
    if magic != _MAGIC:
        raise ProtocolError(f"begins with {magic!r}, not {_MAGIC!r}")
