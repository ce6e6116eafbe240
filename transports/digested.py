"""Payloads with a digest behind them. It is made and compared block by block, directly before a block is sent and
directly after it was received: so a block comes from memory once, and is hashed or copied from the core's cache."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import xxhash

from pdx.transports.streams import Buffer, fill_all

DIGEST_BYTES = 8
# Hashed and copied in turns. Well below a core's second-level cache; above that of the calls that each block costs.
BLOCK_BYTES = 256 << 10


def digested(views: Sequence[memoryview], seal: int) -> Iterator[list[Buffer]]:
    """What is to be sent of this payload, batch by batch; the last one ends with the digest, which begins with the
    `seal` of the payload's head. Bytes are read when their batch is asked for."""
    digest = xxhash.xxh3_64(seed=seal)
    for block, is_last in _blocks(views):
        for view in block:
            digest.update(view)
        yield [*block, digest.digest()] if is_last else [*block]


def fill_digested(sock: socket.socket, views: Sequence[memoryview], seal: int) -> bool:
    """Receive a payload into `views`, and its digest. Whether the bytes are those that were sent.

    :raises OSError: the stream ended or broke.
    """
    digest = xxhash.xxh3_64(seed=seal)
    tail = memoryview(bytearray(DIGEST_BYTES))
    for block, is_last in _blocks(views):
        fill_all(sock, [*block, tail] if is_last else block)
        for view in block:
            digest.update(view)
    return digest.digest() == tail


def _blocks(views: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], bool]]:
    """The same bytes in lists of BLOCK_BYTES; whether a list is the last one."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for view in views:
        left = view
        while left.nbytes:
            if not room:
                yield block, False
                block, room = [], BLOCK_BYTES
            block.append(left[:room])
            left = left[room:]
            room -= block[-1].nbytes
    yield block, True
