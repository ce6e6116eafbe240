"""The encoded payload of a write: block by block, so that neither side holds more than one block of it.

    block: its bytes (4, as in the heads of frames) │ a piece as `pdx.store.codecs.lossless` makes it

A block stands for 1 MiB of the write's bytes, or for what is left of a piece of the write. Both sides know the decoded
size of each block; encoded, a block takes at most a byte more.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from pdx.errors import CodecError, ProtocolError
from pdx.store.codecs.codec import LOSSLESS, codec_of
from pdx.transports.streams.sockets import take

MIN_BYTES = 16 << 10  # smaller writes are not worth it
_BLOCK_BYTES = 1 << 20
_SIZE = struct.Struct("!I")


class Blocks:
    """The blocks to send for some bytes. False when all of them were taken."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._codec = codec_of(LOSSLESS)
        self._left = deque(_blocks(views))

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self) -> list[bytes | memoryview]:
        """Encode the next block."""
        part = self._left.popleft()
        into = memoryview(bytearray(len(part) + 1))
        used = self._codec.encode(part, into)
        return [_SIZE.pack(used), into[:used]]


def receive(stream: socket.socket, views: Sequence[memoryview]) -> None:
    """Receive the blocks of these bytes, and decode them in place.

    :raises ProtocolError: they are not blocks of so many bytes.
    :raises OSError: the stream ended or broke.
    """
    codec = codec_of(LOSSLESS)
    scratch = memoryview(bytearray(_BLOCK_BYTES + 1))
    for part in _blocks(views):
        block = _block(stream, scratch, len(part))
        try:
            if codec.decode(block, part) != len(block):
                raise CodecError(f"a block of {len(block)} bytes is too long")
        except CodecError as error:
            raise ProtocolError(f"not a block of {len(part)} bytes: {error}") from None


def drop(stream: socket.socket, sizes: Sequence[int]) -> None:
    """Receive and discard the blocks of spans of so many bytes. Raises as `receive`."""
    scratch = memoryview(bytearray(_BLOCK_BYTES + 1))
    for size in sizes:
        for first in range(0, size, _BLOCK_BYTES):
            _block(stream, scratch, min(_BLOCK_BYTES, size - first))


def _blocks(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for first in range(0, len(view), _BLOCK_BYTES):
            yield view[first : first + _BLOCK_BYTES]


def _block(stream: socket.socket, scratch: memoryview, nbytes: int) -> memoryview:
    """The next block, which stands for so many bytes."""
    head = bytearray(_SIZE.size)
    take(stream, head)
    (size,) = _SIZE.unpack(head)
    if not 0 < size <= nbytes + 1:
        raise ProtocolError(f"a block of {size} bytes that stands for {nbytes}")
    block = scratch[:size]
    take(stream, block)
    return block
