"""A node's `Service` in this process, on a clock of the test, with a tier below that moves when the test says so."""

import contextlib
import os

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node.service import PROBE_BYTES, Service
from pdx.store.tier import Grant, Held, Tier
from pdx.telemetry.env import Env
from pdx.wire.messages import VERSION, Hello

CHUNKS = 256  # as many as the smallest arena has


class Clock:
    """Stands still until the test moves it."""

    now = 1000.0

    def __call__(self):
        return self.now


class Below(Tier):
    """It has the keys that it is told to have, or was given, and its jobs end when the test says so."""

    kind = name = "below"
    is_whole = takes_stores = True
    max_inflight_bytes = 1 << 30

    def __init__(self, copies, *, takes=True):
        self.keys, self.jobs, self._copies, self._takes = set(), [], copies, takes
        self.asks_for = None  # of a tier that must be asked: what it was asked for
        self.says = ""  # why it may have what it does not find

    def find(self, keys, shards):
        run = []
        for key in keys:
            if key not in self.keys or self.asks_for is not None:
                break
            run.append(Held(GRANULE_BYTES, 1))
        return run

    def seeks(self, keys, shards):
        if self.asks_for is None:
            return False
        self.asks_for += keys
        return True

    def why_not(self, key):
        return self.says

    def admit(self, copy):
        return Grant([at for at, key in enumerate(copy.keys) if self._takes and key not in self.keys])

    def store(self, job):
        self.jobs.append(job)

    load = store

    def cancel(self, copy):
        pass

    def copy_ended(self, copy):
        pass

    def evict(self, keys, shards=0):
        gone = self.keys & set(keys)
        self.keys -= gone
        return len(gone)

    def close(self):
        pass

    def end(self, error=None):
        """All jobs under way are over; the numbers of their chunks."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            self.keys |= {part.key for part in job.parts} if error is None else set()
            self._copies.done(self, job, error)
        return [int.from_bytes(part.key, "big") for job in jobs for part in job.parts]


@contextlib.contextmanager
def serving(place, clock, more=(), **config):
    """A service without peers, whose arena has room for `CHUNKS` chunks of a granule. `more`: its other arenas."""
    small = {"address": f"ipc://{place}/n.sock", "arena_bytes": CHUNKS * GRANULE_BYTES}
    settings = NodeConfig(**(small | config))
    with Arena.create(place / f"arena{len(list(place.iterdir()))}", settings.arena_bytes + PROBE_BYTES) as arena:
        made = Service(settings, [arena, *more], 1, Env(clock))
        made.peers.turn = list
        yield made
        made.tiers.close()
        made.sessions.close()
        made.peers.close()


def attach(service, name, kind="client", **hello):
    """A session of this process."""
    return service.attach(
        f"{name} {kind}".encode(), Hello(VERSION, os.getpid(), kind, name=name, **hello), os.getpid()
    )[0]


def keys(numbers):
    return [number.to_bytes(16, "big") for number in numbers]


def there(service, numbers):
    """Those of them that memory has."""
    return [number for number in numbers if service.store.find(keys([number]), 1)]
