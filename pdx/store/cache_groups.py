"""Prompts with several cache groups: which length can be restored, what to wait for, and room for the rest.

The keys of all groups are one list, group after group, with the same number of keys each; the rules are in
`pdx.memory.rules`. Each call looks up each of its keys at most a few times.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from pdx.errors import ArenaTooSmall, ProtocolError
from pdx.memory.arena import round_up
from pdx.memory.rules import lengths, needed
from pdx.memory.slot import Slot
from pdx.store.chunk import Chunk, Claim, Wanted
from pdx.store.store import Store


class Goal(msgspec.Struct, frozen=True):
    """What a prompt waits for: `keys` after the first `hits`, which are in memory already.

    With several cache groups, one length of the prompt needs all of `keys`; `worth` is the number of the prompt's
    chunks that need not be computed, per chunk that is loaded.
    """

    keys: Sequence[bytes]
    hits: int
    worth: float = 1.0


def restorable(store: Store, wanted: Wanted, *, also_filling: bool = False) -> tuple[int, list[tuple[Chunk, ...]]]:
    """The number of a prompt's leading chunks that memory can restore, and the chunks for that, group after group."""
    shards, arenas, count = wanted.shards, wanted.arenas, len(wanted.keys) // len(wanted.rules)
    there: dict[int, tuple[Chunk, ...]] = {}

    def is_there(at: int) -> bool:
        key = wanted.keys[at]
        if also_filling:
            chunks = tuple(store.index.known(key, shards, arenas) or ())
        else:
            chunks = next(iter(store.find([key], shards, arenas)), ())
        there[at] = chunks
        return bool(chunks)

    length = _longest(wanted, is_there)[0]
    return length, [there[at] for at in needed(wanted.rules, count, length, has_tail=wanted.has_tail)]


def _longest(wanted: Wanted, is_there: Callable[[int], bool]) -> tuple[int, int]:
    """The number of leading chunks that can be restored, given which keys are there, by index; and the number if all
    chunks of the groups that do not need all of theirs were there. Chunks after that are not looked up."""
    rules, count = wanted.rules, len(wanted.keys) // len(wanted.rules)
    end, full = count, {group for group, rule in enumerate(rules) if rule.reach >= count and not rule.period}
    for group in sorted(full):
        end = sum(1 for _ in itertools.takewhile(is_there, range(group * count, group * count + end)))
    of_group = lambda group, chunk: group in full or is_there(group * count + chunk)  # noqa: E731
    return next(lengths(rules, of_group, end, has_tail=wanted.has_tail and end == count), 0), end


def whole(wanted: Wanted) -> Wanted:
    """The keys that the whole prompt needs; with one cache group, `wanted` as it is."""
    if not wanted.rules:
        return wanted
    count = len(wanted.keys) // len(wanted.rules)
    keys = [wanted.keys[at] for at in needed(wanted.rules, count, count, has_tail=wanted.has_tail)]
    return replace(wanted, keys=keys, rules=(), is_whole=True)


def goals(store: Store, wanted: Wanted, hits: int, may_come: Callable[[bytes], bool]) -> Iterator[Goal]:
    """Goals for the lengths worth waiting for, longest first and each above `hits` once: the whole prompt; the length
    up to which the groups that need all of their chunks have them here, or they `may_come`; and the length for which
    this holds in all groups.
    """
    rules, keys, shards, arenas = wanted.rules, wanted.keys, wanted.shards, wanted.arenas
    count = len(keys) // len(rules)

    def is_here(at: int) -> bool:
        return bool(store.find([keys[at]], shards, arenas))

    def goal(length: int) -> Goal:
        wants = [(keys[at], is_here(at)) for at in needed(rules, count, length, has_tail=wanted.has_tail)]
        present = [key for key, here in wants if here]
        missing = [key for key, here in wants if not here]
        if arenas:  # first chunks of other arenas, because they can be copied at once; the rest is in tiers below
            missing.sort(key=lambda key: store.index.anywhere(key, shards, arenas) is None)
        return Goal(present + missing, len(present), (length - hits) / max(1, len(missing)))

    if count <= hits:
        return
    yield goal(count)
    known, hoped = _longest(wanted, lambda at: is_here(at) or may_come(keys[at]))
    yield from (goal(length) for length in dict.fromkeys([hoped, known]) if hits < length < count)


def reserve(store: Store, claims: Sequence[Claim]) -> tuple[list[list[int]], list[list[Slot]], bool]:
    """Reserve room for the missing keys of several cache groups, like `Store.reserve` for one: for all of them or, with
    `partial`, up to one chunk of the prompt, which is the same for all groups.

    :returns: the granted indices per claim, their slots per claim, and whether room ran out.
    :raises ArenaTooSmall, ProtocolError: see `Store.reserve`.
    """
    if len({key for claim in claims for key in claim.keys}) != sum(len(claim.keys) for claim in claims):
        raise ProtocolError("a key stands twice in one reservation")
    # The prompt needs the chunks that are there, too: they must not be evicted for the rest.
    found = (chunk for claim in claims for key in claim.keys for chunk in store.index.of(key))
    kept = [chunk for chunk in found if not chunk.is_for_one]  # `unhold` would free those
    store.hold(kept)
    try:
        return _reserve(store, claims)
    finally:
        store.unhold(kept)


def _reserve(store: Store, claims: Sequence[Claim]) -> tuple[list[list[int]], list[list[Slot]], bool]:
    wanted = [store.missing(claim) for claim in claims]
    end = _fitting(store, claims, wanted)
    is_full = end < max((indices[-1] + 1 for indices in wanted if indices), default=0)
    store.counters["reserve_full"] += is_full
    if is_full and not claims[0].partial:
        return [[] for _ in claims], [[] for _ in claims], True
    slots, fits = _take(store, claims, wanted, end)
    if fits < end:  # enough bytes, but fragmented
        is_full, first = True, min(indices[0] for indices in wanted if indices)
        while fits <= first < end - 1 and claims[0].partial:  # not even the first fits: try half as many
            _cut(store, claims, slots, [0] * len(claims))
            end = (first + end + 1) // 2
            slots, fits = _take(store, claims, wanted, end)
        end = fits if claims[0].partial else 0
    _mark_passed(store, claims, wanted, end)
    granted = [[index for index in indices if index < end] for indices in wanted]
    slots = _cut(store, claims, slots, [len(indices) for indices in granted])
    for claim, indices, of_claim in zip(claims, granted, slots, strict=True):
        store.index.add(claim.chunks(indices, of_claim))
    return granted, slots, is_full


def _mark_passed(store: Store, claims: Sequence[Claim], wanted: Sequence[Sequence[int]], end: int) -> None:
    """Set which chunks of each claim its prompt passes, so that they are evicted first: those that are needed neither
    for the first `end` chunks, nor for one chunk less (the same prompt again: its last token is computed), nor for the
    leading chunks that other prompts have left in all groups that need all of theirs: there prompts diverge."""
    of_others = [
        indices[0] if indices else len(claim.keys)
        for claim, indices in zip(claims, wanted, strict=True)
        if claim.rule is not None and claim.rule.needs_all
    ]
    if not of_others:  # nothing shows where prompts diverge
        return
    parting = min(of_others)
    for claim in claims:
        if claim.rule is None or claim.rule.needs_all:
            continue
        before = claim.chunks_before
        shared = range(max(0, claim.rule.first(before + parting) - before), parting)
        store.refresh([chunk for at in shared for chunk in store.index.of(claim.keys[at])])
        claim.passed = {at for at in range(claim.rule.first(before + end - 1) - before) if at not in shared}


def _take(
    store: Store, claims: Sequence[Claim], wanted: Sequence[Sequence[int]], end: int
) -> tuple[list[list[Slot]], int]:
    """Slots per claim for the wanted chunks before `end`, and the chunk up to which all claims have theirs."""
    slots: list[list[Slot]] = [[] for _ in claims]
    fits = end
    for claim, of_claim, own in zip(claims, wanted, slots, strict=True):
        indices = [index for index in of_claim if index < fits]
        own += store.room(claim, claim.sizes(indices))
        count = len(own) // len(claim.writers)
        if count < len(indices):
            fits = indices[count]
    return slots, fits


def _cut(
    store: Store, claims: Sequence[Claim], slots: Sequence[Sequence[Slot]], counts: Sequence[int]
) -> list[list[Slot]]:
    """Keep the slots of the first `counts` chunks of each claim; give the others back."""
    kept = [list(of[: count * len(claim.writers)]) for claim, of, count in zip(claims, slots, counts, strict=True)]
    for of_claim, left in zip(slots, kept, strict=True):
        for slot in of_claim[len(left) :]:
            store.pools[slot.arena].give_back([slot])
    return kept


def _fitting(store: Store, claims: Sequence[Claim], wanted: Sequence[Sequence[int]]) -> int:
    """The chunk up to which the missing chunks of all groups fit, judged by available bytes alone.

    :raises ArenaTooSmall: see `Store.reserve`.
    """
    homes: dict[int, int] = Counter(claims[0].arenas or (0,) * len(claims[0].writers))
    of_index: Counter[int] = Counter()  # bytes per shard, over all groups
    for claim, indices in zip(claims, wanted, strict=True):
        for index, nbytes in zip(indices, claim.sizes(indices), strict=True):
            of_index[index] += round_up(nbytes)
    order = sorted(of_index)
    upto = list(itertools.accumulate(of_index[index] for index in order))
    end = order[-1] + 1 if order else 0
    for arena, shards in homes.items():
        pool = store.pools[arena]
        least = max(of_index.values(), default=0) if claims[0].partial else sum(of_index.values())
        if least * shards > pool.total_bytes:
            raise ArenaTooSmall(f"{least * shards} bytes do not fit into an arena of {pool.total_bytes} bytes")
        most = pool.available_bytes // shards
        end = min([end, *(index for index, nbytes in zip(order, upto, strict=True) if nbytes > most)])
    return end
