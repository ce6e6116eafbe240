"""A node's tiers other than peers, and where missing chunks are loaded from.

A chunk that is missing where a session wants it comes from another arena, or from the first tier below that has it.
`pdx.store.storing` decides what is stored there, and when. No sockets, no threads, no I/O here.

The tiers below are grouped into levels, the fastest first. A level has one tier, or several of a kind, such as disks,
each of which has its part of the chunks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from msgspec.structs import asdict, replace

from pdx.config import StoreChoice
from pdx.errors import PdxError
from pdx.memory.arena import Arena, round_up
from pdx.store import paying
from pdx.store.chunk import Chunk, Origin, Wanted
from pdx.store.copies import Copies
from pdx.store.copy import Copy, Priority
from pdx.store.history import Gone
from pdx.store.paying import UNKNOWN, Computing
from pdx.store.siblings import Siblings
from pdx.store.store import Store
from pdx.store.storing import Storing
from pdx.store.tier import Hit, Job, Tier, TierHost
from pdx.telemetry.env import Env
from pdx.wire.status import TierStatus

ANSWER_SHARE = 0.1  # of the time of computing, to wait until a tier has said whether it has a chunk
SOME = 64  # keys per lookup in a tier
MAX_NAMED = 1 << 17  # chunks whose blocks are remembered after they left memory: about 64 MB


class Tiers(TierHost):
    """The tiers of a node except its peers, and their host. Owned by the control loop."""

    def __init__(
        self,
        store: Store,
        copies: Copies,
        env: Env,
        *,
        memory: Sequence[Arena] = (),
        arenas: Tier | None = None,
        below: Sequence[Sequence[Tier]] = (),
        spills: bool = True,
        choice: StoreChoice = "all",
        window: float = 0.1,
        store_s: float,
        load_s: float,
    ) -> None:
        """`memory`: the arenas. `arenas`: the tier that copies between them, if there are several. `below`: the levels
        below the first arena. `spills`, `choice`, `window`: see `Storing`. `store_s`, `load_s`: time limits of a store
        and a load.
        """
        self.env = env
        self.memory = memory
        self.arenas = arenas
        self.below = [list(level) for level in below]
        self.storing = Storing(
            self,
            store,
            copies,
            env,
            spills=spills,
            choice=choice,
            window=window,
            store_s=store_s,
        )
        self.wanted = store.wanted
        self._store = store
        self._copies = copies
        self._store_s = store_s
        self._load_s = load_s
        self._counters = env.counters
        self._clock = env.clock
        self._named = Siblings()  # chunks that a tier may have, even after they left memory
        self._chunk_bytes = 0  # of the chunk last found below, all shards
        self._probed_at: dict[Tier, float] = {}  # when a chunk was last loaded to measure the tier …
        self._waited_at: dict[Tier, float] = {}  # … and when a request last waited for its answer

    # ---- reports of tiers -------------------------------------------------------------------

    def done(self, tier: Tier, job: Job, error: PdxError | None) -> None:
        self._copies.done(tier, job, error)

    def answered(self, keys: Iterable[bytes]) -> None:
        self.env.news.extend(keys)

    def removed(self, keys: Iterable[bytes]) -> None:
        self.storing.removed(keys)

    def is_used(self, key: bytes) -> bool:
        return any(chunk.is_found for chunk in self._store.index.of(key))

    # ---- queued requests --------------------------------------------------------------------

    def want(self, keys: Sequence[bytes], number: int) -> None:
        """Like `Store.want`, but for tiers, too, which evict wanted chunks last."""
        self._store.want(keys, number)
        self._refresh(keys)

    def want_no_more(self, keys: Sequence[bytes], number: int) -> None:
        self._store.want_no_more(keys, number)
        self._refresh(keys)

    def _refresh(self, keys: Sequence[bytes]) -> None:
        for tier in self._all():
            tier.refresh(keys)

    # ---- loading ----------------------------------------------------------------------------

    def may_come(
        self, wanted: Wanted, hits: int, *, transfer: str | None = None, computing: Computing = UNKNOWN
    ) -> float:
        """Start copying the keys missing after the first `hits` to their arenas, or ask tiers for them; return for how
        many seconds to wait. 0: nothing comes; infinity: chunks are on their way, or until a tier has answered.

        `computing`: how long computing takes; chunks that would take longer to load are not loaded.
        The hits are held while room is found for the others. A tier that has brought nothing in time is not used for a
        while, because computing is faster. For a transfer, chunks still being filled in another arena are copied, too,
        slice by slice.
        """
        missing, shards, arenas = wanted.keys[hits], wanted.shards, wanted.arenas
        if self._copies.is_filled_here(missing, shards, arenas):
            return math.inf
        if not self.below and not any(arenas):
            return 0.0  # there is no other place
        if any(arenas) and self.arenas is not None:
            is_of_use = transfer is not None or not wanted.is_whole or self._are_near(wanted, hits)
            with self._holding(wanted, hits):
                if is_of_use and self._from_another_arena(self.arenas, wanted, hits, transfer):
                    return math.inf
            if self._copies.is_filled_here(missing, shards):
                return math.inf  # on its way to the first arena, and from there to its own
        return self._from_below(wanted, hits, computing)

    def is_near(self, wanted: Wanted, key: bytes) -> bool:
        """Whether another arena has this key, or a tier below from which it may be loaded, as known now."""
        shards, arenas = wanted.shards, wanted.arenas
        if any(arenas) and self._store.index.anywhere(key, shards, arenas) is not None:
            return True
        may_load = (tier for tier in self._all() if not (self._is_late(tier) or (wanted.is_named and tier.is_shared)))
        return any(tier.find([key], shards) for tier in may_load)

    def _are_near(self, wanted: Wanted, hits: int) -> bool:
        return all(self.is_near(wanted, key) for key in wanted.keys[hits:])

    def name(self, chunk: Chunk) -> None:
        """Remember the blocks of a chunk that a tier has, or gets, so that partial hits are found after it has left
        memory."""
        if chunk.blocks and not chunk.tail and chunk.key not in self._named:
            self._named.add(chunk.parent, chunk.blocks, chunk.key)
            if len(self._named) > MAX_NAMED:
                self._named.discard(self._named.oldest)

    def parts(self, parent: bytes, blocks: bytes, shards: int) -> Iterator[tuple[bytes, int]]:
        """Up to two keys after `parent` that share leading blocks with `blocks`, and how many, the most first, among
        those that a tier may have."""
        for key, count in self._named.like(parent, blocks):
            is_below = any(tier.find([key], shards) or self._hides(tier, key) for tier in self._all())
            chunks = self._store.index.of(key)
            self._store.name(chunks, *self._named.names(key))
            if is_below or chunks:
                yield key, count
            else:
                self._named.discard(key)  # a tier has evicted it

    def has(self, key: bytes, shards: int) -> bool:
        return any(tier.find([key], shards) for tier in self._all())

    def _all(self) -> Iterator[Tier]:
        return itertools.chain.from_iterable(self.below)

    def _hides(self, tier: Tier, key: bytes) -> bool:
        """Whether a tier may have a key that `find` does not return: it is shared, or does not work now."""
        return tier.is_shared or self._is_late(tier) or bool(tier.why_not(key))

    @contextlib.contextmanager
    def _holding(self, wanted: Wanted, hits: int) -> Iterator[None]:
        """Hold the hits while room is found for the others."""
        found = self._store.find(wanted.keys[:hits], wanted.shards, wanted.arenas)
        held = [chunk for chunks in found for chunk in chunks]
        self._store.hold(held)
        try:
            yield
        finally:
            self._store.unhold(held)

    def _from_another_arena(self, tier: Tier, wanted: Wanted, hits: int, transfer: str | None) -> bool:
        """Copy the first missing key, and those after it in the same arenas, from another arena through `tier`; return
        whether that key is on its way."""
        shards, is_filling = wanted.shards, transfer is not None
        lying = (
            (key, self._store.index.anywhere(key, shards, wanted.arenas, is_filling=is_filling))
            for key in wanted.keys[hits:]
        )
        source, run = next(itertools.groupby(lying, key=lambda pair: pair[1]))
        if source is None:
            return False
        copied = self._copies.store(
            tier,
            [key for key, _ in run],
            shards,
            arenas=source,
            to=wanted.arenas,
            priority=Priority.HANDOFF if is_filling else Priority.AWAITED,
            deadline=self._clock() + self._load_s,
            transfer=transfer,
        )
        return bool(copied) and self._copies.is_filled_here(wanted.keys[hits], shards, wanted.arenas)

    def _from_below(self, wanted: Wanted, hits: int, computing: Computing) -> float:
        shards = wanted.shards
        found, patience_s = self._found(wanted, hits, computing)
        in_time = self._in_time(found, shards)
        if wanted.is_whole and len(found) < len(wanted.keys) - hits:
            return patience_s
        if in_time < len(found):
            self._counters["loads_cut"] += len(found) - in_time
        count = self._paying(found[:in_time], shards, computing)
        if count < in_time:
            self._counters["loads_not_worth"] += in_time - count
        if found and (count < in_time or not in_time):
            self._probe(found[in_time - 1], wanted, hits)
        deadline = self._clock() + paying.patience_s(computing.seconds(count), self._load_s)
        if count and not (wanted.is_whole and count < len(found)):
            with self._holding(wanted, hits):
                if wanted.is_whole and not self._has_room(found, shards):
                    return 0.0
                if self._copies.load(found[:count], wanted, priority=Priority.AWAITED, deadline=deadline):
                    return math.inf
        return patience_s

    def _has_room(self, found: Sequence[Hit], shards: int) -> bool:
        """Whether all of these fit into the first arena, judged by available bytes alone."""
        has_room = sum(round_up(held.nbytes) for _, _, held in found) * shards <= self._store.pools[0].available_bytes
        self._counters["loads_without_room"] += not has_room
        return has_room

    def _found(self, wanted: Wanted, hits: int, computing: Computing) -> tuple[list[Hit], float]:
        """The leading missing keys that tiers below have, and the seconds to wait for a tier that is being asked."""
        keys, shards = wanted.keys[hits:], wanted.shards
        found: list[Hit] = []
        patience_s = 0.0
        while len(found) < len(keys):
            at = len(found)
            some = keys[at : at + SOME]  # not all the rest, because the next run may be in another tier
            for tier in self._who_may_have(keys[at], wanted.is_named):
                held = tier.find(some, shards)
                found += [(key, tier, size) for key, size in zip(some, held, strict=False)]
                if held:
                    tier.use(some[: len(held)])
                    break
                if tier.seeks(keys[at:], shards):
                    patience_s = max(patience_s, self._patience(tier, keys[at], len(keys) - at, computing))
            if len(found) == at:
                break
        return found, patience_s

    def prefetch(self, wanted: Wanted, hits: int, room_bytes: int) -> list[Copy]:
        """Load the leading missing keys that tiers below have, up to `room_bytes`, before a request waits for them.

        A tier that must be asked is asked; it calls `answered` when the answer is there.
        """
        found = self.loadable(wanted, hits, room_bytes)
        if wanted.is_whole and len(found) < len(wanted.keys) - hits:
            return []
        deadline = self._clock() + self._store_s
        return self._copies.load(found, wanted, priority=Priority.PREFETCH, deadline=deadline)

    def loadable(self, wanted: Wanted, hits: int, room_bytes: float, computing: Computing = UNKNOWN) -> list[Hit]:
        """The leading missing keys that tiers below have, up to `room_bytes`, as far as loading is faster than
        computing."""
        found: list[Hit] = []
        for each in self._found(wanted, hits, computing)[0]:
            room_bytes -= each[2].nbytes * wanted.shards
            if room_bytes < 0:
                break
            found.append(each)
        return found[: self._paying(found, wanted.shards, computing)]

    def copy_to_arenas(self, wanted: Wanted, room_bytes: int) -> list[Copy]:
        """Copy the wanted keys that the first arena has to their own arenas, up to `room_bytes`, before a request waits
        for them."""
        keys: list[bytes] = []
        for key in wanted.keys if self.arenas is not None else ():
            for chunks in self._store.find([key], wanted.shards):
                room_bytes -= sum(chunk.room_bytes for chunk in chunks)
                keys.append(key)
            if room_bytes < 0:
                break
        if self.arenas is None or not (keys := keys[: len(keys) - (room_bytes < 0)]):
            return []
        return self._copies.store(
            self.arenas,
            keys,
            wanted.shards,
            to=wanted.arenas,
            priority=Priority.PREFETCH,
            deadline=self._clock() + self._store_s,
        )

    def _patience(self, tier: Tier, key: bytes, count: int, computing: Computing) -> float:
        """How many seconds to wait until a tier has said whether it has this key and those after it, `count` in all.

        For new prompts, which most are, this wait is in vain; so a tier whose loads would not pay is not waited for.
        From time to time one request still waits for such a tier: its answer finds a chunk to load as a probe of the
        tier's rate (`_probe`).
        """
        if not computing.is_known:
            return math.inf
        computing_s = computing.seconds(count)
        is_worth_it = self._load_takes(tier, count * self._chunk_bytes) <= computing_s
        if not self._is_due(self._waited_at, tier, always=is_worth_it):
            return 0.0
        most_s = ANSWER_SHARE * computing_s
        return max(0.0, most_s - tier.asked_s(key)) if tier.answer_s <= most_s else 0.0

    def _in_time(self, found: Sequence[Hit], shards: int) -> int:
        """The number of leading hits that the tiers can load within `load_s` at their measured rates.

        A larger load would be given up half-way, and would delay the loads after it for nothing.
        """
        totals = _nbytes(found, shards)
        if all(self._load_takes(tier, total) <= self._load_s for tier, total in totals.items()):
            return len(found)
        left: dict[Tier, int] = {}  # bytes that each tier can still load in time
        for tier, total in totals.items():
            left[tier] = bisect_right(range(total + 1), self._load_s, key=partial(self._load_takes, tier))
        for at, (_, tier, held) in enumerate(found):
            left[tier] -= held.nbytes * shards
            if left[tier] <= 0:
                return at
        return len(found)

    def _paying(self, found: Sequence[Hit], shards: int, computing: Computing) -> int:
        """The number of leading hits that load faster than they are computed, at the tiers' measured rates."""
        self._chunk_bytes = found[0][2].nbytes * shards if found else self._chunk_bytes
        if not computing.is_known:
            return len(found)
        counts = Counter(tier for _, tier, _ in found)
        nbytes = _nbytes(found, shards).items()
        slow = {tier for tier, total in nbytes if self._load_takes(tier, total) > computing.seconds(counts[tier])}
        return next((at for at, (_, tier, _) in enumerate(found) if tier in slow), len(found))

    def _load_takes(self, tier: Tier, nbytes: int) -> float:
        """Seconds until a new load of so many bytes would be done, after those before it; 0 if not known."""
        return paying.takes_s(tier.load_rate, nbytes + self._copies.queue(tier).bytes_before(nbytes))

    def _probe(self, found: Hit, wanted: Wanted, hits: int) -> None:
        """Load one chunk, from time to time, for which no request waits, to learn whether the tier is faster now."""
        if self._is_due(self._probed_at, found[1]):
            wanted = replace(wanted, who="a look how fast the tier is")
            with self._holding(wanted, hits):
                deadline = self._clock() + self._load_s
                self._copies.load([found], wanted, priority=Priority.PREFETCH, deadline=deadline)

    def _is_due(self, done_at: dict[Tier, float], tier: Tier, *, always: bool = False) -> bool:
        """Whether a periodic action on a tier is due, or `always`; if so, record it as done now."""
        now = self._clock()
        is_due = always or now - done_at.get(tier, -math.inf) >= paying.PROBE_S
        if is_due:
            done_at[tier] = now
        return is_due

    def why_not(self, key: bytes, shards: int, *, is_named: bool = False, chunk_s: float = math.inf) -> str:
        """Why a key that the arena lacks was not loaded from a tier below that has it; empty if none has it."""
        for level in self.below:
            for tier in level:
                if not tier.find([key], shards) or (is_named and tier.is_shared):
                    continue
                if self._is_late(tier):
                    return f"on {tier.name}, which was too slow a moment ago"
                rate = tier.load_rate
                if chunk_s < math.inf and rate.is_known:
                    loads = f"it loads {rate.gb_s:.3g} GB/s, and a chunk is computed in {chunk_s:.3g} s"
                    return f"on {tier.name}, but computing it is faster: {loads}"
                return f"on {tier.name}, but the arena had no room for it"
        return ""

    def explain_missing(self, key: bytes, gone: Gone | None, *, is_named: bool) -> Iterator[tuple[str, str]]:
        """Explain a key that is neither in memory nor known to be in a tier: why a tier may have it all the same, why
        it was not stored, or why it was removed. `gone`: what became of it in memory.

        :returns: pairs of a kind and a sentence.
        """
        was_there = False
        for tier in self._all():
            if is_named and tier.is_shared:
                continue
            if tier.is_shared and self._is_late(tier):
                yield "tier", f"{tier.name} was not asked, because it was too slow a moment ago"
            elif why := tier.why_not(key):
                yield "tier", f"{tier.name} {why}"
            elif self.storing.waits(tier, key):
                state = "does not keep up" if tier.takes_stores else "takes nothing now"
                yield "policy", f"{tier.name} was to get it, and {state}"
            elif (then := tier.history.why(key)) is not None:
                was_there = was_there or then.why.kind == "evicted"
                yield then.why.kind, f"{tier.name}: {then.sentence(self._clock())}"
        if not was_there and (why := self.storing.why_not(gone)):
            yield "policy", why

    def _is_late(self, tier: Tier) -> bool:
        return self._clock() - tier.late_at < self._load_s

    def _who_may_have(self, key: bytes, is_named: bool) -> Iterator[Tier]:
        """The tiers from which a key may be loaded now, the fastest first."""
        for level in self.below:
            first = key[-1] % len(level)
            for tier in [*level[first:], *level[:first]]:  # all, because the number of disks may have changed
                if is_named and tier.is_shared:
                    continue
                if self._is_late(tier):
                    self._counters["loads_from_slow_tiers"] += 1
                else:
                    yield tier

    def hit(self, chunk: Chunk, origin: Origin) -> None:
        """A request has hit this chunk for the first time since it is here: count it for the tier it came from."""
        for at, level in enumerate(self.below if not chunk.shard else ()):
            for tier in level:
                if tier.name == origin.name:
                    tier.tally.hits += 1
                    self.missed(chunk.key, self.below[:at], is_named=chunk.is_named)

    def origin(self, chunk: Chunk) -> Origin:
        """The chunk's origin; if the first arena has it, too, the origin there, because it came through that."""
        here = next((each for each in self._store.index.of(chunk.key) if not each.slot.arena), chunk)
        return here.reservation.origin

    def missed(self, key: bytes, levels: Sequence[Sequence[Tier]], *, is_named: bool) -> None:
        """Count a miss in these levels: a request went without this key, its first missing one, or got it from below
        them."""
        for level in levels:
            tier = level[key[-1] % len(level)]
            tier.tally.misses += not (is_named and tier.is_shared)

    def statuses(self) -> list[TierStatus]:
        found = [(tier, tier.status()) for tier in self._all()]
        return [
            replace(
                status,
                copies=len(self._copies.of(tier)),
                load_gb_s=tier.load_rate.gb_s,
                store_gb_s=tier.store_rate.gb_s,
                **asdict(tier.tally),
            )
            for tier, status in found
            if status is not None
        ]

    def forget(self, keys: Sequence[bytes], *, is_named: bool = False) -> int:
        """Delete keys from the tiers below; return the most that one level had. To be called before memory deletes
        them, which knows how many shards they have. `is_named`: they are a client's names, not in shared tiers."""
        by_shards: defaultdict[int, list[bytes]] = defaultdict(list)
        for key in keys:
            by_shards[max((chunk.reservation.shards for chunk in self._store.index.of(key)), default=0)].append(key)
        counts = [
            sum(tier.evict(some, shards) for tier in level for shards, some in by_shards.items())
            for level in self.below
            if not (is_named and level[0].is_shared)
        ]
        return max(counts, default=0)

    def tick(self) -> None:
        for tier in self._all():
            tier.tick()

    def close(self) -> None:
        for tier in [self.arenas, *self._all()]:
            if tier is not None:
                tier.close()


def _nbytes(found: Sequence[Hit], shards: int) -> Counter[Tier]:
    """Bytes of these hits per tier, all shards."""
    nbytes: Counter[Tier] = Counter()
    for _, tier, held in found:
        nbytes[tier] += held.nbytes * shards
    return nbytes
