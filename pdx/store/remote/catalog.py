"""What a node knows of a store that others use as well, what it is asking for, and what it is to remove there. No I/O.

What was found is known for some seconds, and what was not for a moment. Questions wait for a thread; one that is free
is given all that wait, as far as one call goes: of a store that is far away many learn as much as one.
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

THERE_S = 30.0  # what was found is taken to be there so long …
NOT_THERE_S = 1.0  # … and what was not, not to be
MAX_KNOWN = 1 << 17  # keys
MAX_SOUGHT = 1024  # questions that threads have, or that wait for one
MAX_LEAVING = 1 << 17  # keys that are to be removed
MAX_NAMES = 1024  # in one call


def name_of(key: bytes, shard: int) -> str:
    """Under which a chunk of one shard lies there."""
    return f"v3/{key.hex()}-{shard}"


class Question(msgspec.Struct, eq=False):
    """Whether these keys are there, up to the first that is not; the first `at` are."""

    moment: int  # see `Forgotten`
    since: float
    keys: Sequence[bytes]
    shards: int
    at: int = 0


class Known(msgspec.Struct, frozen=True, gc=False):
    """What was found under a key when so many shards were asked for; None: not all of them."""

    until: float
    shards: int
    held: Held | None
    why: str = ""  # nothing was found out, because the question failed


Asked = Sequence[tuple[Question, Sequence[bytes]]]  # by one call: of each question, some of its keys


class Catalog:
    """Owned by the control loop. Its tier notes keys that came or went, and how long questions take.

    Three things could bring back what was removed, and none does: a write that is under way is waited for, a copy
    that was admitted before writes it no more (`left_since`), and an answer to an earlier question does not count.
    """

    def __init__(self, tier: StoreTier, forgotten: Forgotten) -> None:
        """`forgotten`: what was removed, and when."""
        self.waiting: deque[Question] = deque()  # that no thread has
        self.seeking = 0  # questions
        self._tier = tier
        self._env = tier.env
        self._forgotten = forgotten
        self._to_remove: OrderedDict[bytes, int] = OrderedDict()  # in so many shards
        self._removing: dict[bytes, int] = {}  # that a thread removes
        self._writing: Counter[bytes] = Counter()  # by jobs under way
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._put: OrderedDict[bytes, int] = OrderedDict()  # what this node has stored there: a bit for each shard
        self._sought: dict[bytes, Question] = {}  # what is asked for
        self._failed = 0.0, ""  # what there is to say until then of keys that a question was about which failed

    # ---- what is known ----------------------------------------------------------------------

    def of(self, key: bytes, shards: int) -> Known | None:
        known = self._known.get(key)
        return known if known is not None and known.shards == shards and known.until >= self._env.clock() else None

    def holds(self, key: bytes, shards: int) -> bool:
        """Whether this node has stored or found it there, until it hears otherwise. What others remove, or the store by
        itself, it hears of when it asks the next time."""
        known = self._known.get(key)
        if known is not None and known.held is not None and shards in (0, known.shards):
            return True
        bits = self._put.get(key, 0)
        return bits > 0 and bits == (1 << (shards or bits.bit_length())) - 1

    def keys(self) -> list[bytes]:
        """All that `holds` may be true of."""
        return list(dict.fromkeys((*self._known, *self._put)))

    def know(self, key: bytes, shards: int, held: Held | None, why: str = "") -> None:
        """This was found, or nothing; `why`: nothing was found out."""
        self._sought.pop(key, None)
        if held is None and not why:
            self._put.pop(key, None)
        until = self._env.clock() + (NOT_THERE_S if held is None else THERE_S)
        self._add(self._known, key, Known(until, shards, held, why))

    def lost(self, key: bytes) -> None:
        if key in self._known:
            self.know(key, self._known[key].shards, None)

    def put(self, key: bytes, bits: int) -> None:
        """This node has stored these shards there; which others are there nobody knows."""
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
        """In how many shards this is known to be there; nothing is known of it any more. `is_gone`: nor is it there."""
        known, bits = self._known.pop(key, None), self._put.pop(key, 0) if is_gone else 0
        self._tier.note([key])
        return max(known.shards if known is not None and known.held is not None else 0, bits.bit_length())

    # ---- what is asked ----------------------------------------------------------------------

    def seeks(self, key: bytes) -> bool:
        """Whether this is being asked for."""
        return key in self._sought

    def asked_s(self, key: bytes) -> float:
        question = self._sought.get(key)
        return self._env.clock() - question.since if question is not None else 0.0

    def ask(self, keys: Sequence[bytes], shards: int) -> bool:
        """Have these asked for; whether there is room for the question."""
        if self.seeking >= MAX_SOUGHT or len(self._sought) >= MAX_KNOWN:
            return False
        self.seeking += 1
        question = Question(self._forgotten.moment(), self._env.clock(), list(keys), shards)
        self._sought.update(dict.fromkeys(keys, question))
        self.waiting.append(question)
        return True

    def next_call(self, batch: int, most: int) -> Asked:
        """What is asked next: of each question `batch` names at most, and `most` in all, or a question's share."""
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
        """What a call has found out; keys of which something is known now."""
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
        """These are there, up to the first that is not."""
        for key, held in zip(keys, found, strict=True):
            if held is None and key in self._put and self._sought.get(key) is not question:
                break  # it was stored, or asked for anew, since
            if held is not None and self.left_since(key, question.moment):
                break  # it is deleted
            self._env.counters["remote_misses" if held is None else "remote_hits"] += 1
            self.know(key, question.shards, held)
            if held is None:
                break

    def _end(self, question: Question, error: TierError | None = None) -> Sequence[bytes]:
        now = self._env.clock()
        self.seeking -= 1
        self._tier.answer_s += (now - question.since - self._tier.answer_s) / 4  # the last ones count more
        if error is not None and error.kind not in ("paused", "cancelled"):
            first = next((key for key in question.keys if key in self._sought), None)
            if first is not None:  # who waits for it would have it asked for at once again
                self._failed = now + NOT_THERE_S, f"did not say whether it has it: {error.kind}: {error}"
                self.know(first, question.shards, None, self._failed[1])
        for key in question.keys:
            if self._sought.get(key) is question:
                del self._sought[key]
        return question.keys

    def why_not(self, key: bytes) -> str:
        """Why a key may be there that is not known to be."""
        now, known = self._env.clock(), self._known.get(key)
        if key in self._sought:
            return "was asked, and had not answered yet"
        if known is not None and known.until >= now:
            return known.why
        until, why = self._failed
        if until >= now:
            return why
        return "was not asked, because too many questions wait for it" if self.seeking >= MAX_SOUGHT else ""

    # ---- what is removed --------------------------------------------------------------------

    @property
    def num_leaving(self) -> int:
        """How many are to be removed, until the store has said that they are."""
        return len(self._to_remove) + len(self._removing)

    def is_leaving(self, key: bytes) -> bool:
        """Whether this is one of them. For any thread."""
        return key in self._to_remove or key in self._removing

    def left_since(self, key: bytes, moment: int) -> bool:
        """Whether this is to be removed, or was after that moment."""
        return self.is_leaving(key) or self._forgotten.since(key, moment)

    def remove(self, key: bytes, shards: int) -> None:
        self._to_remove[key] = max(shards, self._to_remove.get(key, 0))
        self._forgotten.note(key)
        if len(self._to_remove) > MAX_LEAVING:
            self._env.counters["remote_not_removed"] += 1
            self._to_remove.popitem(last=False)

    def writes(self, key: bytes, change: int) -> None:
        """So many jobs more, or fewer, write this."""
        self._writing[key] += change
        if not self._writing[key]:
            del self._writing[key]

    def next_removed(self) -> list[str]:
        """The names that are removed next; none while others are being removed."""
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
        """What was taken is removed, or is to be taken again."""
        removing, self._removing = self._removing, {}
        for key, shards in removing.items():
            if is_done:
                self._env.counters["remote_removed"] += 1
                self._forgotten.note(key)
            else:
                self._to_remove[key] = max(shards, self._to_remove.get(key, 0))


def _held_in_all(of_shards: Sequence[Held | None]) -> Held | None:
    """What there is of a key, if all of its shards are alike."""
    return of_shards[0] if len(set(of_shards)) == 1 else None
