"""A client process of a GPU node on strings, with the fake driver: reads one JSON list [verb, arguments…] per line,
answers one JSON value per line. Arguments: the node's address, settings of the fake as JSON."""

import ctypes
import json
import sys

from fake_cuda import fake_cuda
from node_puppet import serve

import pdx
from pdx.client.connection import attached
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import num_mapped


class Puppet:
    """One attached client; chunks by name."""

    def __init__(self, address, fake):
        link = attached(address, 20.0)
        self.node, self.arena = pdx.Node(link, 20.0), link.arena
        self.fake = fake
        self.chunks = {}

    def map(self):
        """The kind of memory."""
        self.arena.map(Gpu.find(self.arena.gpu))
        return self.arena.kind

    def put(self, name, nbytes, value, seal=True):
        chunk = self.chunks[name] = self.node.reserve(name, nbytes)
        self.fill(name, value)
        if seal:
            chunk.seal()
        return [chunk.slot.offset, chunk.slot.nbytes, chunk.slot.generation]

    def fill(self, name, value):
        """As a kernel would: straight into the slot."""
        slot = self.chunks[name].slot
        ctypes.memset(self.fake.memory.look(self.arena.hold() + slot.offset, slot.nbytes), value, slot.nbytes)
        self.arena.let_go()

    def get(self, name):
        chunk = self.chunks[name] = self.node.get(name)
        return [chunk.slot.offset, chunk.slot.nbytes, chunk.slot.generation]

    def read(self, name):
        """The distinct byte values in it."""
        slot = self.chunks[name].slot
        return sorted(set(bytes(self.arena.read(slot.offset, slot.nbytes))))

    def is_current(self, name):
        return self.arena.is_current(self.chunks[name].slot)

    def mapped(self):
        return num_mapped()


def main():
    settings = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    with fake_cuda(**settings) as fake:
        serve(Puppet(sys.argv[1], fake), lambda error: [type(error).__name__, str(error)])


if __name__ == "__main__":
    main()
