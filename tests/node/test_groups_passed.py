"""What prompts of several cache groups pass: chunks of windows and states that the end of a prompt needs no more. They
leave first, from memory and from a disk, until a request finds them; so longer prompts, or more of them, can be found.

As vLLM has Gemma 3: five groups with a window beside one with full attention, all with as many layers. A window is of
two chunks.
"""

import contextlib
import hashlib

import pytest
from disk_bed import Bed, key
from groups_stage import GroupsStage, without_tail
from service_stage import CHUNKS, serving

from pdx.memory.arena import GRANULE_BYTES as G
from pdx.store.eviction import LEAST
from pdx.store.tier import Job, Part
from pdx.wire.messages import Admit, Group

FULL = Group(nbytes=G, layers=1)
WINDOW = Group(reach=2, nbytes=G, layers=1)
LENGTH = 8  # chunks of a prompt
GRANULES = LENGTH * (1 + 5)  # that it takes
PROMPTS = 8  # three where there is room for two


class Gemma(GroupsStage):
    """Prompts are words, of a chunk each."""

    def __init__(self, service, groups=(FULL, *[WINDOW] * 5)):
        super().__init__(service, without_tail(groups), 1)
        self.names = {}

    def keys_of(self, words):
        """Of each group, and what they are called: (group, words until there)."""
        found = []
        for group in range(len(self.groups)):
            for end in range(1, len(words) + 1):
                name = group, tuple(words[:end])
                found.append(hashlib.blake2b(repr(name).encode(), digest_size=16).digest())
                self.names[found[-1]] = name
        return found

    def asked(self, words, **fields):
        """Computed and saved behind what is found of it: how many chunks that was."""
        answer = self.ask_room(keys=self.keys_of(words), **fields)
        assert not answer.full
        self.fill(answer.granted_slots)
        self.release(answer)
        return answer.hits

    def ends(self, group):
        """(words, its level) of each chunk of a group that is here."""
        chunks = [chunk for one in self.service.store.index.slots for chunk in one.values()]
        return {self.names[each.key][1]: each.level for each in chunks if self.names[each.key][0] == group}

    def passed(self, group):
        return {words for words, level in self.ends(group).items() if level == LEAST}


@pytest.fixture
def gemma(place, clock):
    with serving(place, clock) as service:
        yield Gemma(service)


def words(name, count=LENGTH):
    return [f"{name} {at}" for at in range(count)]


def leading(prompt, *ends):
    return {tuple(prompt[:end]) for end in ends}


def test_what_the_end_of_a_prompt_does_not_need_is_worth_the_least(gemma):
    """The last two chunks do need it, and those that the same prompt needs again: its last token is computed."""
    prompt = words("a")
    gemma.asked(prompt)
    assert gemma.passed(0) == set()
    assert gemma.passed(1) == leading(prompt, *range(1, LENGTH - 2))


@pytest.mark.parametrize(
    ("group", "kept"),
    [(Group(reach=1, nbytes=G, layers=1), 2), (Group(period=3, nbytes=G, layers=1), 2), (FULL, LENGTH)],
    ids=["state", "local", "full"],
)
def test_each_kind_of_group_has_its_own_end(place, clock, group, kept):
    """Of a state the last one, and the one before it; of chunked local attention what the eighth or seventh has since
    the sixth."""
    with serving(place, clock) as service:
        gemma, prompt = Gemma(service, (FULL, group)), words("a")
        gemma.asked(prompt)
        assert set(gemma.ends(1)) - gemma.passed(1) == leading(prompt, *range(LENGTH - kept + 1, LENGTH + 1))


def test_without_full_attention_nobody_knows_where_prompts_part(place, clock):
    with serving(place, clock) as service:
        gemma = Gemma(service, (WINDOW, Group(reach=1, nbytes=G, layers=1)))
        gemma.asked(words("a"))
        assert not gemma.passed(0) | gemma.passed(1)


def test_who_asks_for_room_alone_passes_nothing(gemma):
    """As for chunks that were generated one by one, whose place in the prompt is not told."""
    gemma.asked(words("a"), lease_s=0.0, part="writes")
    assert not gemma.passed(1)


def test_where_not_all_has_room_the_end_is_that_of_what_has(gemma):
    """Of all eight chunks six are granted."""
    other = Admit([b"somebody else's!"], nbytes=(CHUNKS - 6 * 6) * G, layers=1, part="writes")
    hold = gemma.service.handle(gemma.engine, other)
    prompt = words("a")
    answer = gemma.ask_room(keys=gemma.keys_of(prompt), partial=True)
    gemma.fill(answer.granted_slots)
    gemma.release(answer)
    gemma.give_back(hold.granted_slots)
    assert set(gemma.ends(0)) == leading(prompt, *range(1, 7))
    assert gemma.passed(1) == leading(prompt, 1, 2, 3)


@pytest.mark.parametrize("has_tier", [False, True], ids=["memory", "beside a tier"])
def test_more_prompts_are_found_to_their_end(gemma, has_tier):
    """Conversations that take half as much again as there is; each goes on, and each is found. By the order of use
    alone there is room for five of eight, and what is computed takes the place of the next one: none is found."""
    tier = gemma.below() if has_tier else None
    assert PROMPTS * GRANULES == 1.5 * CHUNKS
    for at in range(PROMPTS):
        assert gemma.asked(words(at)) == 0
        if tier is not None:  # it stores all, and has nothing when it is asked
            gemma.settle(tier)
            tier.keys.clear()
    found = sum(gemma.asked([*words(at), "and", "on"]) for at in range(PROMPTS))
    assert found == PROMPTS * LENGTH


def test_where_prompts_part_is_learnt_while_the_first_is_being_computed(gemma):
    text = words("text")
    first, second = ([*text, *words(f"question {number}", 4)] for number in range(2))
    answers = [gemma.ask_room(keys=gemma.keys_of(each)) for each in (first, second)]
    assert [each.hits for each in answers] == [0, 0]
    for answer in answers:
        gemma.fill(answer.granted_slots)
        gemma.release(answer)
    assert not gemma.passed(1) & leading(text, LENGTH - 1, LENGTH)
    assert leading(text, 1, 2, LENGTH - 2) <= gemma.passed(1)


def test_a_request_that_finds_one_has_it_stay(gemma):
    prompt = words("a")
    gemma.asked(prompt)
    assert gemma.asked(prompt[:4]) == 4
    assert gemma.passed(1) == leading(prompt, 1, 2, 5)
    assert gemma.asked(prompt[:5]) == 5
    assert gemma.passed(1) == leading(prompt, 1, 2)


def test_what_is_pinned_or_wanted_by_a_queue_does_not_leave(gemma):
    prompt, store = words("a"), gemma.service.store
    gemma.asked(prompt)
    keys = gemma.keys_of(prompt)[LENGTH:]
    store.pin(keys[:1], 1, pinned=True)
    gemma.service.tiers.want(keys[1:2], 1)
    for at in range(20):
        gemma.asked(words(at))
    assert leading(prompt, 1, 2) == set(gemma.ends(1)) & leading(prompt, *range(LENGTH + 1))
    gemma.service.tiers.want_no_more(keys[1:2], 1)
    store.pin(keys[:1], 1, pinned=False)
    gemma.asked(words(20))
    assert tuple(prompt[:1]) not in gemma.ends(1)


def test_a_copy_is_no_use_of_them(gemma):
    """What is read for a tier, or a peer, stays where it is in the order."""
    gemma.asked(words("a"))
    store, passed = gemma.service.store, gemma.passed(1)
    chunks = list(store.index.slots[0].values())
    for is_use in (False, True):
        store.hold(chunks, is_use=is_use)
        store.unhold(chunks)
        assert gemma.passed(1) == passed


# ---- on a disk -----------------------------------------------------------------------------------


def test_a_tier_is_told_what_prompts_have_passed(gemma):
    tier, told = gemma.below(), {}
    gemma.asked(words("a"))
    gemma.turn()
    while tier.jobs:
        told |= {part.key: part.is_passed for job in tier.jobs for part in job.parts}
        gemma.settle(tier)
    passed = {(group, words) for group in range(6) for words in gemma.passed(group)}
    assert {gemma.names[key] for key, is_passed in told.items() if is_passed} == passed
    assert len(told) == GRANULES


def test_a_disk_gives_up_first_what_prompts_have_passed(tmp_path):
    """Used or not before it was stored, but for what a request has found on the disk."""
    with contextlib.closing(Bed(tmp_path, limit_bytes=1 << 30)) as bed:
        bed.limit_bytes = 6 * bed.charge
        bed.restart()
        for number in range(6):
            stored(bed, number, is_passed=number in (2, 3, 4))
        bed.tier.use([key(3)])
        gone = []
        for number in range(6, 10):
            stored(bed, number, is_passed=False)
            gone += [each for each in range(10) if key(each) in bed.gone and each not in gone]
        assert gone == [2, 4, 0, 1]


def stored(bed, number, *, is_passed):
    slot, copy = bed.slot(0), bed.copy([key(number)])
    bed.put(slot, bed.content(number, 0, slot.nbytes))
    assert bed.granted(copy) == [0]
    bed.tier.store(Job(copy.number, [Part(key(number), 0, 4, 0, 4, slot, is_passed=is_passed)], slot.nbytes))
    assert bed.end(copy) is None
    bed.settle()
