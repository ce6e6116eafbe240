"""The payload of a write that is encoded, block by block, so that neither side holds more than one block of it.

    block: its bytes (4, as in the heads of frames) │ a piece as `pdx.store.codecs.lossless` makes it

A block stands for 1 MiB of the write's bytes, or for what is left of a piece of the write. Both sides know where each
block ends when it is decoded; a block never takes more than that and a byte.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

from pdx.errors import CodecError, ProtocolError
from pdx.store.codecs.codec import LOSSLESS, codec_of
from pdx.transports.streams.sockets import take

MIN_BYTES = 16 << 10  # of a write that is worth it
_BLOCK_BYTES = 1 << 20
_SIZE = struct.Struct("!I")


class Blocks:
    """What is sent for some bytes. False when all of it was taken."""

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
    """Receive what stands for these bytes, and decode it into them.

    :raises ProtocolError: it does not stand for them.
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
    """Take what stands for spans of so many bytes off the stream. Raises as `receive`."""
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
