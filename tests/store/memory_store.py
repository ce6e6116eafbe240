"""A remote store within this process, and a remote tier over it with a control loop that the test turns."""

from remote_bed import Bed

from pdx.errors import TierError
from pdx.store.remote.backend import Backend, Found, fill
from pdx.store.remote.tier import RemoteTier
from pdx.testing.tier_stage import TierStage


class MemoryStore(Backend):
    """Several tiers may be over it. `fails`: what every call ends with, as a kind of error; empty: it works."""

    place = "memory://here"

    def __init__(self):
        self.chunks = {}  # by name
        self.fails = ""

    def _works(self):
        if self.fails:
            raise TierError("asked to", self.fails)

    def connect(self, count):
        self._works()

    def heads(self, names, nbytes):
        self._works()
        found = map(self.chunks.get, names)
        return [None if data is None else Found(memoryview(data)[:nbytes], len(data)) for data in found]

    def read(self, name, into):
        self._works()
        data = self.chunks.get(name)
        return None if data is None else fill(into, data)

    def write(self, name, data):
        self._works()
        self.chunks[name] = b"".join(data)

    def remove(self, names):
        self._works()
        for name in names:
            self.chunks.pop(name, None)

    def close(self):
        pass

    def names(self):
        return sorted(self.chunks)


class MemoryBed(Bed):
    """A tier over such a store."""

    def __init__(self, folder, store, *, codec="none", **settings):
        folder.mkdir(exist_ok=True)
        TierStage.__init__(self, folder, lambda host: RemoteTier(host, store, codec), **settings)
