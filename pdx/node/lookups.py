"""What attached processes look up: the answer is what is here, or is kept back until there is more. No sockets here."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

import msgspec

from pdx.errors import ConfigError, PeerError
from pdx.node.peers.peers import Peers
from pdx.node.sessions import Session
from pdx.store.chunk import Chunk
from pdx.store.deadlines import Deadlines
from pdx.store.lifecycle import State
from pdx.store.store import Store
from pdx.store.tiers import Tiers
from pdx.store.transfers import Transfers
from pdx.telemetry.faults import Faults
from pdx.wire.messages import Answer, Found, Lookup

MAX_OF_SESSION = 1024  # lookups of one process that wait


class Waiter(msgspec.Struct, frozen=True):
    """One lookup: the message `seq` of a session; `hits` keys of it were found when somebody looked last."""

    session: Session
    seq: int
    ask: Lookup
    hits: int
    deadline: float

    @property
    def topics(self) -> tuple[Hashable, ...]:
        """What may change the answer: the next chunk, the transfer, and the fetch from a peer."""
        return self.ask.keys[self.hits], self.ask.transfer, ("fetch", self.ask.keys[-1])


class Waiting:
    """All lookups that wait. Owned by the control loop; a change costs what waits for it, and nothing else."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiters: dict[int, Waiter] = {}
        self._by_topic: defaultdict[Hashable, set[int]] = defaultdict(set)
        self._of_session: defaultdict[int, set[int]] = defaultdict(set)
        self._deadlines: Deadlines[int] = Deadlines()
        self._touched: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def has_room(self, session: Session) -> bool:
        """Whether one more lookup of this session may wait."""
        return len(self._of_session.get(session.number, ())) < MAX_OF_SESSION

    def add(self, waiter: Waiter) -> None:
        """This one waits from now on."""
        number = next(self._numbers)
        self._waiters[number] = waiter
        self._of_session[waiter.session.number].add(number)
        for topic in waiter.topics:
            self._by_topic[topic].add(number)
        self._deadlines.add([number], waiter.deadline)

    def changed(self, topics: Iterable[Hashable]) -> None:
        """Whoever waits for one of these may have an answer now."""
        for topic in topics:
            self._touched.update(dict.fromkeys(self._by_topic.get(topic, ())))

    def take(self, now: float) -> list[Waiter]:
        """Those that something has changed for, or whose time is over: they wait no more."""
        numbers, self._touched = self._touched, {}
        numbers.update(dict.fromkeys(self._deadlines.take(now)))
        return [self._remove(number) for number in numbers if number in self._waiters]

    def due_in(self, now: float) -> float:
        """Seconds until the time of one of them is over."""
        return max(0.0, self._deadlines.first - now)

    def end_session(self, session: Session) -> None:
        """Nobody is there to hear what this session asked."""
        for number in list(self._of_session.get(session.number, ())):
            self._remove(number)

    def _remove(self, number: int) -> Waiter:
        waiter = self._waiters.pop(number)
        self._deadlines.discard(number, waiter.deadline)
        for topic in waiter.topics:
            self._discard(self._by_topic, topic, number)
        self._discard(self._of_session, waiter.session.number, number)
        return waiter

    @staticmethod
    def _discard(sets: dict, name: Hashable, number: int) -> None:  # type: ignore[type-arg]
        numbers = sets[name]
        numbers.discard(number)
        if not numbers:
            del sets[name]


class Lookups:
    """Answers lookups from the store, and knows whether what is missing may still come. Owned by the control loop."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        tiers: Tiers,
        peers: Peers,
        *,
        counters: Counter[str],
        faults: Faults,
        degraded: Callable[[str, Exception], None],
        max_lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._transfers = transfers
        self._tiers = tiers
        self._peers = peers
        self._counters = counters
        self._faults = faults
        self._degraded = degraded
        self._max_lease_s = max_lease_s
        self._clock = clock
        self._waiting = Waiting()

    def ask(self, session: Session, ask: Lookup) -> Found | None:
        """The answer; None: it comes later."""
        answer = self._look(session, ask)
        if not (answer.waiting and ask.wait_s and self._waiting.has_room(session)):
            return answer
        self._waiting.add(Waiter(session, session.last_seq, ask, answer.hits, self._clock() + ask.wait_s))
        return None

    def late_answers(self) -> Iterator[tuple[Session, int, Answer]]:
        """After each turn of the control loop: answers to what has waited, with the numbers of their messages."""
        transfers, fetches = self._transfers.ended, self._peers.ended_fetches
        self._waiting.changed(transfers)
        self._waiting.changed(("fetch", key) for key in fetches)
        transfers.clear()
        fetches.clear()
        now = self._clock()
        for waiter in self._waiting.take(now):
            answer: Found | None = Found(0, [])  # where what follows fails: nothing is there
            with self._faults.contain("a late answer"):
                answer = self._late(waiter, now)
            if answer is not None:
                yield waiter.session, waiter.seq, answer

    def due_in(self, now: float) -> float:
        """Seconds until there is a late answer, whatever else happens."""
        return self._waiting.due_in(now)

    def changed(self, chunks: Iterable[Chunk]) -> None:
        """Slices of these chunks were filled, or they are whole, or never will be."""
        self._waiting.changed(chunk.key for chunk in chunks if chunk.state is not State.FILLING)

    def end_session(self, session: Session) -> None:
        """The process is gone."""
        self._waiting.end_session(session)

    def _late(self, waiter: Waiter, now: float) -> Found | None:
        """The answer; None: it waits on."""
        ask = waiter.ask
        hits = waiter.hits + len(self._store.find(itertools.islice(ask.keys, waiter.hits, None), ask.shards))
        if now < waiter.deadline and hits < len(ask.keys) and self._may_come(ask, hits):
            self._waiting.add(msgspec.structs.replace(waiter, hits=hits))
            return None
        return self._look(waiter.session, ask)

    def _look(self, session: Session, ask: Lookup) -> Found:
        hits = self._store.find(ask.keys, ask.shards)
        chunks = [chunk for shards in hits for chunk in shards]
        if len(hits) < len(ask.keys) and self._may_come(ask, len(hits)):
            self._store.touch(chunks)
            return Found(len(hits), [], waiting=True)
        self._counters["lookups"] += 1
        self._counters["looked_up_chunks"] += len(ask.keys)
        self._counters["hit_chunks"] += len(hits)
        lease = 0
        if chunks and ask.lease_s:
            lease = self._store.lease(chunks, session.number, min(ask.lease_s, self._max_lease_s))
        else:
            self._store.touch(chunks)
        return Found(len(hits), [chunk.slot for chunk in chunks], lease)

    def _may_come(self, ask: Lookup, hits: int) -> bool:
        if ask.transfer is not None:
            if self._transfers.is_given_up(ask.transfer):
                return False
            if self._transfers.is_under_way(ask.transfer) or self._store.is_filling(ask.keys[hits], ask.shards):
                return True
        if self._tiers.may_come(ask.keys, hits, ask.shards):
            return True
        try:
            return self._peers.may_come(ask, hits)
        except (PeerError, ConfigError) as error:
            self._degraded("fetch_impossible", error)
            return False
