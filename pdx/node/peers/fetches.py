"""What this node has asked peers for: a fetch is a push that its receiver starts. No sockets here."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum

import msgspec

from pdx.node.peers.connection import ConnectionState, PeerConnection
from pdx.store.deadlines import Deadlines
from pdx.wire.messages import Admit, Push

KEPT_S = 2.0  # how long it is known that a peer had nothing, so that nobody asks it again at every step


class FetchState(StrEnum):
    """How far a fetch is."""

    ASKING = "asking"  # the peer may still be dialled
    COMING = "coming"
    OVER = "over"


class Fetch(msgspec.Struct):
    """One question to one peer, named by the last key asked for: the hash chain makes it name all before it."""

    number: int
    source: str
    push: Push
    state: FetchState
    deadline: float
    is_sent: bool = False


class Fetches:
    """All questions to all peers. Owned by the control loop; the clock is a parameter. Each call costs what it changes,
    or how many questions that are not over were put to the peer that it names."""

    def __init__(self, dial: Callable[[str], PeerConnection], fetch_s: float) -> None:
        self._dial = dial
        self._fetch_s = fetch_s
        self._numbers = itertools.count(1)
        self._fetches: dict[tuple[str, bytes], Fetch] = {}
        self._by_number: dict[int, Fetch] = {}
        self._by_transfer: defaultdict[tuple[str, str], dict[int, Fetch]] = defaultdict(dict)
        self._asked: defaultdict[str, dict[int, Fetch]] = defaultdict(dict)  # of each peer: those that are not over
        self._deadlines: Deadlines[int] = Deadlines()
        self.ended: list[bytes] = []  # their last keys; whoever tells those who wait empties it

    def __len__(self) -> int:
        return sum(map(len, self._asked.values()))

    def is_waiting(self, ask: Admit, hits: int, now: float) -> bool:
        """Whether the keys behind the first `hits` may still come from `ask.source`; asks it, the first time.

        :raises PeerUnknown, ConfigError: it cannot be asked.
        """
        place = (ask.source, ask.keys[ask.sought - 1])
        fetch = self._fetches.get(place)
        if fetch is None:
            peer, number = self._dial(ask.source), next(self._numbers)
            push = Push(list(ask.keys[hits : ask.sought]), "", ask.shards, ask.awaits)
            fetch = self._fetches[place] = Fetch(number, ask.source, push, FetchState.ASKING, now + self._fetch_s)
            self._by_number[number] = self._asked[ask.source][number] = fetch
            self._deadlines.add([number], fetch.deadline)
            if push.transfer is not None:
                self._by_transfer[ask.source, push.transfer][number] = fetch
            self._send(fetch, peer)
        return fetch.state is not FetchState.OVER and now < fetch.deadline

    def ready(self, peer: PeerConnection) -> None:
        """Ask what waited for the connection."""
        for fetch in list(self._asked.get(peer.name, {}).values()):
            self._send(fetch, peer)

    def _send(self, fetch: Fetch, peer: PeerConnection) -> None:
        if peer.state is ConnectionState.READY and fetch.state is FetchState.ASKING and not fetch.is_sent:
            fetch.is_sent = True
            peer.send(fetch.push, fetch.number)

    def answered(self, peer: PeerConnection, number: int, count: int, now: float) -> None:
        """So many chunks come from the peer, it says; it may take a promise back."""
        fetch = self._by_number.get(number)
        if fetch is None or fetch.source != peer.name or fetch.state is FetchState.OVER:
            return
        if count:
            fetch.state = FetchState.COMING
        else:
            self._end(fetch, now)

    def over(self, name: str, number: int, transfer: str | None, now: float) -> None:
        """A push from this peer has ended, whatever way: it answered this question, or it was the transfer's."""
        ended = dict(self._by_transfer.get((name, transfer), {})) if transfer is not None else {}
        if (asked := self._by_number.get(number)) is not None and asked.source == name:
            ended[number] = asked
        for fetch in ended.values():
            self._end(fetch, now)

    def lost(self, name: str, now: float) -> None:
        """The peer is gone."""
        for fetch in list(self._asked.get(name, {}).values()):
            self._end(fetch, now)

    def tick(self, now: float) -> int:
        """Forget what is long over; returns how many questions ended by their deadline."""
        late = 0
        for number in self._deadlines.take(now):
            fetch = self._by_number[number]
            if fetch.state is FetchState.OVER:
                self._forget(fetch)
            else:
                late += 1
                self._end(fetch, now)
        return late

    def _forget(self, fetch: Fetch) -> None:
        name, push = fetch.source, fetch.push
        del self._fetches[name, push.keys[-1]]
        del self._by_number[fetch.number]
        if push.transfer is not None:
            of_transfer = self._by_transfer[name, push.transfer]
            del of_transfer[fetch.number]
            if not of_transfer:
                del self._by_transfer[name, push.transfer]

    def _end(self, fetch: Fetch, now: float) -> None:
        if fetch.state is FetchState.OVER:
            return
        fetch.state = FetchState.OVER
        self._deadlines.discard(fetch.number, fetch.deadline)
        fetch.deadline = now + KEPT_S
        self._deadlines.add([fetch.number], fetch.deadline)
        asked = self._asked[fetch.source]
        del asked[fetch.number]
        if not asked:
            del self._asked[fetch.source]
        self.ended.append(fetch.push.keys[-1])
