"""An engine whose chunks a node publishes."""

import struct

from pdx.memory.arena import GRANULE_BYTES
from pdx.wire.messages import Admit, Fill

BLOCKS = 4  # of a chunk
LAYERS = 2


def names(count, first=0):
    return [number.to_bytes(16, "big") for number in range(first + 1, first + count + 1)]


def ints(blocks):
    return [struct.unpack(">8xQ", block)[0] for block in blocks]


class Engine:
    """A scheduler half and a worker that write the chunks of one prompt."""

    def __init__(self, attach, node):
        shape = {"block_tokens": "16"}
        self.scheduler = attach(node, kind="scheduler", engine="e", shape=shape)
        self.worker = attach(node, kind="worker", engine="e", shape=shape)

    def write(self, chunks, first=0):
        """Keys and blocks of so many chunks; the last are evicted for that if they must."""
        keys = [b"k%015d" % number for number in range(first, first + chunks)]
        blocks = names(chunks * BLOCKS, first * BLOCKS)
        ask = Admit(keys, GRANULE_BYTES, LAYERS, blocks=b"".join(blocks), chunk_blocks=BLOCKS, parent=b"root")
        slots = self.scheduler.ask(ask).granted_slots
        assert len(slots) == chunks
        self.worker.ask(Fill(slots, layers=LAYERS, seal=True))
        return keys, blocks
