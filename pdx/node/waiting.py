"""Requests whose answers wait: what each waits for, and until when. No sockets here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable

import msgspec

from pdx.node.sessions import Session
from pdx.store.cache_groups import Goal
from pdx.store.deadlines import Deadlines
from pdx.store.index import Groups
from pdx.wire.messages import Admit

MAX_OF_SESSION = 1024  # waiting requests of one process


class Waiter(msgspec.Struct, frozen=True):
    """A waiting request, message `seq` of a session. `goal`: the chunks it waits for; `key`: which may come next."""

    session: Session
    seq: int
    ask: Admit
    goal: Goal
    key: bytes
    since: float
    deadline: float
    load_s: float = 0.0  # how long before the last slice is filled it is answered

    @property
    def topics(self) -> tuple[Hashable, ...]:
        """The events that may change the answer: of the next chunk, the transfer, and the fetch from a peer."""
        return self.key, self.ask.transfer, ("fetch", self.ask.last_sought)


class Patience(msgspec.Struct, frozen=True):
    """More than these hits may come: `key` of the goal is next, and is worth waiting for up to `seconds`."""

    hits: int
    goal: Goal
    key: bytes
    seconds: float


class Waiting:
    """All waiting requests. Owned by the control loop; a change costs only as much as the requests waiting for it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiters: dict[int, Waiter] = {}
        self._by_topic: Groups[Hashable, int] = Groups()
        self._of_session: Groups[int, int] = Groups()
        self._deadlines: Deadlines[int] = Deadlines()
        self._touched: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def has_room(self, session: Session) -> bool:
        return self._of_session.count(session.number) < MAX_OF_SESSION

    def add(self, waiter: Waiter) -> None:
        number = next(self._numbers)
        self._waiters[number] = waiter
        self._of_session.add(waiter.session.number, [number])
        for topic in waiter.topics:
            self._by_topic.add(topic, [number])
        self._deadlines.add([number], waiter.deadline)

    def changed(self, topics: Iterable[Hashable]) -> None:
        """Note that requests waiting for one of these topics may have an answer now."""
        for topic in topics:
            self._touched.update(dict.fromkeys(self._by_topic.of(topic)))

    def filled(self, name: str, left_s: Callable[[str], float]) -> None:
        """Note that slices of this transfer were filled; `left_s` estimates how long the rest takes."""
        numbers = [number for number in self._by_topic.of(name) if self._waiters[number].load_s]
        if numbers:
            left = left_s(name)
            self._touched.update((number, None) for number in numbers if left <= self._waiters[number].load_s)

    def take(self, now: float) -> list[Waiter]:
        """Take out the waiters for which something has changed, or whose deadline has passed."""
        numbers, self._touched = self._touched, {}
        numbers.update(dict.fromkeys(self._deadlines.take(now)))
        return [self._remove(number) for number in numbers if number in self._waiters]

    def due_in(self, now: float) -> float:
        """Seconds until the first deadline."""
        return max(0.0, self._deadlines.first - now)

    def end_session(self, session: Session) -> None:
        for number in self._of_session.of(session.number):
            self._remove(number)

    def _remove(self, number: int) -> Waiter:
        waiter = self._waiters.pop(number)
        self._deadlines.discard(number, waiter.deadline)
        for topic in waiter.topics:
            self._by_topic.discard(topic, number)
        self._of_session.discard(waiter.session.number, number)
        return waiter
