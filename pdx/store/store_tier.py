"""What tiers that keep chunks outside of memory have in common, whatever they keep them in.

Jobs and their threads, what was deleted meanwhile, whether the store answers, what is left out, warnings and counters
are here. `pdx.store.disk.tier` has an index, a cap and files; `pdx.store.remote.tier` asks a store that several nodes
share.
"""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from pdx.errors import TierError
from pdx.store.copy import Copy
from pdx.store.health import Health
from pdx.store.history import Cause
from pdx.store.recoding import OnChunk, Pair, Recoding, check
from pdx.store.threads import Lane, Threads, Work
from pdx.store.tier import Job, Tier, TierHost

log = logging.getLogger("pdx.node")

MAX_FORGOTTEN = 1 << 16  # keys; of what was admitted before those, any may have been deleted
OF_STORES = ("full", "read_only", "denied")  # errors of what is to be stored, where what is there can be loaded


class Forgotten:
    """Which keys were deleted, and at which moment: what was begun before may not bring them back."""

    def __init__(self) -> None:
        self._moments = itertools.count(1)
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._before = 0  # any may have been deleted before
        self.last = 0  # when one was

    def moment(self) -> int:
        """One that no other event has."""
        return next(self._moments)

    def note(self, key: bytes) -> None:
        """This is deleted."""
        self._keys[key] = self.last = self.moment()
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_FORGOTTEN:
            _, self._before = self._keys.popitem(last=False)

    def since(self, key: bytes, moment: int) -> bool:
        """Whether it was deleted after that moment, as far as is known."""
        return max(self._keys.get(key, 0), self._before) > moment


class StoreTier(Tier):
    """See `Tier`. Methods are for the control loop, and none of them waits but `close`; `perform` is for threads."""

    is_whole = True
    can_recode = True
    max_inflight_bytes = 256 << 20

    def __init__(self, host: TierHost, codec: str, threads: int, lanes: Sequence[Lane]) -> None:
        """`codec`: by which chunks are encoded whose requests ask for none of their own. So many threads for these
        lanes, see `Threads`."""
        self.env = host.env
        self._host = host
        self._codec = codec
        self._health = Health(host.env.clock)
        self._forgotten = Forgotten()
        self._admitted: dict[int, int] = {}  # copies, and at which moment
        self._works: dict[int, dict[Work, None]] = {}  # under way, by copy; 0: the tier's own
        self._threads = Threads(self.kind, threads, self, lanes)

    @property
    def is_idle(self) -> bool:
        return not self._works

    # ---- jobs -------------------------------------------------------------------------------

    def cancel(self, copy: Copy) -> None:
        for work in self._works.get(copy.number, ()):
            work.is_cancelled = True

    def over(self, copy: Copy) -> None:
        self._admitted.pop(copy.number, None)

    def _give(self, work: Work, lane: Lane, *, is_first: bool = False) -> None:
        self._works.setdefault(work.job.number if work.job is not None else 0, {})[work] = None
        self._threads.give(work, lane, is_first=is_first)

    @abstractmethod
    def perform(self, work: Work) -> None:
        """Do this; on a thread.

        :raises TierError: it could not be done.
        """

    def performed(self, work: Work) -> None:
        """This is over; on the control loop."""
        number = work.job.number if work.job is not None else 0
        of_copy = self._works[number]
        del of_copy[work]
        if not of_copy:
            del self._works[number]
        self._ended(work)

    @abstractmethod
    def _ended(self, work: Work) -> None:
        """What became of this."""

    def recode(self, pairs: Sequence[Pair], codec: str, shards: int, on_chunk: OnChunk) -> Recoding:
        check(pairs, codec)
        recoding = Recoding(pairs, codec, shards, self._recode, on_chunk)
        recoding.go_on()
        return recoding

    @abstractmethod
    def _recode(self, pair: Pair, recoding: Recoding) -> None:
        """Begin one chunk; `recoding.ended` is to be called when that is over."""

    def _end(self, job: Job, error: TierError | None = None) -> None:
        """A job that no thread was given is over, soon."""
        self.env.mailbox.post(partial(self._host.done, self, job, error))

    # ---- what is said -----------------------------------------------------------------------

    def _count(self, what: str, count: int = 1) -> None:
        self.env.counters[f"{self.kind}_{what}"] += count

    def _warn(self, error: TierError, then: str = "") -> None:
        """Something has failed; `then`: what follows from it."""
        self._count(error.kind)
        self.tally.errors += 1
        text = f"the {self.kind} tier: {error}{then and '; '}{then}"
        self.env.faults.warn(f"{self.kind} {error.kind}", f"{text}; further ones count as {self.kind}_{error.kind}")

    def _not_stored(self, keys: Sequence[bytes], why: str) -> None:
        self.history.note(keys, Cause.NOT_STORED, self.env.clock(), detail=why)
