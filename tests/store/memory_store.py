"""A remote store within this process, and a remote tier over it with a control loop that the test turns."""

from remote_bed import Bed

from pdx.errors import TierError
from pdx.store.remote.backend import Backend, Found, fill
from pdx.store.remote.tier import RemoteTier
from pdx.testing.tier_stage import TierStage


class MemoryStore(Backend):
    """Several tiers may be over it. `fails`: what every call ends with, as a kind of error, or a defect; empty: it
    works. `asked`: how many names each question had. `late`: what the next answer waits for."""

    place = "memory://here"

    def __init__(self):
        self.chunks = {}  # by name
        self.fails, self.asked, self.late = "", [], None

    def _works(self):
        if self.fails:
            raise TierError("asked to", self.fails) if isinstance(self.fails, str) else self.fails

    def connect(self, count):
        self._works()

    def heads(self, names, nbytes):
        self.asked.append(len(names))
        self._works()
        found = map(self.chunks.get, names)
        answer = [None if data is None else Found(memoryview(data)[:nbytes], len(data)) for data in found]
        late, self.late = self.late, None
        assert late is None or late.wait(60)
        return answer

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
