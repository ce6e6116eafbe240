"""What one tier is to do: its copies, those with a job to give in their order, and how much is under way."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from functools import partial

import msgspec

from pdx.store.copy import Copy, CopyState, Priority, size_class
from pdx.store.deadlines import Deadlines

OVERTAKEN = 4  # times its own bytes may overtake a load
AHEAD_S = 0.05  # of loads a tier is given what it loads in this time, or `Tier.loads_at_once` if that is more


class CopyQueue(msgspec.Struct):
    """The copies of one tier by number, and the ranks of those with a job to give, in their order."""

    copies: dict[int, Copy] = {}
    ranks: dict[int, tuple[int, int, int]] = {}  # by number, of the copies in these two
    due: list[tuple[int, int, int]] = []  # of copies to the tier: sorted (priority, bytes to be filled, number) …
    due_loads: list[tuple[int, int, int]] = []  # … and of loads: sorted (priority, `Copy.size_class`, number)
    in_flight: int = 0  # bytes given and not over
    loads: int = 0  # of these, jobs that load …
    load_bytes: int = 0  # … and their bytes
    loaded_ns: int = 0  # when the last bytes came from there
    wants: int = 0  # copies that a peer asked for …
    wanted_bytes: int = 0  # … and what they hold
    stored_bytes: int = 0  # held by copies that nobody waits for
    # bytes of loads not given yet, by priority and size class
    to_load: Counter[tuple[int, int]] = msgspec.field(default_factory=Counter)
    submitted: Counter[int] = msgspec.field(default_factory=Counter)  # bytes of all loads so far, by priority …
    # … and at how many of these a load is overtaken no more
    turns: defaultdict[int, Deadlines[int]] = msgspec.field(default_factory=partial(defaultdict, Deadlines))

    def add(self, copy: Copy) -> list[Copy]:
        """A copy more; of loads those that go first from now on, because enough has overtaken them."""
        self.copies[copy.number] = copy
        self.count(copy, copy.held_bytes)
        self.wants += bool(copy.want)
        if not copy.is_load:
            return []
        priority, nbytes = copy.priority, copy.held_bytes
        self.to_load[priority, copy.size_class] += nbytes
        self.turns[priority].add([copy.number], self.submitted[priority] + OVERTAKEN * nbytes)
        self.submitted[priority] += nbytes
        first: list[Copy] = []
        for number in self.turns[priority].take(self.submitted[priority]):
            older = self.copies.get(number)
            if older is not None and not older.is_given_up:
                left = older.held_bytes - older.given_bytes
                self.to_load[priority, older.size_class] -= left
                older.size_class = 0
                self.to_load[priority, 0] += left
                first.append(older)
        return first

    def remove(self, copy: Copy) -> None:
        """It is over."""
        del self.copies[copy.number]
        self.count(copy, -copy.held_bytes)
        self.wants -= bool(copy.want)

    def count(self, copy: Copy, nbytes: int) -> None:
        """A copy holds so many bytes more, or fewer."""
        if copy.want:
            self.wanted_bytes += nbytes
        elif copy.priority >= Priority.STORE:
            self.stored_bytes += nbytes

    def bytes_before(self, nbytes: int) -> int:
        """Bytes of the loads that come before a load of `nbytes` that a request waits for."""
        own = Priority.AWAITED, size_class(nbytes)
        return self.load_bytes + sum(left for turn, left in self.to_load.items() if turn <= own)

    def has_room(self, copy: Copy) -> bool:
        """Whether the tier of this copy, which goes next, may be given another job."""
        tier, limit = copy.tier, copy.tier.max_inflight_bytes
        if copy.priority >= Priority.STORE:
            limit = max(1, limit // 2)  # the other half is for what somebody waits for
        if copy.is_load and self.loads >= tier.loads_at_once:
            limit = min(limit, self.in_flight - self.load_bytes + int(AHEAD_S * 1e9 * tier.load_rate.gb_s))
        return tier.is_ready and self.in_flight < limit

    def rank(self, copy: Copy, group_bytes: int) -> bool:
        """Put a copy where it belongs among those that have a job to give; whether it has one."""
        due = self.due_loads if copy.is_load else self.due
        if (was := self.ranks.pop(copy.number, None)) is not None:
            del due[bisect.bisect_left(due, was)]
        if copy.state is not CopyState.RUNNING or not copy.is_due(group_bytes):
            return False
        rank = (copy.priority, copy.size_class if copy.is_load else copy.unfilled_bytes, copy.number)
        bisect.insort(due, rank)
        self.ranks[copy.number] = rank
        return True
