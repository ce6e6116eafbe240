"""In which order chunks of a tier leave it: least recently used first, and last what requests that wait will use.

Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024,
section 3.3.2: of what the queue wants, what its last request wants goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from sortedcontainers import SortedList

T = TypeVar("T")
_Turn = tuple[int, int, bytes]  # the first request that wants a key, where in its prompt, and the key


class LeavingOrder(Generic[T]):
    """Chunks by key, each with what a tier knows of it. Owned by the control loop; each call costs what it names, and a
    search in a sorted list for each key that is wanted."""

    def __init__(self, wants: Callable[[bytes], Mapping[int, int] | None]) -> None:
        """`wants`: of a key, where in its prompt each request that waits has it, the first in the queue first; where
        that changes, `refresh` is called."""
        self._wants = wants
        self._used: OrderedDict[bytes, T] = OrderedDict()  # the last used is at the end …
        self._wanted: dict[bytes, T] = {}  # … and those that the queue wants …
        self._turns: SortedList[_Turn] = SortedList()  # … in its order
        self._turn_of: dict[bytes, _Turn] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._used or key in self._wanted

    def __len__(self) -> int:
        return len(self._used) + len(self._wanted)

    def get(self, key: bytes) -> T | None:
        found = self._used.get(key)
        return found if found is not None else self._wanted.get(key)

    def keys(self) -> list[bytes]:
        """All of them, in no order: a walk through a million by their order would stop the control loop."""
        return [*dict.keys(self._used), *self._wanted]

    def last(self) -> Iterator[T]:
        """All of them, those that would leave last first. Nothing may change meanwhile."""
        yield from (self._wanted[key] for _, _, key in self._turns)
        yield from reversed(self._used.values())

    def set(self, key: bytes, value: T, *, is_oldest: bool = False) -> None:
        """What is known of a chunk; one that is new counts as used now, or as not used for longest."""
        if key in self._used:
            self._used[key] = value
        elif key in self._wanted:
            self._wanted[key] = value
        else:
            self._add(key, value, is_oldest=is_oldest)

    def _add(self, key: bytes, value: T, *, is_oldest: bool = False) -> None:
        if requests := self._wants(key):
            number, place = next(iter(requests.items()))
            self._wanted[key] = value
            self._turn_of[key] = number, place, key
            self._turns.add(self._turn_of[key])
            return
        self._used[key] = value
        if is_oldest:
            self._used.move_to_end(key, last=False)

    def pop(self, key: bytes) -> T | None:
        if key in self._turn_of:
            self._turns.remove(self._turn_of.pop(key))
            return self._wanted.pop(key)
        return self._used.pop(key, None)

    def touch(self, key: bytes) -> None:
        """It is used now."""
        if key in self._used:
            self._used.move_to_end(key)

    def refresh(self, keys: Iterable[bytes]) -> None:
        """What the queue wants of these has changed; what it wants no more was used now."""
        for key in keys:
            if (value := self.pop(key)) is not None:
                self._add(key, value)

    def leaving(self, instead: bytes | None = None) -> Iterator[tuple[bytes, T]]:
        """Those that should leave, the first one first. `instead`: a chunk that would come in their place: if it is
        wanted itself, then not for those that are wanted sooner. Nothing may change meanwhile."""
        yield from self._used.items()
        requests = self._wants(instead) if instead is not None else None
        first = next(iter(requests.items())) if requests else (0, 0)
        later = self._turns.irange((*first, b""), None, reverse=True)
        yield from ((key, self._wanted[key]) for _, _, key in later)
