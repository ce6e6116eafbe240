"""An index of which chunks are in which tiers of which nodes: maps a key to an integer with one bit per place that has
it.

A place is one tier of one node. The bits of a node are adjacent, so a few shifts tell which nodes have a chunk in any
tier. Few distinct sets of places occur, and equal integers are shared, so that an entry costs its key and its share of
a dictionary. There are 256 dictionaries, by the first byte of the key, because a dictionary that grows blocks the event
loop until it has been copied.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import msgspec

from pdx.memory.keys import KEY_BYTES

TIERS = 16  # told apart per node; any further tiers are counted as OTHERS
OTHERS = "others"
ANY = "any"  # in an answer: any tier of the node
MAX_SHARED = 1 << 16  # integers that are kept for sharing
MAX_LEAVING = 4  # pending sweeps of one dropped node, until which it may not start again
SWEEP_S = 0.003  # time budget of one sweep step


class _Node(msgspec.Struct):
    first_bit: int
    tiers: dict[str, int]  # place number of each tier, relative to the node's first
    has_all: bool = True  # False: something the node told was left out for lack of room


class ChunkIndex:
    """For one thread. `limit`: the number of keys it keeps; further keys are left out and counted."""

    def __init__(self, limit: int, counters: Counter[str]) -> None:
        self._limit = limit
        self._counters = counters
        self._places: list[dict[bytes, int]] = [{} for _ in range(256)]
        self._shared: dict[int, int] = {}
        self._nodes: dict[str, _Node] = {}
        self._names: dict[int, str] = {}  # node names by their first bit, until that is free again
        self._live = 0  # mask of the bits in use
        self._firsts = 0  # … and of the first bit of each node
        self._free: list[int] = []  # first bits that no entry contains any more
        self._dead: list[int] = []  # … and those of dropped nodes, until a sweep is over …
        self._sweeping: list[int] = []
        self._sweep_at = 0  # … which began with this dictionary
        self._num_firsts = 0
        self.num_keys = 0

    def __len__(self) -> int:
        return self.num_keys

    @property
    def is_complete(self) -> bool:
        """Whether the index has everything the nodes have told."""
        return all(node.has_all for node in self._nodes.values())

    @property
    def lacking(self) -> list[str]:
        """Nodes with keys left out, once half of the limit is free again. With a smaller margin, a few freed keys would
        make nodes tell everything again."""
        has_room = self.num_keys <= self._limit // 2
        return [name for name, node in self._nodes.items() if not node.has_all] if has_room else []

    # ---- what nodes tell --------------------------------------------------------------------

    def add(self, node: str, tier: str, keys: bytes) -> None:
        """Add consecutive keys of one tier."""
        bit = self._bit(node, tier)
        shared, places = self._shared, self._places
        if len(shared) > MAX_SHARED:
            shared.clear()
        bit = shared.setdefault(bit, bit)
        left_out = 0
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            of_byte = places[key[0]]
            old = of_byte.get(key)
            if old is None:
                if self.num_keys >= self._limit:
                    left_out += 1
                    continue
                of_byte[key] = bit
                self.num_keys += 1
            elif not old & bit:
                new = old & self._live | bit
                of_byte[key] = shared.setdefault(new, new)
        if left_out:
            self._counters["chunk_index_full"] += left_out
            self._nodes[node].has_all = False

    def remove(self, node: str, tier: str, keys: bytes) -> None:
        bit = self._bit(node, tier)
        others, shared = self._live & ~bit, self._shared
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            of_byte = self._places[key[0]]
            old = of_byte.get(key)
            if old is None or not old & bit:
                continue
            new = old & others
            if new:
                of_byte[key] = shared.setdefault(new, new)
            else:
                del of_byte[key]
                self.num_keys -= 1

    def drop(self, node: str) -> None:
        """Forget everything this node has told. Its bits are swept out later. Idempotent."""
        known = self._nodes.pop(node, None)
        if known is None:
            return
        self._live &= ~(((1 << TIERS) - 1) << known.first_bit)
        self._firsts &= ~(1 << known.first_bit)
        self._dead.append(known.first_bit)

    def may_begin(self, node: str) -> bool:
        """Whether a dropped node may start to tell its keys again. Otherwise a node that is dropped again and again
        would make all integers longer. Runs a step of `sweep` if it may not yet."""
        if self._num_leaving(node) >= MAX_LEAVING:
            self.sweep()
        return self._num_leaving(node) < MAX_LEAVING

    def _num_leaving(self, node: str) -> int:
        return sum(self._names[first] == node for first in (*self._dead, *self._sweeping))

    def _bit(self, node: str, tier: str) -> int:
        known = self._nodes.get(node)
        if known is None:
            first = self._free.pop() if self._free else self._num_firsts * TIERS
            self._num_firsts += first == self._num_firsts * TIERS
            known = self._nodes[node] = _Node(first, {})
            self._names[first] = node
            self._firsts |= 1 << first
        number = known.tiers.get(tier)
        if number is None:
            if len(known.tiers) >= TIERS - 1 and tier != OTHERS:
                return self._bit(node, OTHERS)
            number = known.tiers[tier] = len(known.tiers)
            self._live |= 1 << known.first_bit + number
        return 1 << known.first_bit + number

    def sweep(self) -> None:
        """Continue sweeping out the bits of dropped nodes for a few milliseconds; call it periodically."""
        if not self._sweeping:
            if not self._dead:
                return
            self._sweeping, self._dead, self._sweep_at = self._dead, [], 0
        until = time.perf_counter() + SWEEP_S
        mask = 0
        for first in self._sweeping:
            mask |= ((1 << TIERS) - 1) << first
        while self._sweep_at < len(self._places):
            of_byte, live = self._places[self._sweep_at], self._live
            touched = [(key, old & live) for key, old in of_byte.items() if old & mask]
            for key, new in touched:
                if new:
                    of_byte[key] = self._shared.setdefault(new, new)
                else:
                    del of_byte[key]
                    self.num_keys -= 1
            self._sweep_at += 1
            if time.perf_counter() > until:
                break
        if self._sweep_at == len(self._places):
            for first in self._sweeping:
                del self._names[first]
            self._free += self._sweeping
            self._sweeping = []

    # ---- what is asked ----------------------------------------------------------------------

    def has(self, node: str, key: bytes) -> bool:
        """Whether any tier of the node has the key."""
        known = self._nodes.get(node)
        return known is not None and bool(self._places[key[0]].get(key, 0) >> known.first_bit & (1 << TIERS) - 1)

    def is_known(self, key: bytes) -> bool:
        """Whether any node has the key, or had it recently."""
        return key in self._places[key[0]]

    def lookup(self, keys: Iterable[bytes]) -> dict[str, dict[str, int]]:
        """For each node that has the first of these keys: the number of leading keys in each of its tiers, and (ANY) in
        the union of its tiers."""
        alive, nodes = self._live, self._firsts
        if not nodes:
            return {}
        ends: list[tuple[int, int]] = []  # pairs of a leading count and the places that have it
        node_ends: list[tuple[int, int]] = []
        before = -1
        count = 0
        for key in keys:
            found = self._places[key[0]].get(key, 0)
            if found != before:
                before = found
                if lost := alive & ~found:
                    ends.append((count, lost))
                    alive ^= lost
                found |= found >> 8
                found |= found >> 4
                found |= found >> 2
                found |= found >> 1
                if lost := nodes & ~found:
                    node_ends.append((count, lost))
                    nodes ^= lost
                    if not nodes:
                        break
            count += 1
        ends.append((count, alive))
        node_ends.append((count, nodes))
        answer: dict[str, dict[str, int]] = {}
        for length, bits in node_ends:
            for at in _bits(bits) if length else ():
                answer[self._names[at]] = {ANY: length}
        leading = {at: length for length, bits in ends if length for at in _bits(bits)}
        for name, of_node in answer.items():
            node = self._nodes[name]
            for tier, number in node.tiers.items():
                if leads := leading.get(node.first_bit + number):
                    of_node[tier] = leads
        return answer


def _bits(number: int) -> list[int]:
    digits = bin(number)[:1:-1]  # lowest bit first
    found = []
    at = digits.find("1")
    while at >= 0:
        found.append(at)
        at = digits.find("1", at + 1)
    return found
