"""A prefill-to-decode handoff as the node sees it: who waits for what, how long, and what is left afterwards."""

import contextlib

import msgspec
import pytest
from node_harness import MIB, Wire, arenas_of

from pdx.memory.arena import GRANULE_BYTES, NEVER, Arena
from pdx.node.service import PROBE_BYTES
from pdx.node.waiting import MAX_OF_SESSION
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Admit, Cancel, Delete, Fill, Ping, Release

TRANSFER = "transfer-0123456789"
KEYS = [bytes([number]) * 16 for number in range(4)]


@pytest.fixture
def node(node_here):
    yield node_here
    with Wire(node_here.address) as cleaner:
        cleaner.hello()
        cleaner.ask(Delete(KEYS))
        status = cleaner.status()
    assert (status.free_bytes, status.chunks, status.leases, status.transfers) == (8 * MIB, {}, 0, 0)


@pytest.fixture
def transfer(request):
    """A name no other test's transfer has; given-up names are remembered."""
    return f"transfer-{abs(hash(request.node.nodeid)):x}-0123456789"


@pytest.fixture
def prefill(node, attach):
    return attach(node, name="prefill")


@pytest.fixture
def decode(node, attach):
    return attach(node, name="decode")


def reserve(prefill, transfer, count=3, tail=True):
    reserved = prefill.ask(
        Admit(KEYS[:count], GRANULE_BYTES, layers=2, tail_nbytes=100 if tail else 0, transfer=transfer, part="writes")
    )
    return reserved.granted_slots


def look(decode, transfer, count=3):
    return decode.ask(Admit(KEYS[:count], lease_s=20.0, transfer=transfer))


def seal(prefill, slots):
    assert prefill.ask(Fill(slots, layers=2, seal=True)).count == len(slots)


def test_a_decoder_waits_until_everything_is_sealed(prefill, decode, transfer):
    slots = reserve(prefill, transfer)
    assert decode.status().transfers == 1
    found = look(decode, transfer)
    assert (found.hits, found.waiting, found.lease) == (0, True, 0)
    seal(prefill, slots[:2])
    found = look(decode, transfer)
    assert (found.hits, found.waiting, found.lease) == (2, True, 0), "no lease while it waits"
    prefill.ask(Fill(slots[2:], layers=1))
    assert look(decode, transfer).waiting
    seal(prefill, slots[2:])
    found = look(decode, transfer)
    assert (found.hits, found.waiting) == (3, False)
    assert found.slots == slots
    status = decode.status()
    assert (status.leases, status.transfers) == (1, 0)
    decode.ask(Release(found.lease))
    assert look(decode, transfer).hits == 2, "a tail is for one reader"


def test_a_decoder_waits_for_chunks_that_another_request_is_filling(prefill, decode, transfer):
    slots = reserve(prefill, None, tail=False)
    assert look(decode, transfer).waiting
    assert not decode.ask(Admit(KEYS[:3])).waiting, "without a transfer nobody waits"
    seal(prefill, slots)
    found = look(decode, transfer)
    assert (found.hits, found.waiting) == (3, False)
    decode.ask(Release(found.lease))


def test_a_transfer_may_reserve_more_after_what_it_had_is_sealed(prefill, decode, transfer):
    seal(prefill, reserve(prefill, transfer, count=2, tail=False))
    more = reserve(prefill, transfer, count=3, tail=False)
    assert len(more) == 1
    assert decode.status().transfers == 1
    assert look(decode, transfer, count=4).waiting
    seal(prefill, more)
    found = look(decode, transfer, count=4)
    assert (found.hits, found.waiting) == (3, False)
    decode.ask(Release(found.lease))


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_cancel_ends_the_waiting_and_drops_the_tail(prefill, decode, transfer, who):
    slots = reserve(prefill, transfer)
    seal(prefill, [slots[0], slots[2]])
    assert look(decode, transfer).waiting
    canceller = prefill if who == "prefill" else decode
    assert canceller.ask(Cancel(transfer)).count == 1
    assert canceller.ask(Cancel(transfer)).count == 0, "once is enough"
    found = look(decode, transfer)
    assert (found.hits, found.waiting) == (1, False), "what is sealed stays a hit"
    decode.ask(Release(found.lease))
    assert decode.status().chunks == {"sealed": 1, "quarantined": 1}, "its writer has not let go yet"
    assert decode.ask(Admit([KEYS[1]], 8 * MIB - 2 * GRANULE_BYTES, partial=False)).full is False
    assert prefill.ask(Fill(slots[1:2], layers=2, seal=True)).count == 0, "finishing it late is harmless"
    assert "quarantined" not in decode.status().chunks


def test_the_death_of_the_writer_ends_the_waiting(start_here, puppets, attach, address):
    """The writer here is a worker that did not reserve: another process did, for it."""
    own = start_here()
    writer = puppets()
    scheduler = attach(own, kind="scheduler", engine="e")
    assert writer.do("work", "e")
    slots = reserve(scheduler, TRANSFER)
    assert writer.do("fill_slot", *msgspec.structs.astuple(slots[0]), 2) == 1
    assert look(scheduler, TRANSFER).waiting
    writer.kill()
    found = wait_until(lambda: not (answer := look(scheduler, TRANSFER)).waiting and answer)
    assert found.hits == 1
    assert scheduler.status().chunks == {"sealed": 1}


def test_shards_come_together(start_here, attach):
    own = start_here()
    scheduler = attach(own, kind="scheduler", engine="e")
    ranks = [attach(own, kind="worker", engine="e", shard=shard) for shard in range(2)]
    decoder = attach(own)
    slots = scheduler.ask(Admit(KEYS[:2], GRANULE_BYTES, shards=2, transfer=TRANSFER, part="writes")).granted_slots
    assert len(slots) == 4
    assert ranks[0].refused(Fill(slots[1:2], seal=True)) == "StaleSlot", "a rank fills its own shard"
    ask = Admit(KEYS[:2], shards=2, lease_s=20.0, transfer=TRANSFER)
    assert ranks[0].ask(Fill(slots[0::2], seal=True)).count == 2
    found = decoder.ask(ask)
    assert (found.hits, found.waiting) == (0, True), "the hit is the least over all shards"
    assert ranks[1].ask(Fill([slots[1]], seal=True)).count == 1
    assert decoder.ask(ask).hits == 1
    assert scheduler.ask(Abort(slots)).count == 1
    assert decoder.status().chunks == {"sealed": 3, "quarantined": 1}, "the worker still may write it"
    assert ranks[1].ask(Abort([slots[3]])).count == 1
    found = decoder.ask(ask)
    assert (found.hits, found.slots, found.waiting) == (1, slots[:2], False)


# ---- answers that are kept back -------------------------------------------------------------


def ask_and_wait(decode, transfer, wait_s=30.0, count=3):
    """A lookup whose answer is kept back; a ping behind it is answered before."""
    number = decode.tell(Admit(KEYS[:count], lease_s=20.0, transfer=transfer, wait_s=wait_s), reply=True)
    assert decode.ask(Ping()) is not None
    return number


@pytest.mark.parametrize("how", ["sealed", "cancelled", "aborted"])
def test_an_answer_that_is_kept_back_comes_once_and_at_once_when_it_is_known(prefill, decode, transfer, how):
    slots = reserve(prefill, transfer)
    seal(prefill, slots[:1])
    number = ask_and_wait(decode, transfer)
    seal(prefill, slots[1:2])
    decode.ask(Ping())  # nothing is said of progress
    if how == "sealed":
        seal(prefill, slots[2:])
    elif how == "cancelled":
        prefill.ask(Cancel(transfer))
        prefill.ask(Abort(slots[2:]))
    else:
        prefill.ask(Abort(slots))
    answered, found = decode.answer()
    assert (answered, found.hits, found.waiting) == (number, 3 if how == "sealed" else 2, False)
    assert found.slots == slots[: found.hits]
    decode.ask(Release(found.lease))


def test_what_waits_is_bounded_and_goes_with_its_process(start_here, puppets, attach):
    own = start_here()
    prefill, decode = attach(own), attach(own, kind="scheduler")
    slots = reserve(prefill, TRANSFER)
    for _ in range(MAX_OF_SESSION):
        decode.tell(Admit(KEYS[:3], lease_s=20.0, transfer=TRANSFER, wait_s=30.0), reply=True)
    found = decode.ask(Admit(KEYS[:3], lease_s=20.0, transfer=TRANSFER, wait_s=30.0))
    assert (found.hits, found.waiting) == (0, True), "one more is answered at once"
    decode.close()
    seal(prefill, slots)
    status = prefill.status()
    assert (status.leases, status.transfers) == (0, 0), "nobody was given a lease"


# ---- a transfer that is not known yet ------------------------------------------------------------


def expect(decode, transfer, wait_s=30.0, count=3):
    """A question of a request that was sent together with the one that prefills."""
    ask = Admit(KEYS[:count], lease_s=20.0, transfer=transfer, part="expects", wait_s=wait_s)
    number = decode.tell(ask, reply=True)
    decode.ask(Ping())
    return number


@pytest.mark.parametrize("how", ["comes", "is given up", "is late"])
def test_who_expects_a_transfer_waits_for_it_before_anybody_has_opened_it(prefill, decode, transfer, how):
    number = expect(decode, transfer, wait_s=0.1 if how == "is late" else 30.0)
    slots = []
    if how == "comes":
        slots = reserve(prefill, transfer)
        seal(prefill, slots)
    elif how == "is given up":
        prefill.ask(Cancel(transfer))
    answered, found = decode.answer()
    assert (answered, found.hits, found.waiting, found.slots) == (number, len(slots), how == "is late", slots)
    assert decode.status().transfers == 0, "what nobody has opened is not remembered"
    if found.lease:
        decode.ask(Release(found.lease))


# ---- one question --------------------------------------------------------------------------------


def test_one_question_leases_what_is_there_and_grants_room_for_the_rest(prefill, decode):
    seal(prefill, reserve(prefill, None, count=2, tail=False))
    answer = decode.ask(Admit(KEYS, GRANULE_BYTES, layers=2, lease_s=20.0))
    assert (answer.hits, len(answer.slots), answer.granted, len(answer.granted_slots)) == (2, 2, [2, 3], 2)
    status = decode.status()
    assert (status.leases, status.chunks) == (1, {"sealed": 2, "filling": 2})
    decode.ask(Abort(answer.granted_slots))
    decode.ask(Release(answer.lease))


def test_a_request_without_room_holds_nothing_until_a_part_will_do(prefill, decode):
    seal(prefill, reserve(prefill, None, count=1, tail=False))
    ask = Admit(KEYS[:3], 4 * MIB, layers=2, lease_s=20.0)
    answer = decode.ask(ask)
    assert (answer.hits, answer.slots, answer.lease, answer.granted, answer.full) == (1, [], 0, [], True)
    assert decode.status().leases == 0
    answer = decode.ask(msgspec.structs.replace(ask, partial=True))
    assert (answer.hits, len(answer.slots), answer.granted, answer.full) == (1, 1, [1], True)
    decode.ask(Abort(answer.granted_slots))
    decode.ask(Release(answer.lease))


def test_nothing_is_granted_while_what_is_missing_may_still_come(prefill, decode, transfer):
    slots = reserve(prefill, transfer, count=2, tail=False)
    ask = Admit(KEYS, GRANULE_BYTES, layers=2, lease_s=20.0, transfer=transfer, wait_s=0.1)
    answer = decode.ask(ask)
    assert (answer.waiting, answer.granted, answer.lease) == (True, [], 0)
    assert decode.status().chunks == {"filling": 2}
    number = decode.tell(msgspec.structs.replace(ask, wait_s=30.0), reply=True)
    decode.ask(Ping())
    seal(prefill, slots)
    answered, answer = decode.answer()
    assert (answered, answer.hits, answer.granted) == (number, 2, [2, 3]), "now it is certain what is to be computed"
    decode.ask(Abort(answer.granted_slots))
    decode.ask(Release(answer.lease))


def test_what_is_refused_holds_nothing(prefill, decode):
    seal(prefill, reserve(prefill, None, count=1, tail=False))
    assert decode.refused(Admit(KEYS[:3], 64 * MIB, layers=2, lease_s=20.0)) == "ArenaTooSmall"
    assert decode.status().leases == 0


# ---- copies that begin before the end ------------------------------------------------------------


EARLY = "early"  # the engine that asks


@pytest.fixture
def engine(node, attach):
    """The scheduler half of an engine whose worker copies a chunk in a minute."""
    attach(node, kind="worker", engine=EARLY, shard=0).ask(Ping(load_s=60.0))
    return attach(node, kind="scheduler", engine=EARLY)


def ask_early(engine, transfer, count=3, **changes):
    return engine.ask(Admit(KEYS[:count], lease_s=20.0, transfer=transfer, early=True, **changes))


@contextlib.contextmanager
def arena_of(node):
    (path,) = arenas_of(node.address)
    with Arena.open(path, 8 * MIB + PROBE_BYTES) as arena:
        yield arena


def test_who_copies_slower_than_the_rest_comes_is_answered_before_the_end(node, prefill, engine, transfer):
    slots = reserve(prefill, transfer)
    seal(prefill, slots[:1])
    assert ask_early(engine, transfer).waiting, "how fast it comes is not known"
    prefill.ask(Fill(slots[1:], layers=1))
    found = ask_early(engine, transfer)
    assert (found.hits, found.waiting, found.slots) == (3, False, slots)
    with arena_of(node) as arena:
        assert [arena.filled_slices(slot) for slot in slots] == [2, 1, 1]
        seal(prefill, slots[1:])
        assert [arena.filled_slices(slot) for slot in slots] == [2, 2, 2]
    assert look(engine, transfer).hits == 3
    engine.ask(Release(found.lease))
    assert engine.status().chunks == {"sealed": 2} or engine.status().leases, "a tail is for one reader"


def test_the_answer_comes_with_the_slice_that_makes_it_due(prefill, engine, transfer):
    slots = reserve(prefill, transfer)
    seal(prefill, slots[:2])
    number = engine.tell(Admit(KEYS[:3], lease_s=20.0, transfer=transfer, early=True, wait_s=20.0), reply=True)
    prefill.ask(Fill(slots[2:], layers=1))
    seq, found = engine.answer()
    assert (seq, found.hits) == (number, 3)
    seal(prefill, slots[2:])
    engine.ask(Release(found.lease))


@pytest.mark.parametrize("why", ["did not ask for it", "not measured", "no lease", "of another request", "a gap"])
def test_everybody_else_waits_for_the_end(node, prefill, engine, attach, transfer, why):
    if why == "of another request":
        others = reserve(prefill, None, count=1, tail=False)
    slots = reserve(prefill, transfer, count=2 if why == "a gap" else 3)
    seal(prefill, slots[:1])
    prefill.ask(Fill(slots[1:], layers=1))
    changes = {"early": why != "did not ask for it", "lease_s": 0.0 if why == "no lease" else 20.0}
    asker = attach(node, kind="scheduler", engine="another") if why == "not measured" else engine
    assert asker.ask(Admit(KEYS[:3], transfer=transfer, **changes)).waiting
    prefill.ask(Abort([*slots, *(others if why == "of another request" else [])]))


def test_readers_of_what_is_given_up_see_that_and_its_room_is_free_when_they_are_gone(node, prefill, engine, transfer):
    slots = reserve(prefill, transfer)
    seal(prefill, slots[:1])
    prefill.ask(Fill(slots[1:], layers=1))
    found = ask_early(engine, transfer)
    assert found.hits == 3
    prefill.ask(Abort(slots[1:2]))
    with arena_of(node) as arena:
        assert [arena.filled_slices(slot) for slot in slots] == [2, NEVER, 1]
        assert all(arena.is_current(slot) for slot in slots), "nobody gets the room that is read"
        prefill.ask(Abort(slots[2:]))
        engine.ask(Release(found.lease))
        assert [arena.is_current(slot) for slot in slots] == [True, False, False]
    assert engine.status().chunks == {"sealed": 1}


def test_a_slice_that_comes_too_late_does_not_make_it_whole_again(node, prefill, engine, attach, transfer):
    """The reservation ended; its writer has not heard of it yet."""
    slots = reserve(prefill, transfer)
    prefill.ask(Fill(slots, layers=1))
    engine.ask(Cancel(transfer))
    with arena_of(node) as arena:
        assert [arena.filled_slices(slot) for slot in slots] == [NEVER] * 3
        prefill.ask(Fill(slots, layers=2))
        assert [arena.filled_slices(slot) for slot in slots] == [NEVER] * 3
    prefill.ask(Abort(slots))
