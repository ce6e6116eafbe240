"""What has something in common: chunks of one writer, questions to one peer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Member = TypeVar("Member", bound=Hashable)


class Groups(Generic[Key, Member]):
    """Members by what they have in common, in the order in which they came. A group is dropped with its last member.
    Each call costs what it changes or returns."""

    def __init__(self) -> None:
        self._groups: dict[Key, dict[Member, None]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, key: Key, members: Iterable[Member]) -> None:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = {}
        group.update(dict.fromkeys(members))

    def discard(self, key: Key, member: Member) -> None:
        """Idempotent."""
        group = self._groups.get(key)
        if group is not None:
            group.pop(member, None)
            if not group:
                del self._groups[key]

    def of(self, key: Key) -> list[Member]:
        return list(self._groups.get(key, ()))

    def count(self, key: Key) -> int:
        return len(self._groups.get(key, ()))

    def sizes(self) -> Iterator[tuple[Key, Member, int]]:
        """Of each group its first member, and how many it has."""
        for key, group in self._groups.items():
            yield key, next(iter(group)), len(group)
