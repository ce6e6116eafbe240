"""Pushes to this node: who gets room when, what becomes a chunk, and when room is given back."""

from contextlib import ExitStack, closing

import pytest
from push_stage import FakeSession, Granted, ReceivingStage, Stop, key

from pdx.errors import ProtocolError
from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.slot import Slot
from pdx.node.peers import inbound_pushes as module
from pdx.store.index import Index
from pdx.store.lifecycle import State
from pdx.wire.base import MAX_SLOTS
from pdx.wire.messages import Admit

TRANSFER = "transfer-0123456789"


@pytest.fixture
def stage_with(tmp_path):
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(closing(ReceivingStage(tmp_path, **settings)))


@pytest.fixture
def stage(stage_with):
    return stage_with()


@pytest.fixture
def a():
    return FakeSession(1, "a")


@pytest.fixture
def b():
    return FakeSession(2, "b")


def finish(stage, session, push, scheme="sure"):
    """All that was granted lands, and the sender lets go."""
    if session.granted(push).slots:
        stage.land(session, push, scheme=scheme)
    stage.let_go(session, push)


# ---- what becomes a chunk ------------------------------------------------------------------------


def test_slices_land_and_whole_chunks_are_sealed_one_by_one(stage, a):
    push = stage.offer(a, [0, 1], layers=2, transfer=TRANSFER)
    granted = a.granted(push)
    assert granted.granted == [0, 1]
    assert stage.transfers.is_under_way(TRANSFER)
    assert {one.session for one in stage.inbound.grants.values()} == {a}
    stage.land(a, push, granted.slots[:1], layers=(0, 1))
    stage.land(a, push, granted.slots[:1], layers=(0, 1))
    assert stage.store.find([key(0)], 1) == []
    stage.land(a, push, granted.slots[:1], layers=(1, 1))
    assert [chunk.key for chunk in stage.sealed] == [key(0)]
    assert list(stage.inbound.grants) == [granted.slots[1].offset], "what is sealed takes no more writes"
    assert granted.slots[0].offset not in stage.listeners["sure"].granted[a.token]
    stage.let_go(a, push)
    assert len(stage.inbound) == 1, "the last notification may come behind the farewell"
    stage.land(a, push, granted.slots[1:], layers=(0, 2))
    assert [one.number for one in stage.over] == [push]
    assert not stage.transfers.is_under_way(TRANSFER)
    assert not stage.transfers.is_given_up(TRANSFER)
    stage.assert_idle()
    assert len(stage.store.find([key(0), key(1)], 1)) == 2


def test_a_notification_that_never_comes_is_not_waited_for_long(stage, a):
    push = stage.offer(a, [0, 1], transfer=TRANSFER)
    stage.land(a, push, a.granted(push).slots[:1])
    stage.let_go(a, push)
    stage.tick(module.LANDING_S + 0.1)
    assert isinstance(a.sent[-1], Stop)
    assert stage.transfers.is_given_up(TRANSFER)
    stage.assert_idle()
    assert len(stage.store.find([key(0), key(1)], 1)) == 1


def test_a_chunk_is_not_sealed_while_something_still_lands_in_it(stage, a):
    """A peer that writes a slice again, behind the notification, would change a sealed chunk."""
    push = stage.offer(a, [0])
    (slot,) = a.granted(push).slots
    stage.listeners["sure"].landing.add((a.token, slot.offset))
    stage.land(a, push)
    assert stage.counters["written_twice"] == 1
    assert isinstance(a.sent[-1], Stop)
    assert stage.sealed == []
    stage.tick()
    assert stage.arena.is_current(slot)
    stage.listeners["sure"].landing.clear()
    stage.tick()
    stage.assert_idle()


def test_notifications_of_others_or_of_the_past_fill_nothing(stage, a, b):
    push = stage.offer(a, [0], layers=2)
    (slot,) = a.granted(push).slots
    stage.offer(b, [1], layers=2)
    stale = Slot(slot.offset, slot.nbytes, slot.generation - 1)
    stage.land(b, push, [slot], layers=(0, 2))  # b has a push of that number, too
    stage.land(a, push, [stale], layers=(0, 2))
    stage.land(a, push, [slot], layers=(0, 2), scheme="blind")
    stage.land(a, push + 1, [slot], layers=(0, 2))
    assert stage.store.at(slot).filled == 0
    stage.inbound.session_over(a, is_dead=True)
    stage.land(a, push, [slot], layers=(0, 2))
    stage.inbound.session_over(b, is_dead=True)
    stage.assert_idle()
    assert stage.sealed == []


def test_who_forwards_what_lands_hears_of_it(stage, a):
    """A push to a third node goes on while the chunk is still landing here."""
    push = stage.offer(a, [0, 1], layers=2)
    first, second = (stage.store.at(slot) for slot in a.granted(push).slots)
    stage.store.hold([first, second])
    stage.land(a, push, [first.slot], layers=(0, 1))
    assert stage.changed == [first]
    stage.land(a, push, [first.slot], layers=(1, 1))
    assert stage.changed == [first, first]
    stage.let_go(a, push, complete=False)
    assert stage.changed == [first, first, second]
    assert second.state is State.RETIRED, "it is read by the other push until that hears of it"
    stage.store.unhold([first, second])
    stage.assert_idle()


# ---- who may write at all ------------------------------------------------------------------------


def test_a_session_writes_to_the_probe_until_it_has_chosen_and_then_by_that_channel_alone(stage, a, b):
    assert len(stage.inbound.invite(a, ["sure", "blind", "smoke"])) == 2
    probe = {0: 4096}
    assert [stage.listeners[scheme].granted[a.token] for scheme in ("sure", "blind")] == [probe, probe]
    with pytest.raises(ProtocolError, match="before it has chosen"):
        stage.inbound.admit(a, 1, Admit([key(0)], GRANULE_BYTES, 1))
    stage.inbound.choose(a, "sure")
    assert stage.listeners["sure"].granted[a.token] == {}
    assert [stage.listeners[scheme].expelled for scheme in ("sure", "blind")] == [set(), {a.token}]
    for session, scheme in ((a, "sure"), (a, "blind"), (b, "smoke")):
        with pytest.raises(ProtocolError, match="chooses"):
            stage.inbound.choose(session, scheme)
    stage.inbound.session_over(a, is_dead=False)
    assert stage.listeners["sure"].expelled == {a.token}, "it may write nothing more"
    assert stage.inbound.sessions == []


# ---- who gets room when --------------------------------------------------------------------------


def test_offers_get_room_in_their_order_and_all_or_nothing(stage, a, b):
    first = stage.offer(a, [0, 1, 2, 3], granules=3)
    second = stage.offer(b, [4, 5], granules=3)
    third = stage.offer(a, [6])
    assert len(a.granted(first).slots) == 4
    assert b.answers(second) == a.answers(third) == [], "the third would fit, but the second was there before"
    stage.tick()
    assert b.answers(second) == []
    stage.land(a, first, a.granted(first).slots[:1])
    stage.tick()
    assert len(b.granted(second).slots) == 2, "what is sealed makes room"
    assert len(a.granted(third).slots) == 1
    for session, push in ((a, first), (b, second), (a, third)):
        finish(stage, session, push)
    stage.assert_idle()


def test_whoever_waits_behind_one_that_is_given_up_goes_at_once(stage, a, b):
    first = stage.offer(a, [0], granules=15)
    second, third = stage.offer(b, [1], granules=2), stage.offer(b, [2])
    assert b.sent == []
    stage.let_go(b, second)
    stage.inbound.turn()
    assert len(b.granted(third).slots) == 1
    finish(stage, a, first)
    finish(stage, b, third)
    stage.assert_idle()


def test_whoever_waited_long_enough_gets_what_fits(stage, a, b):
    first = stage.offer(a, [0, 1], granules=6)
    second = stage.offer(b, [2, 3, 4], granules=2, tail_nbytes=GRANULE_BYTES, wait_s=5.0)
    stage.tick(4.9)
    assert b.answers(second) == []
    stage.tick(0.2)
    granted = b.granted(second)
    assert (granted.granted, [slot.nbytes for slot in granted.slots]) == ([0, 1], [2 * GRANULE_BYTES] * 2)
    assert stage.counters["granted_in_part"] == 1
    late = stage.offer(b, [5], wait_s=0.0)
    assert b.granted(late) == Granted(late, [], [])
    for session, push in ((a, first), (b, second), (b, late)):
        finish(stage, session, push)
    stage.assert_idle()


def test_an_offer_that_can_never_fit_gets_its_leading_part_at_once(stage, a):
    push = stage.offer(a, list(range(20)), transfer=TRANSFER)
    assert a.granted(push).granted == list(range(16))
    finish(stage, a, push)
    assert not stage.transfers.is_under_way(TRANSFER)
    huge = stage.offer(a, [30], granules=1 << 30)
    assert a.granted(huge) == Granted(huge, [], [])
    stage.let_go(a, huge)
    stage.assert_idle()


FEW, MANY = [0, 1], list(range(8))


@pytest.mark.parametrize(
    ("share", "before", "offered", "granted"),
    [
        (0.5, (MANY, {"nbytes": 100}), ([10], {"nbytes": 100}), None),  # of granules, not of bytes
        (0.5, (MANY, {}), ([10], {}), None),  # of the arena that peers write: there is another one
        (0.25, None, (MANY, {}), [0, 1, 2, 3]),  # at once: there will never be more
        (0.25, None, (FEW, {"granules": 5}), [0]),  # or with few chunks in an arena no peer would ever write one
        (0.25, None, (FEW, {"granules": 5, "shards": 2}), [0]),
        (0.25, (FEW, {"granules": 5}), ([1], {"granules": 5}), None),
    ],
)
def test_what_a_peers_share_has_room_for(stage_with, a, share, before, offered, granted):
    stage = stage_with(peer_share=share, other_granules=16)
    earlier = stage.offer(a, before[0], **before[1]) if before is not None else None
    push = stage.offer(a, offered[0], **offered[1])
    if granted is None:
        assert a.answers(push) == []
        finish(stage, a, earlier)
        stage.inbound.turn()
        assert a.granted(push).granted == [0]
    else:
        assert a.granted(push).granted == granted
        assert stage.counters["granted_in_part"] == 1
    finish(stage, a, push)
    stage.assert_idle()


def test_a_peer_at_its_share_waits_and_keeps_nobody_waiting(stage_with, a, b):
    stage = stage_with(peer_share=0.5)
    first = stage.offer(a, [0, 1], granules=4)
    second = stage.offer(a, [2])
    third = stage.offer(b, [3, 4], granules=4)
    assert a.answers(second) == [], "a has its eight granules"
    assert len(b.granted(third).slots) == 2
    stage.tick(5.1)
    assert a.granted(second) == Granted(second, [], [])
    for session, push in ((a, first), (a, second), (b, third)):
        finish(stage, session, push)
    more = stage.offer(a, [5, 6])
    assert len(a.granted(more).slots) == 2
    finish(stage, a, more)
    stage.assert_idle()


def test_what_is_here_already_is_not_granted(stage, a, b):
    first = stage.offer(a, [0, 1])
    finish(stage, a, first)
    second = stage.offer(b, [0, 1, 2])
    assert b.granted(second).granted == [2]
    third = stage.offer(a, [2], transfer=TRANSFER)
    assert a.granted(third) == Granted(third, [], []), "somebody else is filling it"
    assert stage.transfers.is_under_way(TRANSFER)
    stage.let_go(a, third)
    assert not stage.transfers.is_under_way(TRANSFER)
    finish(stage, b, second)
    stage.assert_idle()


# ---- what waiting costs --------------------------------------------------------------------------


@pytest.fixture
def looked_up(monkeypatch):
    """The keys that the store has looked up."""
    keys = []
    of = Index.of

    def counted(index, key, *of_which):
        keys.append(key)
        return of(index, key, *of_which)

    monkeypatch.setattr(Index, "of", counted)
    return keys


def test_nobody_looks_up_the_keys_of_an_offer_before_there_may_be_room(stage_with, a, b, looked_up):
    stage = stage_with(granules=512)
    first = stage.offer(a, list(range(1000, 1512)))
    second = stage.offer(b, list(range(400)), wait_s=60.0)
    assert b.answers(second) == []
    slots = a.granted(first).slots
    looked_up.clear()
    for turn in range(399):
        stage.land(a, first, slots[turn : turn + 1])
        looked_up.clear()
        stage.inbound.turn()
        assert not looked_up, f"{turn + 1} chunks are free, and 400 are needed"
    for number in range(2000, 2010):
        stage.offer(b, [number], wait_s=60.0)
    assert not looked_up, "whoever comes later waits behind it"
    stage.land(a, first, slots[399:400])
    stage.inbound.turn()
    assert len(b.granted(second).slots) == 400
    finish(stage, b, second)
    stage.inbound.session_over(a, is_dead=True)
    stage.inbound.session_over(b, is_dead=True)
    stage.assert_idle()


def test_room_that_is_too_scattered_is_looked_at_again_now_and_then(stage, a, b, looked_up):
    finish(stage, a, stage.offer(a, list(range(16))))
    odd = [stage.store.find([key(number)], 1)[0][0] for number in range(1, 16, 2)]
    lease = stage.store.lease(odd, 1, 1e9)
    push = stage.offer(b, [100], granules=2, wait_s=60.0)
    assert b.answers(push) == [], "eight granules, no two of them neighbours"
    looked_up.clear()
    for _ in range(100):
        stage.inbound.turn()
    assert not looked_up
    stage.store.release(lease, 1)
    stage.tick(module.LOOK_S)
    assert len(b.granted(push).slots) == 1
    finish(stage, b, push)
    stage.assert_idle()


@pytest.mark.parametrize(("bound", "most", "keys"), [("MAX_PUSHES", 3, 1), ("MAX_KEYS_OF_A_PEER", 15, 5)])
def test_a_peer_has_no_more_under_way_than_may_be(stage, a, b, monkeypatch, bound, most, keys):
    """Each push, with its keys, is remembered until its peer lets go, also if nothing was granted to it."""
    monkeypatch.setattr(module, bound, most)
    finish(stage, b, stage.offer(b, [0]))
    pushes = [stage.offer(a, list(range(1, keys + 1))) for _ in range(3)]
    (stop,) = a.answers(stage.offer(a, [1]))
    assert isinstance(stop, Stop)
    assert stage.counters["offers_stopped"] == 1
    finish(stage, b, stage.offer(b, [9]))
    finish(stage, a, pushes.pop())
    pushes.append(stage.offer(a, list(range(1, keys + 1))))
    assert a.granted(pushes[-1]) is not None
    for push in pushes:
        finish(stage, a, push)
    stage.assert_idle()
    assert stage.inbound.account("a").keys == 0


# ---- offers that make no sense -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "fields"),
    [
        ([], {}),
        ([1, 1], {}),
        (list(range(200)), {"shards": MAX_SLOTS // 200 + 1}),
        ([1], {"nbytes": 3, "layers": 4}),
        ([1, 2], {"tail_nbytes": 2 * GRANULE_BYTES}),
        ([1, 2], {"layers": 8, "tail_nbytes": 7}),
    ],
    ids=["no keys", "a key twice", "slots", "empty slices", "a long tail", "a tail with empty slices"],
)
def test_an_offer_that_makes_no_sense_is_refused(stage, a, numbers, fields):
    with pytest.raises(ProtocolError):
        stage.offer(a, numbers, **fields)
    stage.assert_idle()
    assert a.sent == []
    push = stage.offer(a, [0])
    stage.offers[a.number] -= 1
    with pytest.raises(ProtocolError, match="twice"):
        stage.offer(a, [1])
    finish(stage, a, push)
    stage.assert_idle()


def test_more_offers_than_may_wait_are_stopped(stage, a, b, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 2)
    first = stage.offer(a, [0], granules=16)
    waiting = [stage.offer(a, [number]) for number in (1, 2)]
    turned_down = stage.offer(b, [3], transfer=TRANSFER)
    (stop,) = b.answers(turned_down)
    assert isinstance(stop, Stop), "or its sender would wait for room until the push is too late"
    assert stage.counters["offers_stopped"] == 1
    assert not stage.transfers.is_under_way(TRANSFER)
    for push in (first, *waiting):
        finish(stage, a, push)
        stage.tick()
    stage.assert_idle()


# ---- endings -------------------------------------------------------------------------------------


def test_given_up_while_something_is_landing_waits_for_it(stage, a):
    push = stage.offer(a, [0, 1], transfer=TRANSFER)
    slots = a.granted(push).slots
    stage.listeners["sure"].landing.add((a.token, slots[0].offset))
    stage.inbound.cancel(TRANSFER)
    stage.let_go(a, push, complete=False)
    for _ in range(3):
        stage.tick(1.0)
        assert all(stage.arena.is_current(slot) for slot in slots)
    assert stage.store.index.census()[0] == {"quarantined": 2}
    stage.listeners["sure"].landing.clear()
    stage.tick()
    stage.assert_idle()
    assert not any(stage.arena.is_current(slot) for slot in slots)


def test_where_writes_are_not_checked_the_writer_must_let_go(stage, a):
    push = stage.offer(a, [0], scheme="blind")
    stage.tick(61.0)
    assert isinstance(a.sent[-1], Stop)
    for _ in range(3):
        stage.tick(100.0)
    assert stage.store.index.census()[0] == {"quarantined": 1}, "it may write whenever it likes"
    stage.let_go(a, push, complete=False)
    stage.assert_idle()


@pytest.mark.parametrize("scheme", ["sure", "blind"])
def test_a_silent_peer_may_still_write_where_nobody_checks(stage, a, scheme):
    push = stage.offer(a, [0], scheme=scheme, transfer=TRANSFER)
    waiting = stage.offer(a, [1], granules=16, scheme=scheme)
    stage.inbound.session_over(a, is_dead=False)
    assert stage.transfers.is_given_up(TRANSFER)
    assert [one.number for one in stage.over][-1:] == [waiting] or scheme == "sure"
    assert len(stage.inbound) == (0 if scheme == "sure" else 1)
    stage.tick(1000.0)
    assert len(stage.inbound) == (0 if scheme == "sure" else 1)
    stage.inbound.session_over(a, is_dead=True)
    assert {one.number for one in stage.over} == {push, waiting}
    stage.assert_idle()
