"""Why each chunk of the last requests was a hit or not, and where it came from: what `pdx why` shows."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdx.memory.apart import differing
from pdx.memory.keys import KEY_BYTES
from pdx.memory.rules import needed
from pdx.node.sessions import Session
from pdx.store.chunk import Chunk, Origin
from pdx.store.history import ago
from pdx.store.lifecycle import State
from pdx.telemetry.faults import printable
from pdx.telemetry.names import SOURCES
from pdx.telemetry.recent import remember
from pdx.wire.base import MAX_NAME, MAX_REASONS
from pdx.wire.hints import Verdict
from pdx.wire.messages import Admit, Admitted, Hello
from pdx.wire.status import Explained, Explanation, Reason

if TYPE_CHECKING:
    from pdx.node.service import Service

MAX_REQUESTS = 4096  # remembered
MAX_KEYS = 1 << 17  # remembered, of all requests
MAX_BEGUN = 4096  # first blocks, and cache salts, remembered
MAX_SHOWN = 32  # requests in one answer
MAX_HOLDERS = 4  # named when a request finds no room
MAX_GROUP_NAME = 128  # characters
MAX_EXPLAINED = 48  # missing chunks per request: explaining one costs about as much as answering for ten


class Explanations:
    """The node's answers to requests that gave a name. Owned by the control loop.

    An explanation costs a look at each chunk that is hit and at the first that are not, once, when it is answered.
    """

    def __init__(self, service: Service) -> None:
        self._sessions = service.sessions
        self._peers = service.peers
        self._store = service.store
        self._index = service.store.index
        self._tiers = service.tiers
        self._of_request: OrderedDict[tuple[str, str], tuple[float, Explanation]] = OrderedDict()
        # The last prompts by their first block: the engine that asked, and the first chunk's parent (by its layout). A
        # block's name covers its tokens and what the engine hashes with them (cache salt, adapter, images).
        self._begun: OrderedDict[bytes, tuple[Hello, bytes]] = OrderedDict()
        self._salts: OrderedDict[bytes, None] = OrderedDict()  # of the same prompts; empty: none
        self._keys: OrderedDict[tuple[str, str], tuple[Sequence[bytes], int]] = OrderedDict()  # with number of shards
        self._num_keys = 0
        self._reuse: OrderedDict[tuple[str, str], Verdict] = OrderedDict()  # on that hint, by request

    def not_moved(self, session: Session, request: str) -> None:
        """Note that no part of a request was found at other positions."""
        if request:
            verdict = Verdict("reuse", "refused", "nothing is there that begins so")
            remember(self._reuse, (_whose(session), request), verdict, MAX_REQUESTS)

    def reasons(
        self,
        session: Session,
        ask: Admit,
        hits: int,
        found: Sequence[tuple[Chunk, ...]],
        part: tuple[Sequence[Chunk], int],
        now: float,
    ) -> list[Reason]:
        """Why each chunk of a request is a hit or not. `found`: the chunks its hits need; `part`: a partial hit after
        them, with its number of blocks.

        Call it before room is made for missing chunks, which changes the reasons.
        """
        if not ask.request:
            return []
        if ask.groups:
            return [*self._of_groups(session, ask, hits, found, now)]
        chunks, blocks = part
        reasons = [*self._of_hits(found, now, [part.shift for part in ask.moved])]
        if chunks:
            text = f"the leading {blocks} blocks, {_came_from(chunks[0].reservation.origin, now)}"
            reasons.append(Reason(hits, 1, True, _kind(chunks[0].reservation.origin), text))
        return [*reasons, *self._of_misses(session, ask, hits + bool(chunks), now, MAX_EXPLAINED)]

    def sources(self, ask: Admit, hits: int, found: Sequence[Sequence[Chunk]], new: Mapping[Chunk, Origin]) -> bytes:
        """`Admitted.sources`. `found`: the chunks that the hits need, and the chunk after them; `new`: the origins of
        those that no request has found since they came here."""
        if not new:
            return b""
        sources, places = bytearray(hits + 1), [*range(hits)]
        if ask.groups:
            places = [at % ask.chunks for at in needed(ask.groups, ask.chunks, hits, has_tail=ask.has_tail)]
        for place, chunks in zip([*places, hits], found, strict=True):
            if chunks and (origin := new.get(chunks[0])) is not None:
                sources[place] = max(sources[place], SOURCES.index(_kind(origin)))
        return bytes(sources) if any(sources) else b""

    def note(
        self, session: Session, ask: Admit, reasons: list[Reason], answer: Admitted, *, waited_s: float, now: float
    ) -> None:
        """Remember the answer to a request and its reasons."""
        if not ask.request:
            return
        notes = []
        if answer.full:
            lack = self._lack(ask, answer)
            pool = self._store.pools[session.home]
            taken = f"{pool.total_bytes - pool.available_bytes} of {pool.total_bytes} bytes"
            held = f"{lack} chunks found no room: {taken} are leased, pinned or being filled"
            notes.append(printable("; ".join([held, *self._holders()])))
        elif not (ask.asks_room or ask.moved):
            notes.append("it asked for no room: nothing of it is stored by this request")
        if answer.hits and ask.tokens is not None and ask.tokens.is_moved:
            notes.append("it asks for `reuse`: hits may hold what was moved or blended, or stood behind that")
        if reasons and not reasons[0].is_hit:
            differs = session.unshared or session.unshared_before
            if differs:
                notes.append(printable(f"its engine shares no chunks {differs}"))
            if reasons[0].kind == "new" and (text := self._differs(session.hello, ask)):
                notes.append(printable(text))
        if name := ask.blocks[:KEY_BYTES]:
            remember(self._begun, name, (session.hello, ask.parent), MAX_BEGUN)
            remember(self._salts, ask.hints.salt, None, MAX_BEGUN)
        whose = _whose(session)
        self._remember(whose, ask)
        shown = printable(ask.request, MAX_NAME - 1), printable(whose, MAX_NAME - 1)  # clients choose both
        shown_reasons = reasons[:MAX_REASONS]
        chunks = max(ask.sought, answer.hits)  # a tail that it would have written may have been here
        verdicts = answer.verdicts
        if ask.moved:  # a question of its own; the verdicts on the request stay
            reuse = Verdict("reuse", "accepted" if answer.hits else "refused")
            remember(self._reuse, (whose, ask.request), reuse, MAX_REQUESTS)
            before = self._of_request.get((whose, ask.request))
            verdicts = before[1].verdicts if before is not None else []
        told = Explanation(*shown, 0.0, waited_s, chunks, answer.hits, shown_reasons, notes, verdicts)
        remember(self._of_request, (whose, ask.request), (now, told), MAX_REQUESTS)

    def _lack(self, ask: Admit, answer: Admitted) -> int:
        """How many chunks after the hits are neither here nor granted."""
        if not ask.groups:
            return len(ask.keys) - answer.hits - len(answer.granted)
        count = ask.chunks
        return sum(not self._index.of(key) for at, key in enumerate(ask.keys) if at % count >= answer.hits)

    def _differs(self, hello: Hello, ask: Admit) -> str:
        """How a prompt without any known chunk differs from those before it; empty: unknown."""
        name = ask.blocks[:KEY_BYTES]
        if not name or not self._begun:
            return ""
        if (seen := self._begun.get(name)) is not None:
            other, parent = seen
            if parent == ask.parent:
                return ""
            fields = differing(hello, other) or "its chunks have another layout"
            return f"engine {other.engine!r} has had the same first block, but under other keys: {fields}"
        is_all = max(len(self._begun), len(self._salts)) < MAX_BEGUN  # else some may be forgotten by now
        if ask.hints.salt not in self._salts:
            why = "its cache salt is new here" if is_all else "its cache salt was in none of them"
            why = why if ask.hints.salt else "it has no cache salt, and all of them had one"
        else:
            why = "the tokens differ, or what its engine hashes with them"
            why += ", or the cache salt, of which there are several" if len(self._salts) > 1 else ""
        before = "no prompt before it" if is_all else f"none of the last {len(self._begun)} prompts"
        return f"{before} began with its first block: {why}"

    def _remember(self, whose: str, ask: Admit) -> None:
        name = whose, ask.request
        known = self._keys.pop(name, None)
        self._num_keys -= len(known[0]) if known is not None else 0
        if not ask.keys:
            return
        keys = ask.needed_keys(ask.chunks)
        self._keys[name] = keys, ask.shards
        self._num_keys += len(keys)
        while self._num_keys > MAX_KEYS:
            self._num_keys -= len(self._keys.popitem(last=False)[1][0])

    def keys_of(self, request: str) -> tuple[Sequence[bytes], int] | None:
        """The keys and number of shards that the last request whose name contains `request` asked for; None: unknown.
        With several cache groups, the keys that the whole prompt needs, group after group."""
        return next((self._keys[name] for name in reversed(self._keys) if request in name[1]), None)

    def amend(self, session: Session, request: str, first: int) -> None:
        """Note that the engine could not load chunk `first` of a request, and computed it and all after it."""
        at, told = self._of_request.get((_whose(session), request), (0.0, None))
        if told is None:
            return
        reasons: list[Reason] = []
        for each in told.reasons:
            loaded = min(each.count, max(0, first - each.first)) if each.is_hit else each.count
            if loaded:
                reasons.append(replace(each, count=loaded))
            if loaded < each.count:
                text = f"its engine could not load it: evicted before that, never filled, or out of reach; {each.text}"
                reasons.append(Reason(each.first + loaded, each.count - loaded, False, "failed", text))
        amended = replace(told, hits=min(told.hits, first), reasons=reasons[:MAX_REASONS])
        self._of_request[_whose(session), request] = at, amended

    def _holders(self) -> list[str]:
        """Who keeps the most bytes from being evicted, the largest first."""
        leased, filled = self._store.holders()
        of_session = {session.number: session.title for session in self._sessions}
        held = Counter({f"leased by {of_session.get(number, 'a peer')}": nbytes for number, nbytes in leased.items()})
        held.update({f"being filled for {name or 'others'}": nbytes for name, nbytes in filled.items() if nbytes > 0})
        held["pinned"] += self._store.index.pinned_bytes
        return [f"{nbytes} {what}" for what, nbytes in held.most_common(MAX_HOLDERS) if nbytes]

    def of(self, request: str, now: float) -> Explained:
        """The last requests whose name contains `request`, the newest first."""
        found = []
        names = (name for name in reversed(self._of_request) if request in name[1])
        for name in itertools.islice(names, MAX_SHOWN):
            at, told = self._of_request[name]
            reuse = [self._reuse[name]] if name in self._reuse else []
            found.append(replace(told, age_s=now - at, verdicts=[*told.verdicts, *reuse]))
        return Explained(found, len(self._of_request))

    def _of_hits(self, hits: Sequence[tuple[Chunk, ...]], now: float, shifts: Sequence[int] = ()) -> Iterator[Reason]:
        """`shifts`: by how many positions each hit was moved; empty: none was."""
        first, pairs = 0, zip(hits, shifts or itertools.repeat(0), strict=False)
        for (_, shift), run in itertools.groupby(pairs, key=lambda pair: (id(pair[0][0].reservation.origin), pair[1])):
            chunks = [chunks for chunks, _ in run]
            origin = chunks[0][0].reservation.origin
            moved = f"moved by {shift:+,}: " if shift else ""
            yield Reason(first, len(chunks), True, _kind(origin), moved + _came_from(origin, now))
            first += len(chunks)

    def _of_groups(
        self, session: Session, ask: Admit, hits: int, found: Sequence[tuple[Chunk, ...]], now: float
    ) -> Iterator[Reason]:
        """For each cache group, the chunks that the hits need, then those that the whole prompt would need as well."""
        left, most, names = iter(found), max(1, MAX_EXPLAINED // len(ask.groups)), session.groups
        for number, group in enumerate(ask.groups):
            needs = group.first(hits, has_tail=ask.has_tail and hits == ask.chunks)
            lacks = group.first(ask.sought, has_tail=ask.has_tail and not ask.writes_tail)
            keys = ask.keys[number * ask.chunks : (number + 1) * ask.chunks]
            of_hits = self._of_hits([*itertools.islice(left, hits - needs)], now)
            name = printable(names[number] if number < len(names) else f"cache group {number}", MAX_GROUP_NAME)
            for each in of_hits:
                yield replace(each, first=needs + each.first, text=f"{name}: {each.text}")
            own = replace(ask, keys=keys, groups=[group])
            for each in self._of_misses(session, own, max(hits, lacks), now, most):
                has = "" if each.kind in _HERE else f" has no {_chunks(each)}"
                yield replace(each, text=f"{name}{has}: {each.text}")

    def _of_misses(self, session: Session, ask: Admit, first: int, now: float, most: int) -> Iterator[Reason]:
        end = min(ask.sought, first + most)
        chunk_s = self._sessions.chunk_s(session, ask.shards)
        may_be_elsewhere = ask.source or self._peers.lookups.is_on
        slow = self._peers.why_not(ask, ask.sought - first, chunk_s) if may_be_elsewhere else ""
        why = [self._why(session, ask, index, now, chunk_s, slow) for index in range(first, end)]
        why += [("gap", "behind the first that are missing")] * (ask.sought - end)
        for (kind, text), run in itertools.groupby(why):
            count = len(list(run))
            yield Reason(first, count, False, kind, printable(text))
            first += count

    def _why(self, session: Session, ask: Admit, index: int, now: float, chunk_s: float, slow: str) -> tuple[str, str]:
        """Why a chunk is missing, in one word and in a sentence. `slow`: why its peer was not asked."""
        key = ask.keys[index]
        if chunks := self._index.of(key):
            shards = {chunk.shard for chunk in chunks if chunk.state is State.SEALED}
            if any(chunk.state is State.FILLING for chunk in chunks):
                by = chunks[0].reservation.origin.name or "another request"
                return "filling", f"being filled by {by} at that time"
            if len(shards) >= ask.shards:
                whose = "one that is needed with it" if ask.groups else "behind one that"
                return "gap", f"here, but {whose} is missing"
            if shards:
                return "shard", f"shards {sorted(set(range(ask.shards)) - shards)} of it are missing"
        is_named = session.is_client
        has_tiers = self._tiers.below
        below = self._tiers.why_not(key, ask.shards, is_named=is_named, chunk_s=chunk_s) if has_tiers else ""
        if below or slow:
            return "tier", below or slow
        gone = self._store.history.why(key)
        lacking = dict(self._tiers.explain_missing(key, gone, is_named=is_named)) if has_tiers else {}  # one per kind
        if gone is not None:
            kind, text = gone.why.kind, gone.sentence(now)
        elif lacking:
            kind, text = next(iter(lacking)), f"never in memory here{self._or_forgotten}"
        else:
            kind, text = "new", f"never stored here under this key{self._or_forgotten}"
        kind = "tier" if "tier" in lacking else "policy" if "policy" in lacking else kind
        return kind, "; ".join([text, *lacking.values()]) if lacking else text

    @property
    def _or_forgotten(self) -> str:
        return ", or so long ago that it is forgotten" if self._store.history.has_forgotten else ""


_HERE = ("gap", "filling", "shard")  # reasons for a miss although the chunk is here, or where that does not matter


def _chunks(reason: Reason) -> str:
    last = reason.first + reason.count - 1
    return f"chunk {last}" if reason.count == 1 else f"chunks {reason.first} to {last}"


def _whose(session: Session) -> str:
    return session.hello.engine or session.hello.name


def _kind(origin: Origin) -> str:
    return origin.kind if origin.kind in ("disk", "remote", "peer") else "memory"


def _came_from(origin: Origin, now: float) -> str:
    blended = "" if origin.blended is None else f"blended, {origin.blended * 100:.3g}% recomputed: "
    whence = f"{blended}from {printable(origin.name) or 'memory'}"
    if not origin.sealed_at:
        return f"{whence}, while it was being filled"
    rate = f" at {origin.gb_s:.2f} GB/s" if origin.gb_s else ""
    return f"{whence}{rate}, {ago(now - origin.sealed_at)}"
