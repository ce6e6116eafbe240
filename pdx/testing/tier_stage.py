"""A tier with an arena beside it, and a control loop on virtual time, which the test drives."""

from __future__ import annotations

import itertools
import os
import queue
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pdx.errors import PdxError
from pdx.memory.arena import GRANULE_BYTES, Arena, round_up
from pdx.memory.slot import Slot
from pdx.store.tier import Job, Part, Tier, TierHost
from pdx.telemetry.env import Env
from pdx.telemetry.mailbox import Mailbox
from pdx.wire.status import TierStatus

HANGS_S = 60.0  # what takes so long counts as hanging
Content = Callable[[int, int, int], bytes]  # a chunk's bytes: by number, shard and size
_arenas = itertools.count()
_FEW = bytes(byte & 3 for byte in range(256))
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda good: b"",
    "garbage": lambda good: b"\xff" * 5000,
    "truncated": lambda good: good[:9000],
    "too long": lambda good: good + b"more",
    "zeros at the end": lambda good: good[:-4096] + bytes(4096),
    "first bit": lambda good: bytes([good[0] ^ 1]) + good[1:],
    "in the header": lambda good: good[:30] + bytes([good[30] ^ 4]) + good[31:],
    "in the bytes": lambda good: good[:9000] + bytes([good[9000] ^ 4]) + good[9001:],
    "last bit": lambda good: good[:-1] + bytes([good[-1] ^ 0x80]),
    "huge header": lambda good: good[:12] + b"\xff\xff\xff\xff" + good[16:],
    "of a later release": lambda good: good[:8] + bytes([good[8] + 2]) + good[9:],
}


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def content(number: int, shard: int, nbytes: int) -> bytes:
    """A chunk's bytes, which no codec makes smaller."""
    return random.Random(number << 8 | shard).randbytes(nbytes)


def alike(number: int, shard: int, nbytes: int) -> bytes:
    """Bytes that a codec makes smaller: elements of two bytes, one of which is nearly the same in all elements."""
    raw = bytearray(random.Random(number << 8 | shard).randbytes(nbytes))
    raw[1::2] = raw[1::2].translate(_FEW)
    return bytes(raw)


class TierStore(ABC):
    """The store in which tiers under test keep their chunks. It outlives the tiers that are opened over it."""

    is_durable = True  # whether the next tier that is opened finds what the one before has stored

    @abstractmethod
    def open(self, host: TierHost, codec: str = "none") -> Tier:
        """A tier over this store, which encodes by `codec`."""

    def alter(self, key: bytes, shard: int, change: Callable[[bytes], bytes | None]) -> None:
        """Replace the bytes that a chunk is stored as, header included; None: remove them."""
        raise NotImplementedError

    def silent(self) -> AbstractContextManager[None]:
        """Inside the block the store does not answer; calls in flight do not return."""
        raise NotImplementedError


class Calls(Mailbox):
    """A mailbox for a loop that makes one posted call at a time and lets its errors through."""

    def __init__(self) -> None:
        super().__init__(Env().faults)
        self.waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, call: Callable[[], None]) -> None:
        self.waiting.put(call)


class TierStage(TierHost):
    """`arena` has `slots` slots of `slot_bytes`, by number; `now` is the tier's clock."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[TierHost], Tier],
        *,
        slot_bytes: int = 32 << 10,
        slots: int = 16,
        content: Content = content,
    ) -> None:
        """`make` opens the tier; `content` says which bytes chunks have."""
        self.now = 100.0
        self.env = Env(lambda: self.now)
        self._calls = Calls()
        self.env.mailbox = self._calls
        self.counters = self.env.counters
        self.slot_bytes, self.content, self._make = slot_bytes, content, make
        name = f"arena-{os.getpid()}-{next(_arenas)}"
        self.arena = Arena.create(folder / name, slots * round_up(slot_bytes))
        self.memory = [self.arena]
        self.numbers = itertools.count(1)
        self.answers: list[bytes] = []  # keys that the tier has answered for
        self.gone: list[bytes] = []  # keys that it has reported as removed
        self.used: set[bytes] = set()  # keys that requests find in memory
        self._loading: set[int] = set()  # copies
        self._longest_s = [0.0] * 3
        self.open()

    def open(self) -> None:
        """Open the tier as a starting node does; the one before must be closed."""
        while not self._calls.waiting.empty():  # of the one before: these are not made
            self._calls.waiting.get()
        self.over: dict[int, PdxError | None] = {}  # by number of a copy: how its job ended
        self.tier = self._make(self)

    def opened(self) -> TierStage:
        self.until(lambda: self.tier.takes_stores)
        return self

    def close_tier(self) -> None:
        """Close the tier, and make the calls that it has posted."""
        self.tier.close()
        while not self.is_quiet:
            self.turn()

    def reopen(self) -> None:
        """Reopen the tier as a restart of the node does: what it has stored stays, and all else is gone."""
        self.close_tier()
        self.open()
        self.opened()

    def close(self) -> None:
        self.close_tier()
        self.arena.close()
        self.arena.path.unlink()

    # ---- the node's side of a tier ----------------------------------------------------------

    def done(self, tier: Tier, job: Job, error: PdxError | None) -> None:
        assert tier is self.tier
        assert job.number not in self.over, "a job ended twice"
        self.over[job.number] = error
        if error is None:
            tier.tally.moved(job, is_load=job.number in self._loading)

    def answered(self, keys: Iterable[bytes]) -> None:
        self.answers.extend(keys)

    def removed(self, keys: Iterable[bytes]) -> None:
        self.gone.extend(keys)

    def is_used(self, key: bytes) -> bool:
        return key in self.used

    # ---- the loop ---------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        return self._calls.waiting.empty()

    def next_call(self) -> Callable[[], None]:
        """The next call that a thread has posted, or posts; the test makes it."""
        return self._calls.waiting.get(timeout=HANGS_S)

    def turn(self) -> None:
        self.timed(self.next_call())

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.turn()

    def settle(self) -> None:
        """Turn until no job is in flight and no call is waiting."""
        self.until(lambda: self.is_quiet and self.tier.is_idle)

    def timed(self, call: Callable[[], Any]) -> Any:
        """Make a call of the control loop, timed by the real clock."""
        started_at = time.perf_counter()
        result = call()
        self._longest_s = sorted([*self._longest_s, time.perf_counter() - started_at])[1:]
        return result

    @property
    def longest_s(self) -> float:
        """The longest call of the control loop, except for two, which may have lost their core meanwhile."""
        return self._longest_s[0]

    # ---- chunks -----------------------------------------------------------------------------

    def slot(self, number: int, nbytes: int | None = None) -> Slot:
        """A slot of the arena; `nbytes`: of a smaller chunk in it."""
        offset = number * round_up(self.slot_bytes)
        return Slot(offset, nbytes or self.slot_bytes, self.arena.generations[offset // GRANULE_BYTES])

    def put(self, slot: Slot, data: bytes) -> None:
        self.arena.data[slot.offset : slot.offset + slot.nbytes] = data

    def bytes_at(self, slot: Slot) -> bytes:
        return bytes(self.arena.view(slot))

    def copy(self, keys: Sequence[bytes], shards: int = 1, nbytes: int | None = None, layers: int = 4) -> Any:
        """The parts of a `Copy` that a tier looks at."""
        chunks = [SimpleNamespace(slot=self.slot(0, nbytes), layers=layers) for _ in range(len(keys) * shards)]
        return SimpleNamespace(number=next(self.numbers), keys=keys, shards=shards, chunks=chunks)

    def granted(self, copy: Any) -> list[int]:
        """The indices of its keys that the tier has room for."""
        grant = self.timed(lambda: self.tier.admit(copy))
        return list(grant.keys)

    def give(
        self, verb: str, copy: Any, number: int, shard: int, slot: Slot, *, layers: int = 4, form: str = ""
    ) -> Any:
        job = Job(copy.number, [Part(key(number), shard, layers, 0, layers, slot, form=form)], slot.nbytes)
        copy.job = job
        if verb == "load":
            self._loading.add(copy.number)
        self.timed(partial(getattr(self.tier, verb), job))
        return copy

    def start_store(
        self,
        number: int,
        shard: int = 0,
        *,
        shards: int = 1,
        at: int = 0,
        nbytes: int | None = None,
        layers: int = 4,
        form: str = "",
    ) -> Any:
        """Begin to store chunk `number` from slot `at`. Returns the copy, or None if the tier left it out."""
        slot = self.slot(at, nbytes)
        self.put(slot, self.content(number, shard, slot.nbytes))
        copy = self.copy([key(number)], shards, nbytes, layers)
        if not self.granted(copy):
            self.tier.copy_ended(copy)
            return None
        return self.give("store", copy, number, shard, slot, layers=layers, form=form)

    def start_load(
        self, number: int, shard: int = 0, *, at: int = 1, nbytes: int | None = None, layers: int = 4
    ) -> Any:
        """Begin to load chunk `number` into slot `at`, which is zeroed before. Returns the copy."""
        slot = self.slot(at, nbytes)
        self.put(slot, bytes(slot.nbytes))
        return self.give("load", self.copy([key(number)], 1, nbytes, layers), number, shard, slot, layers=layers)

    def end(self, copy: Any) -> Any:
        """Wait for the copy's job. Returns its error."""
        self.until(lambda: copy.number in self.over)
        self.tier.copy_ended(copy)
        return self.over[copy.number]

    def store(self, number: int, shard: int = 0, **settings: Any) -> Any:
        """Store a chunk and wait. Returns whether it is stored."""
        copy = self.start_store(number, shard, **settings)
        is_stored = copy is not None and self.end(copy) is None
        self.settle()
        return is_stored

    def load(self, number: int, shard: int = 0, *, at: int = 1, nbytes: int | None = None, **settings: Any) -> Any:
        """Load a chunk and wait. Returns the error, or None if the right bytes are in the arena."""
        error = self.end(self.start_load(number, shard, at=at, nbytes=nbytes, **settings))
        self.settle()
        if error is None:
            slot = self.slot(at, nbytes)
            assert self.bytes_at(slot) == self.content(number, shard, slot.nbytes)
        return error

    def count(self, numbers: Sequence[int], shards: int = 1) -> int:
        """How many of the leading chunks are there, as a request finds out that waits for the answer."""
        keys = [key(number) for number in numbers]
        while True:
            held = self.timed(lambda: self.tier.find(keys, shards))
            left = keys[len(held) :]
            self.answers.clear()
            if not left or not self.timed(partial(self.tier.seeks, left, shards)):
                return len(held)
            self.until(lambda: left[0] in self.answers)  # noqa: B023

    @property
    def status(self) -> TierStatus:
        status = self.tier.status()
        assert status is not None
        return status

    def has(self, number: int, shards: int = 1) -> bool:
        """Whether it can be loaded in all of so many shards."""
        return bool(self.count([number], shards))
