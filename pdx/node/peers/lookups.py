"""Asks which peer has the most of a prompt that no proxy has placed, before an engine computes it. No sockets here.

An answer is a number of chunks and leads at most to a fetch from that peer (`pdx.node.peers.fetches`): a peer that is
silent, wrong or gone costs a request `lookup_s` at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec

from pdx.node.peers.connection import ConnectionState, PeerConnection
from pdx.node.peers.connections import Connections
from pdx.store import paying
from pdx.store.deadlines import Deadlines
from pdx.telemetry.env import Env
from pdx.wire.messages import Admit, Push

KEPT_S = 2.0  # how long an answer holds for other requests with the same prompt
MAX_ASKED = 8  # peers, for one prompt
LONGEST_S = 60.0  # the longest computing time told to peers; the real one may be unknown
MAX_KEYS = 1024  # in one question: a peer looks each up


class Lookup(msgspec.Struct, eq=False):
    """One question to some peers: how many of a prompt's leading chunks each can restore. `name`: the last key sought,
    which by the hash chain implies all keys before it."""

    number: int
    name: bytes
    first: int  # the question is about the chunks [first, end)
    end: int
    most: int  # leading chunks that `source` can restore; before an answer, those that this node can
    deadline: float
    asked: set[PeerConnection]  # that have not answered
    source: str = ""
    is_over: bool = False


class Lookups:
    """All lookups. Owned by the control loop; the clock is a parameter. A call costs as much as what it changes."""

    def __init__(self, connections: Connections, lookup_s: float, env: Env, numbers: Iterator[int]) -> None:
        """`lookup_s`: how long a request waits for the answers; 0: no peer is asked. `numbers`: of questions."""
        self._connections = connections
        self._lookup_s = lookup_s
        self._counters = env.counters
        self._news = env.news
        self._numbers = numbers
        self.is_on = False  # whether peers are asked, and one was ever connected
        self._lookups: dict[bytes, Lookup] = {}
        self._open: dict[int, Lookup] = {}  # pending ones, by number
        self._deadlines: Deadlines[Lookup] = Deadlines()

    def __len__(self) -> int:
        return len(self._open)

    def ready(self) -> None:
        """Note that a peer is connected."""
        self.is_on = self._lookup_s > 0

    def source(self, ask: Admit, now: float, computing_s: float, here: Callable[[], int]) -> str | None:
        """The peer that can restore more of a prompt than this node; empty: none; None: unknown yet. Asks once.

        `computing_s`: how long computing the rest takes. `here`: returns how many leading chunks this node can restore.
        """
        lookup = self._lookups.get(ask.last_sought) or self._begin(ask, now, computing_s, here)
        if lookup is not None and not lookup.is_over:
            return None
        return self.known(ask) if lookup is not None and (ask.groups or lookup.most > here()) else ""

    def known(self, ask: Admit) -> str:
        """The peer recently found for this prompt, if it is connected; else empty."""
        lookup = self._lookups.get(ask.last_sought)
        peer = self._connections.of(lookup.source) if lookup is not None and lookup.source else None
        return peer.name if peer is not None and peer.state is ConnectionState.READY else ""

    def _begin(self, ask: Admit, now: float, computing_s: float, here: Callable[[], int]) -> Lookup | None:
        patience_s = min(self._lookup_s, computing_s - paying.LOAD_S)  # no longer than a fetch can gain
        able = (peer for peer in self._connections.peers if peer.state is ConnectionState.READY and not peer.is_silent)
        peers = [*itertools.islice(able, MAX_ASKED)] if patience_s > 0 else []
        if not peers:
            return None
        hits = here()
        if ask.groups:
            first, end = 0, min(ask.sought, MAX_KEYS // len(ask.groups))
            keys = [key for at in range(0, len(ask.keys), ask.chunks) for key in ask.keys[at : at + end]]
        else:
            first, end = hits, min(ask.sought, hits + MAX_KEYS)
            keys = ask.keys[first:end]
        if hits >= end:
            return None
        number = next(self._numbers)
        lookup = Lookup(number, ask.last_sought, first, end, hits, now + patience_s, set(peers))
        self._lookups[lookup.name] = self._open[number] = lookup
        self._deadlines.add([lookup], lookup.deadline)
        self._counters["peer_lookups"] += 1
        within_s = min(computing_s, LONGEST_S)
        for peer in peers:
            peer.send(Push(keys, "", ask.shards, groups=ask.groups, dry_run=True, within_s=within_s), number)
        return lookup

    def answered(self, peer: PeerConnection, number: int, count: int, now: float) -> None:
        """Note that the peer can restore the first `count` chunks of the question."""
        peer.is_silent = False
        lookup = self._open.get(number)
        if lookup is None or peer not in lookup.asked:
            return
        lookup.asked.discard(peer)
        length = min(lookup.first + count, lookup.end)
        if length > lookup.most:
            lookup.most, lookup.source = length, peer.name
        if not lookup.asked or lookup.most == lookup.end:
            self._end(lookup, now)

    def turn(self, now: float) -> None:
        """After each turn of the control loop: end lookups whose deadline has passed."""
        for lookup in self._deadlines.take(now):
            if lookup.is_over:
                del self._lookups[lookup.name]
                continue
            self._counters["peer_lookups_late"] += 1
            for peer in lookup.asked:
                peer.is_silent = True
            self._end(lookup, now)

    def due_in(self, now: float) -> float:
        """Seconds until the first deadline."""
        return max(0.0, self._deadlines.first - now)

    def _end(self, lookup: Lookup, now: float) -> None:
        lookup.is_over = True
        lookup.asked = set()
        self._deadlines.discard(lookup, lookup.deadline)
        lookup.deadline = now + KEPT_S
        self._deadlines.add([lookup], lookup.deadline)
        del self._open[lookup.number]
        self._news.append(("fetch", lookup.name))
