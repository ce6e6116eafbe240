"""This node's requests to peers for chunks: a fetch is a push that its receiver asked for. No sockets here.

Chunks are not requested if, by the peer's recent rate, it would take longer to send them than to compute them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence

import msgspec

from pdx.node.peers.connection import ConnectionState, PeerConnection
from pdx.node.peers.connections import Connections
from pdx.store import paying
from pdx.store.deadlines import Deadlines
from pdx.store.index import Groups
from pdx.store.paying import UNKNOWN, Computing
from pdx.telemetry.env import Env
from pdx.telemetry.rate import Rate
from pdx.wire.messages import Admit, Push

KEPT_S = 2.0  # how long a fetch that is over is remembered, so that it is not repeated at every step


class Fetch(msgspec.Struct, eq=False):
    """One request to one peer. `name`: the last key sought, which by the hash chain implies all keys before it."""

    number: int
    source: str
    name: bytes
    push: Push
    since: float
    deadline: float
    is_sent: bool = False  # False: the peer is still being dialled
    is_over: bool = False


class Fetches:
    """All fetches from all peers. Owned by the control loop; the clock is a parameter. A call costs as much as what it
    changes, or as the pending fetches from the peer that it names."""

    def __init__(self, connections: Connections, fetch_s: float, env: Env) -> None:
        self._connections = connections
        self._fetch_s = fetch_s
        self._counters = env.counters
        self._news = env.news
        self._numbers = itertools.count(1)
        self._fetches: dict[tuple[str, bytes], Fetch] = {}
        # Pending fetches: by number, by peer, and by a peer's transfer.
        self._asked: dict[int, Fetch] = {}
        self._of_peer: Groups[str, Fetch] = Groups()
        self._of_transfer: Groups[tuple[str, str], Fetch] = Groups()
        self._deadlines: Deadlines[Fetch] = Deadlines()
        self._rates: defaultdict[str, Rate] = defaultdict(Rate)  # by peer
        self._tried_at: dict[str, float] = {}  # by peer: see `_is_due`
        self._chunk_bytes: Counter[str] = Counter()  # of all shards of the chunk that came last, by peer

    def __len__(self) -> int:
        return len(self._asked)

    def is_waiting(
        self, ask: Admit, hits: int, now: float, computing: Computing = UNKNOWN, keys: Sequence[bytes] = ()
    ) -> bool:
        """Whether the keys after the first `hits` may still come from `ask.source`, which is asked the first time.
        `keys`: with several cache groups, the keys wanted; without a transfer the peer is asked for the longest part of
        the prompt that it has.

        Chunks that would come later than `computing` them takes are not requested, unless a transfer brings them: then
        they are being computed there.

        :raises PeerUnknown, ConfigError: the peer cannot be asked.
        """
        name = ask.last_sought
        fetch = self._fetches.get((ask.source, name))
        if fetch is None:
            keys, deadline = (keys or ask.keys[: ask.sought])[hits:], now + self._fetch_s
            within_s = 0.0
            if ask.awaits is None:
                computing_s, takes_s = computing.seconds(len(keys)), self.takes_s(ask.source, len(keys))
                deadline = now + paying.patience_s(computing_s, self._fetch_s)
                within_s = min(computing_s - takes_s, self._fetch_s)  # for the peer's disk
                if within_s < 0 and not self._is_due(ask.source, now):
                    self._counters["fetches_not_worth"] += len(keys)
                    return False
                within_s = max(0.0, within_s)
            push = Push(list(keys), "", ask.shards, ask.awaits, within_s=within_s)
            if ask.groups and ask.awaits is None:
                push = Push(ask.sought_keys, "", ask.shards, groups=ask.groups)
            fetch = self._begin(name, ask, push, now, deadline)
        return not fetch.is_over and now < fetch.deadline

    def takes_s(self, name: str, count: int) -> float:
        """Seconds until so many chunks of a peer are here, after those already requested; 0: unknown."""
        coming = sum(len(fetch.push.keys) for fetch in self._of_peer.of(name) if not fetch.push.transfer)
        rate = self._rates.get(name, Rate())
        return paying.takes_s(rate, (coming + count) * self._chunk_bytes[name])

    def _is_due(self, name: str, now: float) -> bool:
        """Whether to try a peer that seems slower than computing, which may have become faster. The try is a whole
        request that waits: probing beside it would bring nothing, as the prompt's chunks are reserved for the engine
        that computes it. Tries are noted, because some measure nothing."""
        is_due = now - max(self._rates[name].end_ns / 1e9, self._tried_at.get(name, -math.inf)) >= paying.PROBE_S
        if is_due:
            self._tried_at[name] = now
        return is_due

    def _begin(self, name: bytes, ask: Admit, push: Push, now: float, deadline: float) -> Fetch:
        peer, number = self._connections.dial(ask.source), next(self._numbers)
        fetch = Fetch(number, ask.source, name, push, now, deadline)
        self._fetches[ask.source, name] = self._asked[number] = fetch
        self._of_peer.add(ask.source, [fetch])
        self._deadlines.add([fetch], deadline)
        if push.transfer is not None:
            self._of_transfer.add((ask.source, push.transfer), [fetch])
        self._send(fetch, peer)
        return fetch

    def ready(self, peer: PeerConnection) -> None:
        """Send the fetches that waited for the connection."""
        for fetch in self._of_peer.of(peer.name):
            self._send(fetch, peer)

    def _send(self, fetch: Fetch, peer: PeerConnection) -> None:
        if peer.state is ConnectionState.READY and not fetch.is_sent:
            fetch.is_sent = True
            peer.send(fetch.push, fetch.number)

    def answered(self, peer: PeerConnection, number: int, count: int, now: float) -> None:
        """Note the peer's answer, that `count` chunks come; with 0 it also takes back a promise."""
        fetch = self._asked.get(number)
        if fetch is not None and fetch.source == peer.name and not count:
            self._end(fetch, now)

    def over(self, name: str, number: int, transfer: str | None, now: float) -> None:
        """Note that a push from this peer has ended in whatever way: the push of this fetch, or of the transfer.

        Another push of the transfer may have ended before the request came, or have brought none of its chunks: then
        missing ones are requested again.
        """
        ended = self._of_transfer.of((name, transfer)) if transfer is not None else []
        asked = self._asked.get(number)
        if asked is not None and asked.source == name and asked not in ended:
            ended.append(asked)
        for fetch in ended:
            self._end(fetch, now, is_kept=fetch is asked)

    def landed(self, name: str, chunk_bytes: int, nbytes: int, since: float, now: float) -> None:
        """Note that a fetch has brought `nbytes`, with room for them `since` then. `chunk_bytes`: all shards of one."""
        self._chunk_bytes[name] = chunk_bytes
        self._measure(name, nbytes, since, now)

    def _measure(self, name: str, nbytes: int, since: float, now: float) -> None:
        self._rates[name].moved(nbytes, int(since * 1e9), int(now * 1e9))

    def forget(self, known: Container[str]) -> None:
        """Forget peers whose names are not in `known` and from which no fetch is pending."""
        for name in [name for name in self._rates if name not in known and not self._of_peer.count(name)]:
            del self._rates[name], self._chunk_bytes[name]
            self._tried_at.pop(name, None)

    def lost(self, name: str, now: float) -> None:
        """End all fetches from a peer that is gone."""
        for fetch in self._of_peer.of(name):
            self._end(fetch, now)

    def tick(self, now: float, room_since: Callable[[str, int], float] = lambda name, number: 0.0) -> int:
        """End late fetches and forget old ones; return how many were late.

        `room_since`: since when there has been room here for a peer's push in answer to a fetch; `now`: there is none
        yet; 0: the peer has not asked for room.
        """
        late = 0
        for fetch in self._deadlines.take(now):
            if fetch.is_over:
                del self._fetches[fetch.source, fetch.name]
            else:
                late += 1
                if fetch.push.transfer is None and fetch.is_sent:  # a transfer's chunks come as they are computed
                    since = max(fetch.since, room_since(fetch.source, fetch.number))
                    if since < now:  # else this node kept its peer waiting
                        self._measure(fetch.source, 0, since, now)
                self._end(fetch, now)
        return late

    def _end(self, fetch: Fetch, now: float, *, is_kept: bool = True) -> None:
        """:param is_kept: whether to remember it, so that it is not repeated at once."""
        fetch.is_over = True
        self._deadlines.discard(fetch, fetch.deadline)
        if is_kept:
            fetch.deadline = now + KEPT_S
            self._deadlines.add([fetch], fetch.deadline)
        else:
            del self._fetches[fetch.source, fetch.name]
        del self._asked[fetch.number]
        self._of_peer.discard(fetch.source, fetch)
        if (transfer := fetch.push.transfer) is not None:
            self._of_transfer.discard((fetch.source, transfer), fetch)
        self._news.append(("fetch", fetch.name))
