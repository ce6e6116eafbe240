"""A prefill-to-decode handoff as the node sees it: who waits for what, how long, and what is left afterwards."""

import os
from pathlib import Path

import msgspec
import pytest
from service_stage import CHUNKS, attach, serving

from pdx.errors import ArenaTooSmall, StaleSlot
from pdx.memory.arena import GRANULE_BYTES, NEVER, Arena
from pdx.node.waiting import MAX_OF_SESSION
from pdx.wire.messages import VERSION, Abort, Admit, Bye, Cancel, Fill, Hello, Ping, Release

TRANSFER = "transfer-0123456789"
KEYS = [bytes([number]) * 16 for number in range(4)]
ARENA_BYTES = CHUNKS * GRANULE_BYTES


class Process:
    """One that is attached: to ask is a message, and the turn of the control loop behind it."""

    def __init__(self, service, name, kind="client", **hello):
        self.service, self.session = service, attach(service, name, kind, **hello)

    def ask(self, body):
        """The answer; None: it is kept back."""
        answer = self.service.handle(self.session, body)
        self.service.turn()
        return answer

    def late(self):
        """The answer that was kept back; None: it still is."""
        answers = [answer for session, _, answer in self.service.admissions.late_answers() if session is self.session]
        assert len(answers) <= 1
        return answers[0] if answers else None

    def look(self, count=3, **fields):
        return self.ask(Admit(KEYS[:count], **{"lease_s": 20.0, "transfer": TRANSFER, **fields}))

    def reserve(self, count=3, *, tail=True, **fields):
        """Room for a transfer's chunks, the last one a tail."""
        size = {"layers": 2, "tail_nbytes": 100 if tail else 0}
        fields = {"transfer": TRANSFER, "part": "writes", **size, **fields}
        return self.ask(Admit(KEYS[:count], GRANULE_BYTES, **fields)).granted_slots

    def seal(self, slots):
        assert self.ask(Fill(slots, layers=2, seal=True)).count == len(slots)

    def fill(self, slots, layers=1):
        self.ask(Fill(slots, layers=layers))


@pytest.fixture
def service(place, clock):
    with serving(place, clock) as made:
        yield made
        made.tick()
        made.store.delete(KEYS)
        assert (made.store.free_bytes, made.store.num_leases, len(made.transfers)) == (ARENA_BYTES, 0, 0)


@pytest.fixture
def prefill(service):
    return Process(service, "prefill")


@pytest.fixture
def decode(service):
    return Process(service, "decode")


def states(service):
    return service.store.index.census()[0]


def test_a_decoder_waits_until_everything_is_sealed(service, prefill, decode):
    slots = prefill.reserve()
    assert len(service.transfers) == 1
    for sealed, hits in (([], 0), (slots[:2], 2)):
        prefill.seal(sealed)
        found = decode.look()
        assert (found.hits, found.waiting, found.lease) == (hits, True, 0), "no lease while it waits"
    prefill.fill(slots[2:])
    assert decode.look().waiting
    prefill.seal(slots[2:])
    found = decode.look()
    assert (found.hits, found.waiting, found.slots) == (3, False, slots)
    assert (service.store.num_leases, len(service.transfers)) == (1, 0)
    decode.ask(Release(found.lease))
    found = decode.look()
    assert found.hits == 2, "a tail is for one reader"
    decode.ask(Release(found.lease))


def test_a_decoder_waits_for_chunks_that_another_request_is_filling(prefill, decode):
    slots = prefill.reserve(tail=False, transfer=None)
    assert decode.look().waiting
    assert not decode.ask(Admit(KEYS[:3])).waiting, "without a transfer nobody waits"
    prefill.seal(slots)
    found = decode.look()
    assert (found.hits, found.waiting) == (3, False)
    decode.ask(Release(found.lease))


def test_a_transfer_may_reserve_more_after_what_it_had_is_sealed(service, prefill, decode):
    prefill.seal(prefill.reserve(2, tail=False))
    more = prefill.reserve(tail=False)
    assert (len(more), len(service.transfers)) == (1, 1)
    assert decode.look(4).waiting
    prefill.seal(more)
    found = decode.look(4)
    assert (found.hits, found.waiting) == (3, False)
    decode.ask(Release(found.lease))


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_cancel_ends_the_waiting_and_drops_the_tail(service, prefill, decode, who):
    slots = prefill.reserve()
    prefill.seal([slots[0], slots[2]])
    assert decode.look().waiting
    canceller = prefill if who == "prefill" else decode
    assert [canceller.ask(Cancel(TRANSFER)).count for _ in range(2)] == [1, 0], "once is enough"
    found = decode.look()
    assert (found.hits, found.waiting) == (1, False), "what is sealed stays a hit"
    decode.ask(Release(found.lease))
    assert states(service) == {"sealed": 1, "quarantined": 1}, "its writer has not let go yet"
    assert prefill.ask(Fill(slots[1:2], layers=2, seal=True)).count == 0, "finishing it late is harmless"
    assert states(service) == {"sealed": 1}


def test_the_death_of_the_writer_ends_the_waiting(service):
    """The writer here is a worker that did not reserve: another process did, for it."""
    writer, scheduler = (Process(service, kind, kind, engine="e") for kind in ("worker", "scheduler"))
    slots = scheduler.reserve()
    writer.seal(slots[:1])
    assert scheduler.look(wait_s=30.0) is None
    service.end(writer.session)
    found = scheduler.late()
    assert (found.hits, found.waiting, states(service)) == (1, False, {"sealed": 1})
    scheduler.ask(Release(found.lease))


def test_shards_come_together(service, decode):
    scheduler = Process(service, "e", "scheduler", engine="e")
    ranks = [Process(service, f"e{shard}", "worker", engine="e", shard=shard) for shard in range(2)]
    slots = scheduler.reserve(2, shards=2, tail=False, layers=1)
    assert len(slots) == 4
    with pytest.raises(StaleSlot):  # a rank fills its own shard
        ranks[0].ask(Fill(slots[1:2], seal=True))
    assert ranks[0].ask(Fill(slots[0::2], seal=True)).count == 2
    found = decode.look(2, shards=2)
    assert (found.hits, found.waiting) == (0, True), "the hit is the least over all shards"
    assert ranks[1].ask(Fill([slots[1]], seal=True)).count == 1
    assert decode.look(2, shards=2).hits == 1
    assert scheduler.ask(Abort(slots)).count == 1
    assert states(service) == {"sealed": 3, "quarantined": 1}, "the worker still may write it"
    assert ranks[1].ask(Abort([slots[3]])).count == 1
    found = decode.look(2, shards=2)
    assert (found.hits, found.slots, found.waiting) == (1, slots[:2], False)
    decode.ask(Release(found.lease))


# ---- answers that are kept back -------------------------------------------------------------


@pytest.mark.parametrize("how", ["sealed", "cancelled", "aborted", "late"])
def test_an_answer_that_is_kept_back_comes_once_and_at_once_when_it_is_known(prefill, decode, clock, how):
    slots = prefill.reserve()
    prefill.seal(slots[:1])
    assert decode.look(wait_s=30.0) is None
    prefill.seal(slots[1:2])
    assert decode.late() is None, "nothing is said of progress"
    if how == "sealed":
        prefill.seal(slots[2:])
    elif how == "cancelled":
        prefill.ask(Cancel(TRANSFER))
    elif how == "aborted":
        prefill.ask(Abort(slots))
    clock.now += 30.0 * (how == "late")
    found = decode.late()
    assert (found.hits, found.waiting) == (3 if how == "sealed" else 2, how == "late")
    assert found.slots == ([] if how == "late" else slots[: found.hits])
    prefill.ask(Abort(slots))
    if found.lease:
        decode.ask(Release(found.lease))


def test_what_waits_is_bounded_and_goes_with_its_process(service, prefill, decode):
    slots = prefill.reserve()
    assert [decode.look(wait_s=30.0) for _ in range(MAX_OF_SESSION)] == [None] * MAX_OF_SESSION
    found = decode.look(wait_s=30.0)
    assert (found.hits, found.waiting) == (0, True), "one more is answered at once"
    decode.ask(Bye())
    prefill.seal(slots)
    assert (service.store.num_leases, list(service.admissions.late_answers())) == (0, [])
    prefill.ask(Cancel(TRANSFER))


@pytest.mark.parametrize("how", ["comes", "is given up", "is late"])
def test_who_expects_a_transfer_waits_for_it_before_anybody_has_opened_it(service, prefill, decode, clock, how):
    assert decode.look(part="expects", wait_s=30.0) is None
    slots = []
    if how == "comes":
        slots = prefill.reserve()
        prefill.seal(slots)
    elif how == "is given up":
        prefill.ask(Cancel(TRANSFER))
    clock.now += 30.0 * (how == "is late")
    found = decode.late()
    assert (found.hits, found.waiting, found.slots) == (len(slots), how == "is late", slots)
    assert len(service.transfers) == 0, "what nobody has opened is not remembered"
    if found.lease:
        decode.ask(Release(found.lease))


# ---- one question --------------------------------------------------------------------------------


def test_one_question_leases_what_is_there_and_grants_room_for_the_rest(service, prefill, decode):
    prefill.seal(prefill.reserve(2, tail=False, transfer=None))
    answer = decode.ask(Admit(KEYS, GRANULE_BYTES, layers=2, lease_s=20.0))
    assert (answer.hits, len(answer.slots), answer.granted, len(answer.granted_slots)) == (2, 2, [2, 3], 2)
    assert (service.store.num_leases, states(service)) == (1, {"sealed": 2, "filling": 2})
    decode.ask(Abort(answer.granted_slots))
    decode.ask(Release(answer.lease))


def test_a_request_without_room_holds_nothing_until_a_part_will_do(service, prefill, decode):
    prefill.seal(prefill.reserve(1, tail=False, transfer=None))
    ask = Admit(KEYS[:3], ARENA_BYTES // 2, layers=2, lease_s=20.0)
    answer = decode.ask(ask)
    assert (answer.hits, answer.slots, answer.lease, answer.granted, answer.full) == (1, [], 0, [], True)
    assert service.store.num_leases == 0
    answer = decode.ask(msgspec.structs.replace(ask, partial=True))
    assert (answer.hits, len(answer.slots), answer.granted, answer.full) == (1, 1, [1], True)
    decode.ask(Abort(answer.granted_slots))
    decode.ask(Release(answer.lease))
    with pytest.raises(ArenaTooSmall):
        decode.ask(msgspec.structs.replace(ask, nbytes=2 * ARENA_BYTES))
    assert service.store.num_leases == 0, "what is refused holds nothing"


def test_nothing_is_granted_while_what_is_missing_may_still_come(service, prefill, decode):
    slots = prefill.reserve(2, tail=False)
    fields = {"nbytes": GRANULE_BYTES, "layers": 2}
    answer = decode.look(4, **fields)
    assert (answer.waiting, answer.granted, answer.lease, states(service)) == (True, [], 0, {"filling": 2})
    assert decode.look(4, wait_s=30.0, **fields) is None
    prefill.seal(slots)
    answer = decode.late()
    assert (answer.hits, answer.granted) == (2, [2, 3]), "now it is certain what is to be computed"
    decode.ask(Abort(answer.granted_slots))
    decode.ask(Release(answer.lease))


# ---- copies that begin before the end ------------------------------------------------------------


@pytest.fixture
def engine(service):
    """The scheduler half of an engine whose worker copies a chunk in a minute."""
    Process(service, "early", "worker", engine="early").ask(Ping(load_s=60.0))
    return Process(service, "early", "scheduler", engine="early")


@pytest.fixture
def arena(service):
    """As a process that attaches maps it."""
    _, welcome = service.attach(b"maps it", Hello(VERSION, os.getpid(), "client"), os.getpid())
    with Arena.open(Path(welcome.arena_path), welcome.arena_bytes) as mapped:
        yield mapped


def filled(arena, slots):
    return [arena.filled_slices(slot) for slot in slots]


def test_who_copies_slower_than_the_rest_comes_is_answered_before_the_end(service, prefill, engine, clock, arena):
    slots = prefill.reserve()
    prefill.seal(slots[:1])
    assert engine.look(early=True).waiting, "how fast it comes is not known"
    assert engine.look(early=True, wait_s=20.0) is None
    clock.now += 1.0
    prefill.fill(slots[1:])
    late, found = engine.late(), engine.look(early=True)
    for each in (late, found):
        assert (each.hits, each.waiting, each.slots) == (3, False, slots)
    assert filled(arena, slots) == [2, 1, 1]
    prefill.seal(slots[1:])
    assert filled(arena, slots) == [2, 2, 2]
    for each in (late, found):
        engine.ask(Release(each.lease))
    assert states(service) == {"sealed": 2}, "a tail is for one reader"


@pytest.mark.parametrize("why", ["did not ask for it", "not measured", "no lease", "of another request", "a gap"])
def test_everybody_else_waits_for_the_end(service, prefill, engine, clock, why):
    others = prefill.reserve(1, tail=False, transfer=None) if why == "of another request" else []
    slots = prefill.reserve(2 if why == "a gap" else 3)
    prefill.seal(slots[:1])
    clock.now += 1.0
    prefill.fill(slots[1:])
    fields = {"early": why != "did not ask for it", "lease_s": 0.0 if why == "no lease" else 20.0}
    asker = Process(service, "another", "scheduler", engine="another") if why == "not measured" else engine
    assert asker.look(**fields).waiting
    prefill.ask(Abort([*slots, *others]))


def test_readers_of_what_is_given_up_see_that_and_its_room_is_free_when_they_are_gone(
    service, prefill, engine, clock, arena
):
    slots = prefill.reserve()
    prefill.seal(slots[:1])
    clock.now += 1.0
    prefill.fill(slots[1:])
    found = engine.look(early=True)
    assert found.hits == 3
    prefill.ask(Abort(slots[1:2]))
    assert filled(arena, slots) == [2, NEVER, 1]
    is_current = arena.is_current
    assert all(is_current(slot) for slot in slots), "nobody gets the room that is read"
    prefill.ask(Abort(slots[2:]))
    engine.ask(Release(found.lease))
    assert [is_current(slot) for slot in slots] == [True, False, False]
    assert states(service) == {"sealed": 1}


def test_a_slice_that_comes_too_late_does_not_make_it_whole_again(prefill, engine, arena):
    """The reservation ended; its writer has not heard of it yet."""
    slots = prefill.reserve()
    prefill.fill(slots)
    engine.ask(Cancel(TRANSFER))
    assert filled(arena, slots) == [NEVER] * 3
    prefill.fill(slots, 2)
    assert filled(arena, slots) == [NEVER] * 3
    prefill.ask(Abort(slots))
