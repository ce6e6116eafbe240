"""What a node knows about a shared store: known keys, pending questions, and pending removals. No I/O.

A found key is trusted for some seconds, a missing one for a moment. Questions wait for a thread; a free thread takes
all that wait, as far as one call goes, because a round trip to a distant store takes as long for many as for one.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pdx.errors import TierError
from pdx.store.store_tier import Forgotten, StoreTier
from pdx.store.tier import Held

THERE_S = 30.0  # how long a found key counts as there …
NOT_THERE_S = 1.0  # … and a missing one as missing
MAX_KNOWN = 1 << 17  # keys
MAX_SOUGHT = 1024  # pending questions
MAX_LEAVING = 1 << 17  # keys waiting to be removed
MAX_NAMES = 1024  # removed per call


def name_of(key: bytes, shard: int) -> str:
    """The object name of a chunk of one shard."""
    return f"v3/{key.hex()}-{shard}"


class Question(msgspec.Struct, eq=False):
    """The question whether these keys are there, up to the first that is not; the first `at` are known to be."""

    moment: int  # see `Forgotten`
    since: float
    keys: Sequence[bytes]
    shards: int
    at: int = 0


class Known(msgspec.Struct, frozen=True, gc=False):
    """The answer for a key when so many shards were asked for; `held` is None if not all are there."""

    until: float
    shards: int
    held: Held | None
    why: str = ""  # why the question failed, so that nothing is known


Asked = Sequence[tuple[Question, Sequence[bytes]]]  # of one call: questions, with some of the keys of each


class Catalog:
    """A node's view of the store. Owned by the control loop. It reports to its tier which keys came or went, and how
    long questions take.

    Removed keys do not come back: a removal waits for writes in flight, copies admitted before it do not write the key
    any more (`left_since`), and answers to earlier questions are ignored.
    """

    def __init__(self, tier: StoreTier, forgotten: Forgotten) -> None:
        """`forgotten`: which keys were removed, and when."""
        self.waiting: deque[Question] = deque()  # questions without a thread
        self.seeking = 0  # pending questions
        self._tier = tier
        self._env = tier.env
        self._forgotten = forgotten
        self._to_remove: OrderedDict[bytes, int] = OrderedDict()  # key -> shards
        self._removing: dict[bytes, int] = {}  # the same, being removed by a thread
        self._writing: Counter[bytes] = Counter()  # key -> jobs in flight that write it
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._put: OrderedDict[bytes, int] = OrderedDict()  # key -> shards that this node has stored, as bits
        self._sought: dict[bytes, Question] = {}  # key -> its pending question
        self._failed = 0.0, ""  # until when, and how, to explain misses by the last failed question

    # ---- known keys -------------------------------------------------------------------------

    def of(self, key: bytes, shards: int) -> Known | None:
        known = self._known.get(key)
        return known if known is not None and known.shards == shards and known.until >= self._env.clock() else None

    def holds(self, key: bytes, shards: int) -> bool:
        """Whether this node has stored or found the key there, as far as it knows. It learns of removals by other
        nodes, or the store itself, only when it asks again."""
        known = self._known.get(key)
        if known is not None and known.held is not None and shards in (0, known.shards):
            return True
        bits = self._put.get(key, 0)
        return bits > 0 and bits == (1 << (shards or bits.bit_length())) - 1

    def keys(self) -> list[bytes]:
        """All keys for which `holds` may be true."""
        return list(dict.fromkeys((*self._known, *self._put)))

    def know(self, key: bytes, shards: int, held: Held | None, why: str = "") -> None:
        """Record an answer. `why`: the question failed, and nothing is known."""
        self._sought.pop(key, None)
        if held is None and not why:
            self._put.pop(key, None)
        until = self._env.clock() + (NOT_THERE_S if held is None else THERE_S)
        self._add(self._known, key, Known(until, shards, held, why))

    def lost(self, key: bytes) -> None:
        if key in self._known:
            self.know(key, self._known[key].shards, None)

    def put(self, key: bytes, bits: int) -> None:
        """This node has stored these shards; whether others are there is not known."""
        self._known.pop(key, None)
        self._sought.pop(key, None)
        self._add(self._put, key, self._put.get(key, 0) | bits)

    def _add(self, table: OrderedDict[bytes, Any], key: bytes, value: object) -> None:
        table[key] = value
        table.move_to_end(key)
        self._tier.note([key])
        if len(table) > MAX_KNOWN:
            self._tier.note([table.popitem(last=False)[0]])

    def forget(self, key: bytes, *, is_gone: bool = True) -> int:
        """Drop what is known of a key; return in how many shards it was known to be there. `is_gone`: it is not there
        any more."""
        known, bits = self._known.pop(key, None), self._put.pop(key, 0) if is_gone else 0
        self._tier.note([key])
        return max(known.shards if known is not None and known.held is not None else 0, bits.bit_length())

    # ---- questions --------------------------------------------------------------------------

    def seeks(self, key: bytes) -> bool:
        """Whether a question about the key is pending."""
        return key in self._sought

    def asked_s(self, key: bytes) -> float:
        question = self._sought.get(key)
        return self._env.clock() - question.since if question is not None else 0.0

    def ask(self, keys: Sequence[bytes], shards: int) -> bool:
        """Enqueue a question about these keys; return whether there is room for it."""
        if self.seeking >= MAX_SOUGHT or len(self._sought) >= MAX_KNOWN:
            return False
        self.seeking += 1
        question = Question(self._forgotten.moment(), self._env.clock(), list(keys), shards)
        self._sought.update(dict.fromkeys(keys, question))
        self.waiting.append(question)
        return True

    def next_call(self, batch: int, most: int) -> Asked:
        """Take what to ask next: at most `batch` names per question, fewer if many wait, and about `most` in all."""
        each = min(batch, most // len(self.waiting))
        asked: list[tuple[Question, Sequence[bytes]]] = []
        count = 0
        while self.waiting and count < most:
            question = self.waiting.popleft()
            keys = question.keys[question.at : question.at + max(1, each // question.shards)]
            asked.append((question, keys))
            count += len(keys) * question.shards
        return asked

    def answered(self, asked: Asked, sizes: Iterator[Held | None], error: TierError | None) -> list[bytes]:
        """Take the answer, or error, of a call; return the keys of which something is known now."""
        told: list[bytes] = []
        again: list[Question] = []
        for question, keys in asked:
            if error is not None:
                told += self._end(question, error)
                continue
            found = [_held_in_all(list(itertools.islice(sizes, question.shards))) for _ in keys]
            self._learn(question, keys, found)
            told += keys
            question.at += len(keys)
            if None in found or question.at >= len(question.keys):
                told += self._end(question)
            else:
                again.append(question)
        self.waiting.extendleft(reversed(again))
        return told

    def _learn(self, question: Question, keys: Sequence[bytes], found: Sequence[Held | None]) -> None:
        """Record these answers, up to the first key that is not there."""
        for key, held in zip(keys, found, strict=True):
            if held is None and key in self._put and self._sought.get(key) is not question:
                break  # stored or asked for again since
            if held is not None and self.left_since(key, question.moment):
                break  # deleted since
            self._env.counters["remote_misses" if held is None else "remote_hits"] += 1
            self.know(key, question.shards, held)
            if held is None:
                break

    def _end(self, question: Question, error: TierError | None = None) -> Sequence[bytes]:
        now = self._env.clock()
        self.seeking -= 1
        self._tier.answer_s += (now - question.since - self._tier.answer_s) / 4  # moving average
        if error is not None and error.kind not in ("paused", "cancelled"):
            first = next((key for key in question.keys if key in self._sought), None)
            if first is not None:  # or a waiting request would ask again at once
                self._failed = now + NOT_THERE_S, f"did not say whether it has it: {error.kind}: {error}"
                self.know(first, question.shards, None, self._failed[1])
        for key in question.keys:
            if self._sought.get(key) is question:
                del self._sought[key]
        return question.keys

    def why_not(self, key: bytes) -> str:
        """Why a key may be there although it is not known to be."""
        now, known = self._env.clock(), self._known.get(key)
        if key in self._sought:
            return "was asked, and had not answered yet"
        if known is not None and known.until >= now:
            return known.why
        until, why = self._failed
        if until >= now:
            return why
        return "was not asked, because too many questions wait for it" if self.seeking >= MAX_SOUGHT else ""

    # ---- removals ---------------------------------------------------------------------------

    @property
    def num_leaving(self) -> int:
        """Number of keys whose removal the store has not confirmed yet."""
        return len(self._to_remove) + len(self._removing)

    def is_leaving(self, key: bytes) -> bool:
        """Whether the key's removal is pending. Thread-safe."""
        return key in self._to_remove or key in self._removing

    def left_since(self, key: bytes, moment: int) -> bool:
        """Whether the key's removal is pending, or was done after that moment."""
        return self.is_leaving(key) or self._forgotten.since(key, moment)

    def remove(self, key: bytes, shards: int) -> None:
        self._to_remove[key] = max(shards, self._to_remove.get(key, 0))
        self._forgotten.note(key)
        if len(self._to_remove) > MAX_LEAVING:
            self._env.counters["remote_not_removed"] += 1
            self._to_remove.popitem(last=False)

    def writes(self, key: bytes, change: int) -> None:
        """Count a change in the number of jobs that write the key."""
        self._writing[key] += change
        if not self._writing[key]:
            del self._writing[key]

    def next_removed(self) -> list[str]:
        """Take the names to remove next; none while others are being removed."""
        names: list[str] = []
        if self._removing:
            return names
        for key, shards in self._to_remove.items():
            if len(names) >= MAX_NAMES:
                break
            if key not in self._writing:
                self._removing[key] = shards
                names += [name_of(key, shard) for shard in range(shards)]
        for key in self._removing:
            del self._to_remove[key]
        return names

    def removed(self, *, is_done: bool) -> None:
        """The names taken are removed, or else must be taken again."""
        removing, self._removing = self._removing, {}
        for key, shards in removing.items():
            if is_done:
                self._env.counters["remote_removed"] += 1
                self._forgotten.note(key)
            else:
                self._to_remove[key] = max(shards, self._to_remove.get(key, 0))


def _held_in_all(of_shards: Sequence[Held | None]) -> Held | None:
    """The size of a key's chunks, if all its shards are there and alike."""
    return of_shards[0] if len(set(of_shards)) == 1 else None
