"""The log of chunks that came into or left the tiers of a node, in numbered batches; and snapshots of what is where.

Changes are by key. An arena in host memory is the tier `host`, one on a GPU the tier of that GPU's UUID; the tiers
below have the names of `pdx node --status`. A key is in a tier as long as all its shards are.

A batch gives the state at the end of a turn of the control loop, some milliseconds after the one before: a chunk that
came and went in between is reported as removed. So it does no harm to apply a batch twice, and a reader that gets all
batches from some number on has the right state of every key in them, whatever it knew before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from pdx.store.chunk import Chunk
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tier import Tier
from pdx.store.tiers import Tiers
from pdx.telemetry.env import Env

HOST = "host"
RING_KEYS = 1 << 17  # in the batches that are kept: about 10 MB …
RING_BATCHES = 4096  # … and how many of them: sending all at once takes 5 ms of the control loop
PIECE_KEYS = 4096  # in a piece of a snapshot, which takes a millisecond of the control loop
FIRST_SHIFT = 10  # by which the first number is the milliseconds since 1970 shifted left


class Place(msgspec.Struct, frozen=True):
    """A tier as readers of events see it: vLLM's name of its medium, or its own, and where it is (None: not said)."""

    medium: str
    locality: Literal["LOCAL", "REMOTE"] | None = None


class Change(msgspec.Struct, frozen=True, gc=False):
    """Keys that came into a tier or left it. `named`: the records of some of them, of which other threads may read
    key, parent, blocks and block_tokens; none of these changes any more once `blocks` is not empty."""

    tier: str
    is_stored: bool
    keys: Sequence[bytes]
    named: Sequence[Chunk] = ()


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The changes of one turn: stored keys before removed ones, so that a key that moves is never in no tier."""

    seq: int
    ts: float  # seconds since 1970
    changes: Sequence[Change]

    @property
    def count(self) -> int:
        return sum(len(change.keys) for change in self.changes)


_Told = dict[tuple[bool, str], list[bytes]]  # whether these keys are there now, and in which tier


class EventLog:
    """The log. Owned by the control loop. Without followers it costs nothing and records nothing.

    Numbers grow by one per batch. The first is made from the time, so that the numbers of a restarted node are higher
    than all of its earlier life, and no reader takes its batches for the next ones of that life.
    """

    def __init__(
        self,
        store: Store,
        tiers: Tiers,
        arenas: Sequence[str],
        env: Env,
        *,
        ring_keys: int = RING_KEYS,
        born_at: float | None = None,
    ) -> None:
        """`arenas`: the GPU of each, empty for host memory. `born_at`: seconds since 1970 from which the clock of `env`
        counts on; None: use the host's time, even if it is set anew."""
        self._index = store.index
        self._tiers = tiers
        self._names = [gpu or HOST for gpu in arenas]
        self.env = env
        self._counters = env.counters
        self._ring_keys = ring_keys
        self._clock_began_at = None if born_at is None else born_at - env.clock()
        self._is_on = False
        self._followers: dict[object, bool] = {}  # whether it wants `Change.named`
        self._ring: deque[Batch] = deque()
        self._kept = 0  # keys in the ring
        self.seq = int(self._time() * 1000) << FIRST_SHIFT

    def places(self) -> dict[str, Place]:
        """The places of all tiers, as vLLM names them."""
        memory = {name: Place("CPU" if name == HOST else "GPU", "LOCAL") for name in self._names}
        return memory | {t.name: Place("STORAGE", "REMOTE" if t.is_shared else "LOCAL") for t in self._below()}

    def _time(self) -> float:
        """Seconds since 1970."""
        return time.time() if self._clock_began_at is None else self._clock_began_at + self.env.clock()

    # ---- followers --------------------------------------------------------------------------

    def follow(self, who: object, *, names: bool = False) -> None:
        """`who` follows changes from now on, with `names` also `Change.named`. Idempotent."""
        self._followers[who] = names
        if not self._is_on:
            self._is_on = True
            self.seq += 1  # changes before this were not recorded
            self._index.watch(is_on=True)
            for tier in self._below():
                tier.changed = {}

    def leave(self, who: object) -> None:
        """`who` follows no more. Idempotent."""
        self._followers.pop(who, None)
        if self._is_on and not self._followers:
            self._is_on = False
            self._index.watch(is_on=False)
            for tier in self._below():
                tier.changed = None
            self._ring.clear()
            self._kept = 0

    def _below(self) -> Iterator[Tier]:
        for level in self._tiers.below:
            yield from level

    # ---- changes ----------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `turn` may have something to tell."""
        return bool(self._index.changed_keys or self._index.changed or any(tier.changed for tier in self._below()))

    def turn(self) -> Batch | None:
        """The changes since the last call; call it at the end of a turn, not necessarily of each."""
        if not self._is_on:
            return None
        told: _Told = {}
        named: dict[str, list[Chunk]] = {}
        if self._index.changed_keys:
            keys, self._index.changed_keys = self._index.changed_keys, []
            self._of_one_arena(keys, told, named)
        if self._index.changed:
            changed, self._index.changed = self._index.changed, []
            self._of_arenas(changed, told, named)
        for tier in self._below():
            if tier.changed:
                touched, tier.changed = tier.changed, {}
                for key, shards in touched.items():
                    told.setdefault((tier.holds(key, shards), tier.name), []).append(key)
        return self._add(_changes(told, named)) if told else None

    def _add(self, changes: Sequence[Change]) -> Batch:
        self.seq += 1
        batch = Batch(self.seq, self._time(), changes)
        kept = [Change(each.tier, each.is_stored, each.keys) for each in changes]  # keeps no records alive
        self._ring.append(Batch(self.seq, batch.ts, kept))
        count = batch.count
        self._kept += count
        self._counters["events"] += count
        while (self._kept > self._ring_keys and len(self._ring) > 1) or len(self._ring) > RING_BATCHES:
            self._kept -= self._ring.popleft().count
        return batch

    def _of_one_arena(self, keys: Sequence[bytes], told: _Told, named: dict[str, list[Chunk]]) -> None:
        """As `_of_arenas`, for one arena, where the index has left out chunks that were never whole."""
        whole, name = self._index.whole, self._names[0]
        here = [key for key in keys if key in whole]
        if here:
            told[True, name] = here
            if any(self._followers.values()):
                named[name] = [chunk for key in here if (chunk := whole[key][0]).blocks]
        if len(here) < len(keys):
            told[False, name] = [key for key in keys if key not in whole]

    def _of_arenas(self, changed: Sequence[Chunk], told: _Told, named: dict[str, list[Chunk]]) -> None:
        """Collect changes in arenas. A tail without names, which only its transfer can find, is never reported, nor is
        a chunk that was never whole."""
        sealed = State.SEALED
        wants_names = any(self._followers.values())
        places: dict[tuple[bytes, tuple[int, ...]], list[Chunk]] = {}
        for chunk in changed:
            places.setdefault((chunk.key, tuple(chunk.reservation.arenas)), []).append(chunk)
        for (key, arenas), chunks in places.items():
            chunk = chunks[-1]
            is_here = self._index.is_whole(key, chunk.reservation.shards, arenas)
            if (chunk.tail and not chunk.blocks) or not (is_here or any(each.state is not sealed for each in chunks)):
                continue
            for name in dict.fromkeys(self._names[arena] for arena in arenas or (0,)):
                told.setdefault((is_here, name), []).append(key)
                if is_here and chunk.blocks and wants_names:
                    named.setdefault(name, []).append(chunk)

    # ---- contents ---------------------------------------------------------------------------

    def since(self, seq: int) -> list[Batch] | None:
        """All batches after this number; None: they are not kept any more, or it is a number of another life."""
        if not self._is_on or seq > self.seq or seq < self.seq - len(self._ring):
            return None
        return [self._ring[-back] for back in range(self.seq - seq, 0, -1)]

    def snapshot(self) -> Iterator[list[Change]]:
        """The contents of all tiers, in pieces, each as of when it is taken. A reader that takes them all, and applies
        the batches of `turn` meanwhile and afterwards as they come, has the right state.

        The first piece costs a list of all keys: about 20 ms of the control loop for a million.
        """
        todo: list[tuple[Tier | None, list[bytes]]] = [(None, self._index.keys())]
        todo += [(tier, tier.keys()) for tier in self._below()]
        for tier, keys in todo:
            for at in range(0, len(keys), PIECE_KEYS):
                piece = keys[at : at + PIECE_KEYS]
                if tier is not None:
                    changes = [Change(tier.name, True, [key for key in piece if tier.holds(key)])]
                else:
                    changes = self._piece(piece)
                yield [change for change in changes if change.keys]

    def _piece(self, keys: Iterable[bytes]) -> list[Change]:
        told: _Told = {}
        named: dict[str, list[Chunk]] = {}
        if len(self._names) == 1:
            whole = self._index.whole
            keys = [key for key in keys if (found := whole.get(key)) and not (found[0].tail and not found[0].blocks)]
            self._of_one_arena(keys, told, named)
        else:
            self._of_arenas([chunk for key in keys for chunk in self._index.of(key)], told, named)
        return [change for change in _changes(told, named) if change.is_stored]


def _changes(told: _Told, named: dict[str, list[Chunk]]) -> list[Change]:
    """The changes, stored keys first."""
    return [
        Change(tier, is_stored, keys, named.get(tier, ()) if is_stored else ())
        for (is_stored, tier), keys in sorted(told.items(), key=lambda each: not each[0][0])
    ]
