"""What is to be removed from a remote store, until the store has said that it is."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from pdx.store.store_tier import Forgotten
from pdx.telemetry.env import Env

MAX_WAITING = 1 << 17  # keys
MAX_NAMES = 1024  # in one call


class Removals:
    """Keys that are to be removed, or were a while ago. Owned by the control loop; threads may ask `in`.

    Three things could bring back what was removed, and none does: a write that is under way is waited for, a copy
    that was admitted before writes it no more (`since`), and an answer to an earlier question does not count (`since`).
    """

    def __init__(self, env: Env, forgotten: Forgotten) -> None:
        self._counters = env.counters
        self.forgotten = forgotten  # what was removed, and when
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # in so many shards
        self._removing: dict[bytes, int] = {}  # that a thread removes
        self._writing: Counter[bytes] = Counter()  # by jobs under way

    def __contains__(self, key: object) -> bool:
        return key in self._waiting or key in self._removing

    def __len__(self) -> int:
        return len(self._waiting) + len(self._removing)

    def since(self, key: bytes, moment: int) -> bool:
        """Whether this is to be removed, or was after that moment."""
        return key in self or self.forgotten.since(key, moment)

    def add(self, key: bytes, shards: int) -> None:
        """This is to be removed, in so many shards."""
        self._waiting[key] = max(shards, self._waiting.get(key, 0))
        self.forgotten.note(key)
        if len(self._waiting) > MAX_WAITING:
            self._counters["remote_not_removed"] += 1
            self._waiting.popitem(last=False)

    def writes(self, key: bytes, change: int) -> None:
        """So many jobs more, or fewer, write this."""
        self._writing[key] += change
        if not self._writing[key]:
            del self._writing[key]

    def take(self, name: Callable[[bytes, int], str]) -> list[str]:
        """The names that are removed next; none while others are being removed."""
        names: list[str] = []
        if self._removing:
            return names
        for key, shards in self._waiting.items():
            if len(names) >= MAX_NAMES:
                break
            if key not in self._writing:
                self._removing[key] = shards
                names += [name(key, shard) for shard in range(shards)]
        for key in self._removing:
            del self._waiting[key]
        return names

    def over(self, *, is_done: bool) -> None:
        """What was taken is removed, or is to be taken again."""
        removing, self._removing = self._removing, {}
        for key, shards in removing.items():
            if is_done:
                self._counters["remote_removed"] += 1
                self.forgotten.note(key)
            else:
                self._waiting[key] = max(shards, self._waiting.get(key, 0))
