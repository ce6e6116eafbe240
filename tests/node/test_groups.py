"""Requests of engines with several cache groups: what is found, leased, granted and loaded."""

import itertools
import math
from contextlib import contextmanager

import pytest
from groups_stage import (
    ALL_GRANULES,
    FULL,
    HYBRID,
    STATE,
    TRANSFER,
    WINDOW,
    GroupsStage,
    SizedBelow,
    filled,
    prompt_of,
    without_tail,
)
from groups_stage import prompt as prompt
from service_stage import CHUNKS, attach
from steps import opcodes_run

from pdx.errors import ArenaTooSmall, ProtocolError
from pdx.memory.arena import GRANULE_BYTES as G
from pdx.store.lifecycle import State
from pdx.telemetry.rate import Rate
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Expect, Group, Ping
from pdx.wire.verbs import Why

GAP = "here, but one that is needed with it is missing"


@pytest.fixture
def told(place, clock):
    """The same as `prompt`, whose engine has told what its groups are."""
    fields = [{"num_layers": "2"}, {"kind": "window", "layers": "0,2,4-7", "window": "512"}, {"kind": "state"}]
    with prompt_of(place, clock, HYBRID, 6, hello={"shape": {"model": "m"}, "groups": fields}) as made:
        yield made


# ---- what is found -------------------------------------------------------------------------------


def test_several_shards_come_together(place, clock):
    with prompt_of(place, clock, [FULL, WINDOW], 3) as prompt:
        service = prompt.service
        attach(service, "second", "worker", engine="prompt", shard=1)
        answer = prompt.ask_room(shards=2, lease_s=0.0)
        assert len(answer.granted_slots) == 2 * len(answer.granted) == 12
        for slot in answer.granted_slots:
            chunk = service.store.at(slot)
            service.store.fill([slot], 0, chunk.layers, chunk.writer)
            service.store.seal([chunk])
        found = prompt.ask(shards=2)
        assert found.hits == 3
        assert len(found.slots) == 2 * len(prompt.needs(3))
        assert found.slots[:2] == [chunk.slot for chunk in service.store.index.of(prompt.key(0, 0))]
        prompt.release(found)


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_question_costs_what_it_names(place, clock, has_tier):
    costs = []
    for count in (20, 40):
        with prompt_of(place, clock, [Group(nbytes=G, layers=1), WINDOW, WINDOW], count) as prompt:
            if has_tier:
                prompt.below().keys |= set(prompt.keys[: count // 2])
            with opcodes_run() as calls:
                answer = prompt.ask_room(wait_s=1.0, request="r")
            assert len(answer.granted) == 3 * count
            prompt.give_back(answer.granted_slots)
            costs.append(calls.total())
    assert costs[1] < 2.2 * costs[0]


# ---- room ----------------------------------------------------------------------------------------


def test_room_is_had_for_what_is_missing_behind_the_hits(prompt):
    prompt.store()
    prompt.drop((1, 0), (1, 4), (2, 3), (2, 5), (0, 5))
    answer = prompt.ask_room()
    assert answer.hits == 3
    granted = [divmod(at, 6) for at in answer.granted]
    assert granted == [(0, 5), (1, 4), (2, 3), (2, 5)], "what is there already, or will not be needed, is not granted"
    assert answer.granted_slots == prompt.slots(granted)
    sizes = [slot.nbytes for slot in answer.granted_slots]
    assert sizes == [prompt.groups[group].nbytes for group, _ in granted]
    assert [prompt.chunk(*place).layers for place in granted] == [2, 1, 1, 1]
    prompt.fill(answer.granted_slots)
    prompt.release(answer)
    assert prompt.ask(lease_s=0.0).hits == 6


def test_a_group_of_which_nothing_is_kept_gets_no_room(prompt):
    groups = [*prompt.groups[:2], *without_tail([STATE], nbytes=0)]
    answer = prompt.ask(groups=groups)
    assert {at // 6 for at in answer.granted} == {0, 1}
    prompt.give_back(answer.granted_slots)


def test_without_room_for_all_groups_nothing_is_granted_evicted_or_leased(prompt):
    with filled(prompt, ALL_GRANULES):
        prompt.store()
        prompt.drop((0, 5), (1, 5), (2, 5), (2, 4))
        with filled_by_others(prompt, 8):
            before = prompt.here()
            evicted = prompt.service.counters["evicted"]
            answer = prompt.ask_room()
            assert (answer.hits, answer.full, answer.granted, answer.slots, answer.lease) == (4, True, [], [], 0)
            assert prompt.here() == before
            assert (prompt.service.counters["evicted"], prompt.service.store.num_leases) == (evicted, 0)
    answer = prompt.ask_room()
    assert [divmod(at, 6) for at in answer.granted] == [(0, 5), (1, 5), (2, 4), (2, 5)]
    prompt.give_back(answer.granted_slots)
    prompt.release(answer)


@contextmanager
def filled_by_others(prompt, granules):
    """Somebody writes what takes so many granules; what the prompt has here is leased, so that it cannot go."""
    held = [prompt.chunk(*place) for place in prompt.here()]
    prompt.service.store.hold(held, is_use=False)
    others = [bytes([number]) * 16 for number in range(granules)]
    answer = prompt.service.handle(prompt.engine, Admit(others, nbytes=G, layers=1, part="writes"))
    assert len(answer.granted) == granules
    yield
    prompt.service.store.unhold(held)
    prompt.give_back(answer.granted_slots)


@pytest.mark.parametrize("granules", [0, 5, 6, 20, 35, 36])
def test_with_little_room_all_groups_get_as_many_chunks(prompt, granules):
    with filled(prompt, granules):
        answer = prompt.ask_room(partial=True)
        count = granules // 6
        granted = [(group, chunk) for group in range(3) for chunk in range(count)]
        assert [divmod(at, 6) for at in answer.granted] == granted
        assert answer.full is (count < 6)
        assert prompt.service.store.free_bytes == granules * G - count * 6 * G, "the rest is given back"
        assert len(answer.granted_slots) == len(granted)
        prompt.give_back(answer.granted_slots)


def test_what_is_there_behind_the_hits_does_not_make_room_for_the_rest(prompt):
    """The oldest chunks are the prompt's own: others go before them."""
    prompt.store()
    prompt.drop((1, 5), (1, 4), (2, 5), (2, 4))
    free = prompt.service.store.free_bytes // G
    others = [bytes([number]) * 16 for number in range(1, free + 1)]
    answer = prompt.service.handle(prompt.engine, Admit(others, nbytes=G, layers=1, part="writes"))
    prompt.fill(answer.granted_slots)
    answer = prompt.ask_room()
    assert (answer.hits, [divmod(at, 6) for at in answer.granted]) == (4, [(1, 4), (1, 5), (2, 4), (2, 5)])
    prompt.fill(answer.granted_slots)
    prompt.release(answer)
    assert set(prompt.needs(6)) <= set(prompt.here())
    prompt.service.store.delete(others)


@pytest.mark.parametrize("is_partial", [False, True])
def test_what_never_fits_is_said(prompt, is_partial):
    groups = [*prompt.groups[:2], *without_tail([STATE], nbytes=(CHUNKS - 2) * G)]
    with pytest.raises(ArenaTooSmall, match="bytes do not fit into an arena"):
        prompt.ask(groups=groups, partial=is_partial)
    assert not prompt.leased()


# ---- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"keys": [bytes([at]) * 16 for at in range(7)]}, "7 keys of 3 cache groups"),
        ({"blocks": b"b" * 16, "chunk_blocks": 1}, "16 bytes of block names, and 3 cache groups"),
        ({"groups": [FULL, WINDOW, *without_tail([STATE])]}, r"tails of \[4096, 4096, 0\] bytes and 18 keys"),
        ({"groups": [FULL, WINDOW, STATE], "keys": []}, "and 0 keys"),
        ({"groups": [*without_tail([FULL, WINDOW]), Group(nbytes=100, layers=101)]}, "101 slices .* 100 bytes"),
        ({"groups": [FULL, WINDOW, Group(nbytes=G, layers=3, tail_nbytes=2)]}, "3 slices .* 2 bytes"),
    ],
)
def test_questions_that_make_no_sense_are_refused(prompt, changes, match):
    with pytest.raises(ProtocolError, match=match):
        prompt.ask(**changes)


def test_a_key_of_two_groups_is_refused(prompt):
    keys = [*prompt.keys[:12], *prompt.keys[:6]]
    with pytest.raises(ProtocolError, match="twice"):
        prompt.ask_room(keys=keys)
    assert not prompt.leased()
    with pytest.raises(ProtocolError, match="7 keys of 2 cache groups"):
        prompt.service.handle(prompt.engine, Expect("r", prompt.keys[:7], groups=prompt.groups[:2]))


# ---- loads from a tier below ---------------------------------------------------------------------


def test_what_waits_for_the_rest_does_not_go_meanwhile(prompt):
    """Memory has the full group, which alone is no hit, and is older than all else."""
    tier = Asked(prompt.service.copies, prompt.sizes)
    prompt.service.tiers.below.append([tier])
    prompt.store(but=[(group, chunk) for group in (1, 2) for chunk in range(6)])
    tier.keys |= {prompt.key(1, 4), prompt.key(1, 5), prompt.key(2, 5)}
    free = prompt.service.store.free_bytes // G
    others = [bytes([number]) * 16 for number in range(1, free + 1)]
    answer = prompt.service.handle(prompt.engine, Admit(others, nbytes=G, layers=1, part="writes"))
    prompt.fill(answer.granted_slots)
    assert prompt.ask(wait_s=10.0) is None
    more = [bytes([number]) * 15 + b"+" for number in range(50)]
    answer = prompt.service.handle(prompt.engine, Admit(more, nbytes=G, layers=1, part="writes"))
    assert prompt.service.counters["evicted"] >= 40
    prompt.give_back(answer.granted_slots)
    prompt.service.tiers.answered(tier.answer())
    (answer,) = prompt.settle(tier)
    assert answer.hits == 6
    prompt.release(answer)
    prompt.service.store.delete(others)


def test_what_cannot_be_held_as_a_whole_is_not_loaded(prompt):
    tier = prompt.below()
    tier.keys |= set(prompt.keys)
    with filled(prompt, 20):  # the prompt needs 12 + 2 + 3, and its first chunk is not here
        answer = prompt.ask(wait_s=10.0)
        assert answer is None
        (answer,) = prompt.settle(tier)
        prompt.release(answer)
        assert answer.hits == 6
        prompt.service.store.delete(prompt.keys)
    with filled(prompt, 16):
        answer = prompt.ask(wait_s=10.0)
        assert (answer.hits, answer.waiting) == (0, False)
        assert not prompt.here()
    assert prompt.service.counters["loads_without_room"] >= 1


class Asked(SizedBelow):
    """A tier that knows of what it was asked for, up to the first that it does not have."""

    def __init__(self, copies, sizes):
        super().__init__(copies, sizes)
        self.questions, self.known = [], {}

    def find(self, keys, shards):
        known = [key for key in itertools.takewhile(self.known.get, keys)]
        return super().find(known, shards)

    def seeks(self, keys, shards):
        if keys[0] in self.known:
            return False
        self.questions.append(list(keys))
        return True

    def answer(self):
        """What was asked for; those of which something is known now."""
        questions, self.questions = self.questions, []
        for keys in questions:
            run = len([*itertools.takewhile(self.keys.__contains__, keys)])
            self.known.update({key: key in self.keys for key in keys[: run + 1]})
        return [key for keys in questions for key in keys]


def test_a_tier_is_asked_for_the_windows_of_what_it_has_of_the_full_group(prompt):
    """Before the first answer nothing is known of them; that says how long the prompt may be."""
    tier = Asked(prompt.service.copies, prompt.sizes)
    prompt.service.tiers.below.append([tier])
    tier.keys |= set(prompt.keys) - {prompt.key(0, 4)}
    assert prompt.ask(wait_s=10.0) is None
    answers = []
    for _ in range(3):
        prompt.service.tiers.answered(tier.answer())
        answers += prompt.settle(tier)
    (answer,) = answers
    assert answer.hits == 4
    assert prompt.here() == prompt.needs(4)
    prompt.release(answer)


def test_a_load_is_weighed_against_the_chunks_of_the_prompt_that_it_saves(place, clock):
    """Of three groups a chunk each comes for one chunk's computing."""
    with prompt_of(place, clock, HYBRID, 6) as prompt:
        tier = prompt.below()
        tier.keys |= set(prompt.keys)
        needs = sum(prompt.sizes[prompt.key(*place)][0] for place in prompt.needs(6))
        rate = tier.load_rate = Rate()
        rate.moved(needs, 0, 1_000_000_000)  # all of it takes a second
        prompt.service.handle(prompt.worker, Ping(chunk_s=0.15))
        answer = prompt.ask(wait_s=10.0)
        assert (answer.hits, answer.waiting) == (0, False), "six chunks are computed in 0.9 s"
        assert prompt.service.counters["loads_not_worth"]
        prompt.settle(tier)
        prompt.service.store.delete(prompt.keys)
        prompt.service.handle(prompt.worker, Ping(chunk_s=0.3))
        assert prompt.ask(wait_s=10.0) is None
        (answer,) = prompt.settle(tier)
        assert answer.hits == 6
        prompt.release(answer)


# ---- what else knows of requests -----------------------------------------------------------------


def test_which_chunk_of_which_group_was_missing_is_said_in_words(told):
    told.store()
    told.drop((1, 4), (1, 3))
    told.release(told.ask(request="r-1"))
    said = told.service.handle(told.engine, Why("r-1")).requests[0]
    assert [(each.first, each.count, each.is_hit, each.text) for each in said.reasons if each.kind != "memory"] == [
        (3, 3, False, "the full group (2 layers): here, but one that is needed with it is missing"),
        (4, 1, False, "the window group (layers 0,2,4-7; 512 tokens) has no chunk 4: deleted, 0.0 s ago"),
        (5, 1, False, f"the window group (layers 0,2,4-7; 512 tokens): {GAP}"),
        (5, 1, False, f"the state group (all layers): {GAP}"),
    ]
    told.drop((1, 5))
    told.release(told.ask(request="r-2"))
    texts = [each.text for each in told.service.handle(told.engine, Why("r-2")).requests[0].reasons]
    assert "the window group (layers 0,2,4-7; 512 tokens) has no chunks 4 to 5: deleted, 0.0 s ago" in texts


def test_of_what_finds_no_room_it_is_said_how_much_that_is(prompt):
    with filled(prompt, 12):
        answer = prompt.ask_room(partial=True, request="r-2")
        assert len(answer.granted) == 6
        told = prompt.service.handle(prompt.engine, Why("r-2")).requests[0]
        assert told.notes[0].startswith("12 chunks found no room")
        prompt.give_back(answer.granted_slots)


def test_what_a_request_in_a_queue_needs_is_loaded_ahead(prompt):
    tier = prompt.below()
    tier.keys |= set(prompt.keys) - {prompt.key(2, 5)}
    assert prompt.service.handle(prompt.engine, Expect("r", prompt.keys, groups=prompt.groups)).count == 1
    prompt.settle(tier)
    assert prompt.here() == prompt.needs(5)
    answer = prompt.ask(request="r")
    assert answer.hits == 5
    prompt.release(answer)
    assert not prompt.service.store.wanted


def test_hints_are_of_what_the_whole_prompt_needs(prompt):
    prompt.store()
    prompt.drop((1, 0), (1, 1))
    hints = Hints("s", lease_s=60.0)
    answer = prompt.ask(hints=hints)
    kept = [place for place in prompt.here() if prompt.chunk(*place).is_kept]
    verdict = next(each for each in answer.verdicts if each.field == "lease_s")
    assert (verdict.outcome, kept) == ("accepted", prompt.needs(6))
    prompt.release(answer)
    answer = prompt.ask(hints=Hints("s", lease_s=0.0))
    assert not [place for place in prompt.here() if prompt.chunk(*place).is_kept]
    prompt.release(answer)


def test_after_a_storm_of_requests_nothing_is_left(place, clock):
    with prompt_of(place, clock, HYBRID, 6, has_tail=True) as one:
        tier = one.below()
        other = GroupsStage(one.service, [WINDOW, FULL], 9, name="other")
        tier.sizes.update(other.sizes)
        held = []
        for turn in range(60):
            for prompt in (one, other):
                transfer = f"{TRANSFER}-{prompt.count}-{turn // 3}"
                if turn % 3 == 0:
                    written = prompt.ask_room(part="writes", transfer=transfer, lease_s=5.0, partial=turn % 2 == 0)
                    held += [written] * (written is not None)
                    slots = written.granted_slots if written is not None else []
                    prompt.fill(slots[: len(slots) - turn % 4])
                    prompt.give_back(slots)
                else:
                    prompt.ask(transfer=transfer, wait_s=0.5 * (turn % 5), early=turn % 4 == 0)
                tier.keys.discard(prompt.keys[turn % len(prompt.keys)])
            tier.end(error=ProtocolError("no") if turn % 7 == 0 else None)
            one.service.turn()
            list(one.service.admissions.late_answers())
            clock.now += 0.4
            one.service.tick()
        clock.now += 100.0
        one.service.tick()
        one.settle(tier)
        one.service.tick()
        list(one.service.admissions.late_answers())
        one.settle(tier)
        one.service.store.delete(other.keys)
        assert math.isfinite(one.service.store.free_bytes)
        assert State.FILLING not in one.service.store.index.census()[0]
