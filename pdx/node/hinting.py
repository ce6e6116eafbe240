"""Carries out the hints of requests and applications on the future of chunks, with a verdict on each field.

A field that asks for something is accepted, clipped (less is done than it asks for) or refused, with the reason in
words. A refused hint costs a request nothing but that hint. No sockets here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from pdx.errors import NodeError
from pdx.store.cache_groups import whole
from pdx.store.chunk import Chunk, Wanted
from pdx.store.hints import Demotions, Ends
from pdx.store.history import Cause
from pdx.store.lifecycle import State
from pdx.wire.hints import NO_HINTS, OWN, Hints, Verdict
from pdx.wire.messages import Admit
from pdx.wire.verbs import Advise, Advised

if TYPE_CHECKING:
    from pdx.node.control.places import Place
    from pdx.node.look_ahead import Of
    from pdx.node.service import Service

AGAIN_S = 1.0  # until a chunk is checked again that was being filled when its end came
Outcome = tuple[str, str, str]  # of one field: outcome, why, and the value it was clipped to


class Target(msgspec.Struct, frozen=True):
    """The chunks that hints are about; those of the keys `new` are written by this very request."""

    wanted: Wanted
    new: frozenset[bytes] = frozenset()
    is_request: bool = False  # a request asks for its chunks itself


class Hinting:
    """Carries hints out. Owned by the control loop.

    A tenant is the digest of a cache salt (`Hints.salt`). Chunks are found by their keys, which cover the salt, and
    sessions by their names, each within its tenant.
    """

    def __init__(self, service: Service) -> None:
        self._config = service.config
        self._store = service.store
        self._tiers = service.tiers
        self._look_ahead = service.look_ahead
        self._places = service.places
        self._names = service.names
        self._counters = service.counters
        self._clock = service.env.clock
        self.ends = Ends()
        self.demotions = Demotions(self._store, self._tiers, service.env, within_s=self._config.push_s)

    # ---- sources of hints -------------------------------------------------------------------

    def request(self, ask: Admit, granted: Sequence[int], arenas: Sequence[int], *, is_named: bool) -> list[Verdict]:
        """Carry out the hints of a request being answered; `granted` are indices into its keys. A verdict per field."""
        if not (ask.lease_s or ask.asks_room):
            return []  # it only looks up
        if self.demotions.keys:
            self.demotions.use(ask.needed_keys(ask.chunks))
        if self.ends.until and not ask.hints.ttl_s:
            self.ends.use(ask.needed_keys(ask.chunks))
        if ask.hints == NO_HINTS or not ask.hints.asks:
            return []
        new = {ask.keys[index] for index in granted if not self._tiers.has(ask.keys[index], ask.shards)}
        if ask.transfer is not None:  # those written by the other leg of the same request
            new |= {
                key
                for key in ask.keys
                if any(one.reservation.transfer == ask.transfer for one in self._store.index.of(key))
            }
        wanted = Wanted(ask.keys, ask.shards, arenas, is_named, rules=ask.groups, has_tail=ask.has_tail)
        return self._carry_out(ask.hints, Target(wanted, frozenset(new), is_request=True))

    def advise(self, ask: Advise, arenas: Sequence[int], *, is_named: bool) -> Advised:
        """Carry out an application's hints about these keys, or about those that a session's last request used."""
        hints = ask.hints
        if ask.keys:
            wanted: Wanted | None = Wanted(ask.keys, ask.shards, arenas, is_named)
        else:
            wanted = self._look_ahead.last((hints.salt, hints.session)) if hints.session else None
        self._counters["advised"] += 1
        if wanted is not None:
            return Advised(self._carry_out(hints, Target(wanted)))
        about = "no request of this session is known here" if hints.session else "neither keys nor a session are named"
        named = [field for field in ("prefetch", "demote") if any(getattr(hints, field))]
        found = [*self._of_sessions(hints, named, None)]
        known = {verdict.field for verdict in found}
        others = [name for name in hints.asks if name not in known]
        return Advised([*found, *(Verdict(name, "refused", about) for name in others)])

    # ---- field by field ---------------------------------------------------------------------

    def _carry_out(self, hints: Hints, target: Target) -> list[Verdict]:
        found = [*self._of_sessions(hints, ["prefetch"], target)]  # first: chunks being loaded can be leased
        if hints.reuse_s:
            found.append(_verdict("reuse_s", self._expect(hints, target)))
        if hints.priority:
            found.append(_verdict("priority", self._rank(hints, target)))
        if hints.ttl_s:
            found.append(_verdict("ttl_s", self._end(hints, target)))
        if hints.lease_s is not None:
            found.append(_verdict("lease_s", self._lease(hints, target)))
        found += self._of_sessions(hints, ["demote"], target)
        if hints.codec is not None:  # a request's engine answers this itself
            is_as_it_is = hints.codec == "none"
            text = "" if is_as_it_is else "a request asks for it, or pdx cache compress: its chunks have other keys"
            found.append(_verdict("codec", ("accepted" if is_as_it_is else "refused", text, "")))
        if hints.reuse is not None:  # likewise
            found.append(Verdict("reuse", "refused", "a request asks for it"))
        if hints.prefetch_to is not None:
            found.append(_verdict("prefetch_to", self._check(hints.prefetch_to)))
        if hints.session:
            found.append(Verdict("session", "accepted"))
        for verdict in found:
            if verdict.outcome != "accepted":
                self._counters[f"hints_{verdict.outcome}"] += 1
        return found

    def _runs(self, hints: Hints, wanted: Wanted) -> Iterator[list[Chunk]]:
        """The chunks of leading keys of which memory has every shard, filled or being filled, for this tenant alone.
        With several cache groups, all such chunks that the whole prompt needs."""
        wanted = whole(wanted)
        for key in wanted.keys:
            chunks = self._store.index.known(key, wanted.shards, wanted.arenas)
            if chunks is not None and all(chunk.hints.salt in (b"", hints.salt) for chunk in chunks):
                yield chunks
            elif not wanted.is_whole:  # else the next chunk does not depend on this one
                return

    def _all(self, hints: Hints, wanted: Wanted) -> list[Chunk]:
        return [chunk for chunks in self._runs(hints, wanted) for chunk in chunks]

    def _expect(self, hints: Hints, target: Target) -> Outcome:
        """Set when the chunks will be reused; of several times the next one counts."""
        if not self._store.pools[0].order.weighs_reuse:
            return "refused", "the policy of this node goes by age alone (--policy)", ""
        now = self._clock()
        chunks = self._all(hints, target.wanted)
        for chunk in chunks:
            known = chunk.keep.expected_at if chunk.keep.expected_at > now else math.inf
            at = min(known, now + hints.reuse_s)
            chunk.keep = msgspec.structs.replace(chunk.keep, expected_at=at)
        self._store.refresh(chunks)
        return ("accepted", "", "") if chunks else ("refused", "none of its chunks is in memory", "")

    def _rank(self, hints: Hints, target: Target) -> Outcome:
        if target.is_request:  # its own chunks have it already; chunks of other requests keep theirs
            return "accepted", "", ""
        chunks = self._all(hints, target.wanted)
        for chunk in chunks:
            chunk.hints = msgspec.structs.replace(chunk.hints, priority=hints.priority)
        self._store.refresh(chunks)
        return ("accepted", "", "") if chunks else ("refused", "none of its chunks is in memory", "")

    def _end(self, hints: Hints, target: Target) -> Outcome:
        wanted = target.wanted
        known = [key for key in wanted.keys if key not in target.new and self._store.index.of(key)]
        if not target.is_request:
            known = [chunks[0].key for chunks in self._runs(hints, wanted)]
        ended, others, excess = self.ends.set(target.new, known, self._clock() + hints.ttl_s)
        whys = ["requests that set no end have used them, too"] if others else []
        whys += ["too many chunks have an end"] if excess else []
        if not whys:
            return ("accepted", "", "") if ended else ("refused", "none of its chunks is here", "")
        stay = others + excess
        return "clipped" if ended else "refused", f"{stay} of {ended + stay} chunks stay: {'; '.join(whys)}", ""

    def _lease(self, hints: Hints, target: Target) -> Outcome:
        leases, wanted = self._store.tenant_leases, whole(target.wanted)
        if not hints.lease_s:
            count = leases.end(hints.salt, self._all(hints, wanted))
            return "accepted", "" if count else "there was none", ""
        runs = [*self._runs(hints, wanted)]
        seconds = min(hints.lease_s, self._config.lease_max_s, hints.ttl_s or math.inf)
        count = leases.lease(hints.salt, runs, self._clock() + seconds)
        if not runs:
            return "refused", "none of its chunks is in memory", ""
        if not count:
            text = "so much is leased, by this tenant (--tenant-lease-share) or with pins and others (--pin-share)"
            return "refused", text, ""
        whys = []
        if count < len(runs):
            whys.append(f"the first {count} of {len(wanted.keys)} chunks: more is above --tenant-lease-share")
        elif count < len(wanted.keys):
            whys.append(f"the first {count} of {len(wanted.keys)} chunks: the others are not in memory")
        if seconds < hints.lease_s:
            whys.append("its ttl_s ends then" if seconds == hints.ttl_s else "longer is above --lease-max-s")
        return ("clipped", "; ".join(whys), f"{seconds:g}") if whys else ("accepted", "", "")

    def _of_sessions(self, hints: Hints, fields: Sequence[str], target: Target | None) -> Iterator[Verdict]:
        """Carry out fields that name sessions, or (OWN) the target itself."""
        for field in fields:
            names: Sequence[str] = getattr(hints, field)
            told = [self._of_one(hints, field, name, target) for name in dict.fromkeys(names)]
            if not told:
                continue
            done = [outcome for outcome in told if outcome[0] == "accepted"]
            short = [outcome for outcome in told if outcome[0] != "accepted"]
            if not short:
                yield _verdict(field, told[0])
            else:
                outcome = "clipped" if done or any(each[0] == "clipped" for each in short) else "refused"
                yield _verdict(field, (outcome, "; ".join(dict.fromkeys(each[1] for each in short)), ""))

    def _of_one(self, hints: Hints, field: str, name: str, target: Target | None) -> Outcome:
        wanted = target.wanted if target is not None else None
        if name != OWN:
            wanted = self._look_ahead.last((hints.salt, name))
            if wanted is None:
                return "refused", f"no request of session {name!r} is known here", ""
        if wanted is None:
            return "refused", "neither keys nor a session are named", ""
        if field == "prefetch":
            is_asked = name == OWN and target is not None and target.is_request
            return ("accepted", "", "") if is_asked else self._prefetch(hints, name or hints.session, wanted)
        return self._demote(hints, name or hints.session, wanted)

    def _prefetch(self, hints: Hints, name: str, wanted: Wanted) -> Outcome:
        in_first = msgspec.structs.replace(wanted, arenas=())
        if not self._tiers.below and len([*self._runs(hints, in_first)]) < len(whole(wanted).keys):
            return "refused", "this node has no tier below memory to load from (--disk, --remote)", ""
        try:
            self.prefetch((hints.salt, name), wanted, self.memory_at(hints.prefetch_to or ""))
        except NodeError as error:
            return "refused", str(error), ""
        return "accepted", "", ""

    def _check(self, memory: str) -> Outcome:
        try:
            self._places.at(memory)
        except NodeError as error:
            return "refused", str(error), ""
        return "accepted", "", ""

    def memory_at(self, to: str) -> Place:
        """The arenas of that name; empty: the first arena. :raises NodeError: there are none."""
        place = self._places.at(to)
        if place.tier is not None:
            raise NodeError(f"{to} is no memory that chunks are prefetched into; move stores them there")
        return place

    def prefetch(self, session: Of, wanted: Wanted, place: Place) -> None:
        """Load these chunks into memory, as if a request for them were on its way.

        :raises NodeError: they cannot be loaded there.
        """
        arenas: Sequence[int] = () if place == self._places.first else wanted.arenas
        if place != self._places.first and not (arenas and all(arenas)):  # no engine has used it there
            self._places.check_homes(place, wanted.shards)
            arenas = self._places.homes(wanted.shards)
        if not self._look_ahead.prefetch(session, msgspec.structs.replace(wanted, arenas=arenas)):
            raise NodeError("too many requests are looked ahead for")

    def _demote(self, hints: Hints, name: str, wanted: Wanted) -> Outcome:
        if hints.lease_s:
            return "refused", "lease_s keeps the same chunks in memory", ""
        runs = [*self._runs(hints, wanted)]
        if not runs:
            return "refused", "none of its chunks is in memory", ""
        if not any(self._tiers.storing.below(chunk) for chunks in runs for chunk in chunks[:1]):
            return "refused", "there is no tier below that its chunks could leave memory for (--disk, --remote)", ""
        keys = [chunks[0].key for chunks in runs if not chunks[0].tail]
        unshared = self._look_ahead.unshared(keys, (hints.salt, name))
        shared = len(keys) - len(unshared)
        count = self.demotions.add(unshared, wanted.shards, wanted.arenas)
        if count == len(keys):
            return "accepted", "", ""
        text = f"the first {shared} of {len(keys)} chunks stay: other sessions use them, too" if shared else ""
        return "clipped" if count else "refused", text or f"only {count} of {len(keys)} chunks: too many leave now", ""

    # ---- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Delete chunks whose end has come, and carry on with demotions; call it a few times a second."""
        now = self._clock()
        if over := self.ends.take(now):
            filling = {key for key in over if any(one.state is State.FILLING for one in self._store.index.of(key))}
            self.ends.postpone(filling, now + AGAIN_S)
            gone = [key for key in over if key not in filling]
            self._names.forget(gone)
            self._counters["ttl_deleted"] += max(self._tiers.forget(gone), self._store.delete(gone, Cause.ENDED))
        self.demotions.tick()


def _verdict(field: str, outcome: Outcome) -> Verdict:
    said, text, value = outcome
    return Verdict(field, said, text[:256], value[:32])  # type: ignore[arg-type]
