"""Transfers of prompts of several cache groups: who gets their tails, and what a decoder waits for."""

from types import SimpleNamespace

import pytest
from groups_stage import ALL_GRANULES, HYBRID, TRANSFER, WINDOW, filled, prompt_of
from groups_stage import prompt as prompt
from steps import opcodes_run

from pdx.memory.arena import GRANULE_BYTES as G
from pdx.node.peers.connection import ConnectionState
from pdx.wire.messages import Admit, Cancel, Group, Ping, Push


@pytest.fixture
def tailed(place, clock):
    """The same as `prompt`, the last chunk a tail."""
    with prompt_of(place, clock, HYBRID, 6, has_tail=True) as made:
        yield made


def write(prompt, **fields):
    """The prefill leg: room for all of it."""
    return prompt.ask_room(part="writes", transfer=TRANSFER, lease_s=0.0, **fields)


def decode(prompt, **fields):
    return prompt.ask(transfer=TRANSFER, wait_s=30.0, **fields)


def test_the_tail_of_each_group_has_a_size_of_its_own(tailed):
    answer = tailed.ask_room(part="writes", transfer=TRANSFER)
    assert [slot.nbytes for slot in answer.granted_slots] == [tailed.sizes[tailed.keys[at]][0] for at in answer.granted]
    assert [tailed.chunk(group, 5).tail for group in range(3)] == [True] * 3
    assert [tailed.chunk(group, 4).tail for group in range(3)] == [False] * 3
    tailed.fill(answer.granted_slots)
    reader = tailed.ask_room(transfer=TRANSFER)
    assert (reader.hits, reader.granted) == (6, []), "who reads a tail gets no room for it"
    tailed.release(reader)
    assert [tailed.chunk(group, 5) for group in range(3)] == [None] * 3, "a tail is for one reader"


def test_who_asks_for_room_again_does_not_take_the_tail_away(tailed):
    tailed.fill(tailed.ask_room(part="writes", transfer=TRANSFER, lease_s=0.0).granted_slots)
    tailed.drop((1, 1))
    answer = tailed.ask_room(part="writes", transfer=TRANSFER, lease_s=0.0)
    assert [divmod(at, 6) for at in answer.granted] == [(1, 1)]
    assert tailed.ask(transfer=TRANSFER, lease_s=0.0).hits == 6
    tailed.give_back(answer.granted_slots)
    tailed.service.handle(tailed.engine, Cancel(TRANSFER))


def test_a_decoder_waits_for_what_the_whole_prompt_needs_and_no_more(tailed):
    written = write(tailed)
    places = [divmod(at, 6) for at in written.granted]
    slot_of = dict(zip(places, written.granted_slots, strict=True))
    assert decode(tailed) is None
    needs = tailed.needs(6)
    for place in needs[:-1]:
        tailed.fill([slot_of[place]])
        assert tailed.turn() == []
    tailed.fill([slot_of[needs[-1]]])
    (answer,) = tailed.turn()
    assert (answer.hits, answer.slots) == (6, [slot_of[place] for place in needs])
    assert set(places) - set(needs), "some never came"
    tailed.service.handle(tailed.engine, Cancel(TRANSFER))
    tailed.give_back(written.granted_slots)
    tailed.release(answer)


def test_a_transfer_goes_on_without_what_its_prompt_does_not_need(tailed):
    """No step of a prefill has left most of its states."""
    written = write(tailed)
    slot_of = dict(zip((divmod(at, 6) for at in written.granted), written.granted_slots, strict=True))
    assert decode(tailed) is None
    needs = tailed.needs(6)
    tailed.give_back([slot for place, slot in slot_of.items() if place not in needs])
    assert tailed.turn() == []
    tailed.fill([slot_of[place] for place in needs])
    (answer,) = tailed.turn()
    assert (answer.hits, answer.slots) == (6, [slot_of[place] for place in needs])
    tailed.release(answer)


def test_where_there_is_little_room_a_transfer_waits_for_the_part_that_has_some(tailed):
    with filled(tailed, ALL_GRANULES // 2):
        written = write(tailed, partial=True)
        slot_of = dict(zip((divmod(at, 6) for at in written.granted), written.granted_slots, strict=True))
        assert {chunk for _, chunk in slot_of} == {0, 1, 2}
        assert decode(tailed) is None
        needs = tailed.needs(3)
        tailed.fill([slot_of[place] for place in needs[:-1]])
        tailed.give_back([slot for place, slot in slot_of.items() if place not in needs])
        assert tailed.turn() == []
        tailed.fill([slot_of[needs[-1]]])
        (answer,) = tailed.turn()
        assert (answer.hits, answer.waiting) == (3, False)
        tailed.release(answer)


def test_a_question_to_a_peer_outlives_a_push_that_has_ended_before_it(prompt, monkeypatch):
    """Who computes a prompt's last token again needs the state before it, which no handoff moves."""
    peers, sent = prompt.service.peers, []
    peer = SimpleNamespace(name="a", state=ConnectionState.READY, send=lambda body, about: sent.append((about, body)))
    monkeypatch.setattr(peers.connections, "dial", lambda name: peer)
    monkeypatch.delattr(peers, "turn")  # the real one
    prompt.store(but=[(2, 4), (2, 5)])
    prompt.service.transfers.prefilled(TRANSFER, prompt.service.env.clock(), peer.name)
    prompt.turn()
    pushed = Admit([prompt.key(0, 5)], transfer=TRANSFER, part="writes")
    peers.inbound.over.append(SimpleNamespace(offer=pushed, session=peer, landed_bytes=0))  # a turn looks at these
    assert decode(prompt, source=peer.name) is None
    assert prompt.turn() == []
    assert [body for _, body in sent] == [Push([prompt.key(2, 5)], transfer=TRANSFER)] * 2
    peers.fetches.answered(peer, sent[-1][0], 0, prompt.service.env.clock())
    (answer,) = prompt.turn()
    assert (answer.hits, answer.waiting) == (4, False)
    prompt.release(answer)


def test_an_early_answer_has_all_that_is_needed_group_behind_group(tailed, clock):
    written = write(tailed)
    slot_of = dict(zip((divmod(at, 6) for at in written.granted), written.granted_slots, strict=True))
    tailed.service.handle(tailed.worker, Ping(load_s=60.0))
    tailed.fill([slot_of[0, 0], slot_of[1, 4], slot_of[2, 1]])
    clock.now += 1.0
    tailed.fill([slot_of[0, 1], slot_of[1, 5]], seal=False)
    answer = decode(tailed, early=True)
    assert (answer.hits, answer.waiting) == (6, False)
    assert answer.slots == [slot_of[place] for place in tailed.needs(6)]
    tailed.give_back(written.granted_slots)
    tailed.release(answer)


def test_what_a_decoder_waits_for_costs_what_comes(place, clock):
    """Each chunk that is sealed wakes it once, and none of these turns looks at the whole prompt."""
    costs = []
    for count in (40, 80):
        small = Group(nbytes=G, layers=1, tail_nbytes=G)
        with prompt_of(place, clock, [small, WINDOW], count, has_tail=True) as prompt:
            prompt.service.handle(prompt.worker, Ping(load_s=1e-9))
            written = write(prompt)
            assert decode(prompt, early=True) is None
            with opcodes_run() as calls:
                for slot in written.granted_slots:
                    clock.now += 1e-3
                    prompt.fill([slot])
                    answers = prompt.turn()
            (answer,) = answers
            assert answer.hits == count
            prompt.release(answer)
            costs.append(calls.total())
    assert costs[1] < 2.2 * costs[0], calls.most_common(5)
