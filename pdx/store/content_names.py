"""Finds chunks by their own tokens, wherever in a prompt they were computed (ADR 80).

A chunk's key covers all tokens up to its end. Here the chunk has a second name, which covers its own tokens alone; by
that a prompt finds chunks whose prefix it does not share: of a conversation that was cut or reordered. A result is a
hint: whether a chunk is there, and in which tier, is looked up by its key as always. The names are neither stored nor
sent to other nodes: they are lost with this node, until requests ask for room again.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import xxhash

from pdx.wire.base import MAX_KEYS
from pdx.wire.moved import TOKEN_BYTES, Piece, PromptTokens

MAX_BYTES = 64 << 20  # of all records together
RECORD_BYTES = 1100  # of a record without its tokens, as measured
MAX_ALIKE = 8  # chunks of one name that are compared; the newest
MAX_BEHIND = 64  # successors of one chunk whose beginnings are compared; the newest
NAME_TOKENS = 256  # leading tokens that a name covers, so that it costs the same for chunks of any size
MAX_LOOKS = 1 << 13  # names computed and chunks followed per search: about 25 ms at worst
LOOK_TOKENS = 1 << 12  # comparing so many tokens costs as much as one look, and counts as one

_T = TypeVar("_T", bound=Hashable)


def _any(key: bytes) -> bool:
    return True


class _Record(NamedTuple):
    scope: bytes
    parent: bytes  # the key before it; for a prompt's first chunk the scope; empty: not known
    first: int  # position of its first token
    ids: bytes
    is_moved: bool


class ContentNames:
    """The table of names. Owned by the control loop; the cost of a call is proportional to its arguments."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._seed = int.from_bytes(os.urandom(8), "little")
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # in LRU order
        self._named: dict[int, dict[bytes, None]] = {}  # keys by name, the newest last
        self._behind: dict[bytes, dict[bytes, None]] = {}  # keys by the key before them, the newest last
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def register(self, tokens: PromptTokens, keys: Sequence[bytes], before: bytes) -> None:
        """Add the keys of the chunks with these tokens. `before`: the key before the first one."""
        width = tokens.chunk_tokens * TOKEN_BYTES
        parent = before if tokens.first else tokens.scope
        for at, key in enumerate(keys[: len(tokens.ids) // width]):
            if key in self._records:
                self._records.move_to_end(key)
            else:
                ids = tokens.ids[at * width : (at + 1) * width]
                first = tokens.first + at * tokens.chunk_tokens
                self._add(key, _Record(tokens.scope, parent, first, ids, tokens.is_moved))
            parent = key
        while self.nbytes > self._max_bytes:
            self.forget([next(iter(self._records))])

    def _add(self, key: bytes, record: _Record) -> None:
        self._records[key] = record
        self.nbytes += RECORD_BYTES + len(record.ids)
        self._named.setdefault(self.name(record.scope, record.ids), {})[key] = None
        self._behind.setdefault(record.parent, {})[key] = None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop these keys and their tokens."""
        for key in keys:
            record = self._records.pop(key, None)
            if record is not None:
                self.nbytes -= RECORD_BYTES + len(record.ids)
                _discard(self._named, self.name(record.scope, record.ids), key)
                _discard(self._behind, record.parent, key)

    def clear(self) -> None:
        self._records.clear()
        self._named.clear()
        self._behind.clear()
        self.nbytes = 0

    def find(
        self, scope: bytes, ids: bytes, chunk_tokens: int, is_there: Callable[[bytes], bool] = _any
    ) -> list[Piece]:
        """Pieces of known chunks that make up the prompt with these tokens, from its first token on and without a gap.

        The leading pieces belong to prompts with the same beginning and are exact. Without any of those the result is
        empty, whatever is known of later tokens. `is_there`: whether the chunk of a key is worth a lookup.
        """
        pieces = _Search(self, scope, ids, chunk_tokens, is_there).run()
        for piece in pieces:
            self._records.move_to_end(piece.key)
        return pieces[:MAX_KEYS]

    # ---- for a search -----------------------------------------------------------------------

    def name(self, scope: bytes, ids: bytes) -> int:
        """The name of these tokens. A match is not proof: the caller compares the scope and all tokens."""
        seed = self._seed ^ int.from_bytes(scope[:8], "little")
        return xxhash.xxh3_64_intdigest(ids[: NAME_TOKENS * TOKEN_BYTES], seed)

    def record(self, key: bytes) -> _Record | None:
        return self._records.get(key)

    def alike(self, scope: bytes, ids: bytes, first: int, count: int) -> tuple[list[bytes], int]:
        """Keys of chunks with exactly tokens [first, first + count) of `ids`, moved ones last, otherwise the newest
        first; and the number of tokens compared."""
        start = first * TOKEN_BYTES
        known = self._named.get(self.name(scope, ids[start : start + min(count, NAME_TOKENS) * TOKEN_BYTES]))
        if known is None:
            return [], 0
        tokens = ids[start : start + count * TOKEN_BYTES]
        of_scope = [(self._records[key], key) for key in islice(reversed(known), MAX_ALIKE)]
        found = [(record, key) for record, key in of_scope if record.scope == scope and record.ids == tokens]
        return [key for _, key in sorted(found, key=lambda each: each[0].is_moved)], len(of_scope) * count

    def behind(self, scope: bytes, key: bytes) -> Iterator[tuple[bytes, _Record]]:
        for each in islice(reversed(self._behind.get(key, {})), MAX_BEHIND):
            if (record := self._records[each]).scope == scope:
                yield each, record


class _Search:
    """One search. It ends with what it has found once its `MAX_LOOKS` are used up."""

    def __init__(
        self, names: ContentNames, scope: bytes, ids: bytes, chunk_tokens: int, is_there: Callable[[bytes], bool]
    ) -> None:
        self._names, self._scope, self._ids = names, scope, ids
        self._is_there = is_there
        self._size = chunk_tokens
        self._end = len(ids) // TOKEN_BYTES
        self._known: dict[int, list[bytes]] = {}  # position -> whole chunks with the tokens from there on
        self._looks = MAX_LOOKS

    def run(self) -> list[Piece]:
        pieces: list[Piece] = []
        at, last = 0, self._scope  # `last`: the whole chunk before `at`; empty: only a part of a chunk is before it
        while at < self._end and self._looks > 0:
            more = self._whole(at, last, is_first=not pieces) or self._beginning(at, last)
            if not more and pieces:
                more = self._jump(at)
            if not more:
                break
            pieces += more
            at += sum(piece.count for piece in more)
            last = more[-1].key if more[-1].count == self._size else b""
        return pieces

    def _tokens(self, first: int, end: int) -> bytes:
        return self._ids[first * TOKEN_BYTES : end * TOKEN_BYTES]

    def _piece(self, key: bytes, at: int, first: int, count: int) -> Piece:
        record = self._names.record(key)
        assert record is not None
        return Piece(key, first, count, at - record.first - first)

    def _chunks(self, at: int) -> list[bytes]:
        if at + self._size > self._end or self._looks <= 0:
            return []
        found = self._known.get(at)
        if found is None:
            self._looks -= 1
            alike, compared = self._names.alike(self._scope, self._ids, at, self._size)
            self._looks -= compared // LOOK_TOKENS
            found = self._known[at] = [key for key in alike if self._is_there(key)]
        return found

    def _next(self, at: int, last: bytes) -> bytes | None:
        """A chunk for the tokens at `at` whose predecessor is `last`."""
        self._looks -= 1
        return next((key for key in self._chunks(at) if self._parent(key) == last), None) if last else None

    def _parent(self, key: bytes) -> bytes:
        record = self._names.record(key)
        assert record is not None
        return record.parent

    def _whole(self, at: int, last: bytes, *, is_first: bool) -> list[Piece]:
        """A whole chunk: the successor of the last one, else any with the same tokens."""
        key = self._next(at, last)
        if key is None and not is_first:
            key = max(self._chunks(at), key=lambda each: self._reach(at, each), default=None)
        return [] if key is None else [self._piece(key, at, 0, self._size)]

    def _reach(self, at: int, key: bytes) -> int:
        """The position up to which successors of this chunk match the prompt."""
        at += self._size
        while self._looks > 0 and (more := self._next(at, key)) is not None:
            at, key = at + self._size, more
        return at

    def _beginning(self, at: int, last: bytes) -> list[Piece]:
        """The longest beginning of a successor of the last chunk that matches the prompt."""
        if not last:
            return []
        tokens = self._tokens(at, at + self._size)
        most, best = 0, b""
        for key, record in self._names.behind(self._scope, last):
            self._looks -= 1 + self._size // LOOK_TOKENS
            count = _common(record.ids, tokens, more_than=most)
            if count > most and self._is_there(key):
                most, best = count, key
        return [self._piece(best, at, 0, most)] if most else []

    def _jump(self, at: int) -> list[Piece]:
        """Jump into another prompt, or elsewhere into the same: to the next known whole chunk, with the end of its
        predecessor there to fill the gap. Of several, the one that reaches furthest."""
        best: tuple[int, int, bytes, bytes] | None = None
        for start in range(at + 1, min(at + self._size, self._end)):
            for key in self._chunks(start):
                before = self._parent(key)
                record = self._names.record(before)
                if record is None or record.scope != self._scope:
                    continue
                self._looks -= (start - at) // LOOK_TOKENS
                if not record.ids.endswith(self._tokens(at, start)):
                    continue
                if not self._is_there(before):
                    continue
                reach = self._reach(start, key)
                if best is None or reach > best[0]:
                    best = reach, start, key, before
        if best is None:
            return []
        _, start, key, before = best
        gap_tokens = start - at
        first = self._piece(before, at, self._size - gap_tokens, gap_tokens)
        return [first, self._piece(key, start, 0, self._size)]


def _common(one: bytes, other: bytes, *, more_than: int) -> int:
    """The number of leading tokens in common, if that is more than `more_than`."""
    low, high = more_than, min(len(one), len(other)) // TOKEN_BYTES
    if more_than and one[: more_than * TOKEN_BYTES] != other[: more_than * TOKEN_BYTES]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)  # everything before it is equal
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low


def _discard(table: dict[_T, dict[bytes, None]], name: _T, key: bytes) -> None:
    keys = table[name]
    del keys[key]
    if not keys:
        del table[name]
