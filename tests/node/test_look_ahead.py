"""Requests in a queue: what they want is loaded ahead and evicted last. The service with a fake tier below."""

import pytest
from service_stage import CHUNKS, Below, attach, keys, serving, there

from pdx.memory.arena import GRANULE_BYTES
from pdx.node import look_ahead
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Bye, Expect, Fill

HALF = CHUNKS // 2


@pytest.fixture
def service(place, clock):
    with serving(place, clock) as made:
        made.below = Below(made.copies, takes=False)
        made.tiers.below.append([made.below])
        yield made
        assert not made.store.wanted or len(made.look_ahead), "nothing is wanted that nobody waits for"


@pytest.fixture
def session(service):
    return attach(service, "client")


def shared(service, keys, session):
    """How many of these other sessions use, too."""
    return len(keys) - len(service.look_ahead.unshared(keys, session))


def expect(service, session, request, numbers):
    answer = service.handle(session, Expect(request, keys(numbers)))
    service.turn()
    return answer.count


def put(service, session, numbers):
    answer = service.handle(session, Admit(keys(numbers), GRANULE_BYTES, 1, partial=True))
    service.handle(session, Fill(answer.granted_slots, 0, 1, True))
    service.turn()


def load(service):
    """What was being loaded is there."""
    ended = []
    while service.below.jobs:
        ended += service.below.end()
        service.turn()
    return ended


def test_what_a_request_in_the_queue_wants_is_loaded_ahead(service, session):
    service.below.keys = set(keys(range(8)))
    assert expect(service, session, "r", range(10)) == 1
    assert load(service) == list(range(8))
    assert there(service, range(10)) == list(range(8))
    assert service.counters["prefetched_chunks"] == 8
    assert all(
        chunk.reservation.origin.name == "below" for key in keys(range(8)) for chunk in service.store.index.of(key)
    )


def test_as_many_requests_are_loaded_ahead_as_half_of_the_memory_holds(service, session):
    service.below.keys = set(keys(range(10 * CHUNKS)))
    size = HALF // 4
    for number in range(8):
        expect(service, session, f"r{number}", range(number * size, (number + 1) * size))
    assert load(service) == list(range(HALF))
    service.handle(session, Admit(keys(range(size)), lease_s=1.0, request="r0"))
    service.turn()
    assert load(service) == list(range(HALF, HALF + size)), "the first has its turn, so the next moves up"


def test_what_the_queue_wants_is_evicted_last_and_of_that_what_the_last_request_wants_first(service, session):
    put(service, session, range(CHUNKS))
    expect(service, session, "first", range(2))
    expect(service, session, "second", range(2, 4))
    put(service, session, range(1000, 1000 + CHUNKS - 4))
    assert there(service, range(CHUNKS)) == [0, 1, 2, 3], "they are the least recently used"
    service.handle(session, Admit(keys(range(1000, 1000 + CHUNKS - 4)), lease_s=60.0))
    left = []
    for number in range(2000, 2004):
        put(service, session, [number])
        service.handle(session, Admit(keys([number]), lease_s=60.0))
        left.append(there(service, range(4)))
    assert left == [[0, 1, 2], [0, 1], [0], []], "and the end of a prompt goes before its beginning"


@pytest.mark.parametrize("how", ["asks", "is aborted", "session ends"])
def test_what_no_request_wants_any_more_goes_by_the_policy_again(service, session, how):
    put(service, session, range(CHUNKS))
    queue = attach(service, "engine")
    expect(service, queue, "r", [CHUNKS - 1])
    put(service, session, [1000])
    assert there(service, [CHUNKS - 1, CHUNKS - 2]) == [CHUNKS - 1]
    if how == "asks":
        service.handle(queue, Admit(keys([CHUNKS - 1, 5000]), request="r"))
    elif how == "is aborted":
        expect(service, queue, "r", [])
    else:
        service.handle(queue, Bye())
    assert (service.store.wanted, len(service.look_ahead)) == ({}, 0)
    put(service, session, range(2000, 2000 + CHUNKS))
    assert there(service, [CHUNKS - 1]) == []


def test_a_chunk_that_two_requests_want_has_the_place_of_the_first_until_that_is_gone(service, session):
    put(service, session, range(CHUNKS))
    expect(service, session, "first", [0])
    expect(service, session, "second", [1])
    expect(service, session, "third", [0])
    put(service, session, range(1000, 1000 + CHUNKS - 2))
    service.handle(session, Admit(keys(range(1000, 1000 + CHUNKS - 2)), lease_s=60.0))
    expect(service, session, "first", [])
    put(service, session, [2000])
    assert there(service, [0, 1]) == [1], "the third one wants it later than the second"


@pytest.mark.parametrize("how", ["is aborted", "session ends"])
def test_what_is_being_loaded_for_a_request_that_is_gone_is_given_up(service, session, how):
    service.below.keys = set(keys(range(8)))
    queue = attach(service, "engine")
    free = service.store.free_bytes
    expect(service, queue, "r", range(8))
    assert service.store.free_bytes == free - 8 * GRANULE_BYTES
    if how == "is aborted":
        assert expect(service, queue, "r", []) == 1
    else:
        service.handle(queue, Bye())
    service.turn()
    assert service.counters["prefetches_cancelled"] == 1
    load(service)
    assert len(service.copies) == 0
    assert service.store.pools[0].available_bytes == free, (
        "what a tier has loaded before it heard is a chunk like any other"
    )


def test_what_is_being_loaded_for_a_request_whose_turn_has_come_is_its_own(service, session):
    service.below.keys = set(keys(range(8)))
    expect(service, session, "r", range(8))
    assert service.handle(session, Admit(keys(range(8)), lease_s=1.0, request="r", wait_s=5.0)) is None
    load(service)
    [(_, _, answer)] = service.admissions.late_answers()
    assert answer.hits == 8
    assert service.counters["prefetches_cancelled"] == 0


def test_a_store_that_must_be_asked_is_asked_and_what_it_has_is_loaded(service, session):
    service.below.asks_for = []
    service.below.keys = set(keys(range(4)))
    expect(service, session, "r", range(4))
    assert service.below.asks_for == keys(range(4))
    assert not service.below.jobs
    service.below.asks_for = None
    service.env.news.extend(keys(range(4)))
    service.turn()
    assert load(service) == [0, 1, 2, 3]


def test_the_same_request_is_told_once(service, session):
    assert expect(service, session, "r", [1]) == 1
    assert expect(service, session, "r", [2]) == 0
    assert set(service.store.wanted) == set(keys([1]))
    assert expect(service, session, "another", []) == 0


def test_the_queue_that_a_node_looks_at_is_bounded(service, session, monkeypatch):
    monkeypatch.setattr(look_ahead, "MAX_REQUESTS", 3)
    monkeypatch.setattr(look_ahead, "MAX_KEYS", 20)
    assert [expect(service, session, f"r{number}", range(8)) for number in range(3)] == [1, 1, 0]
    assert expect(service, session, "short", [1]) == 1
    assert expect(service, session, "r9", [2]) == 0
    assert service.counters["expected_too_many"] == 2
    for name in ("r0", "r1", "short"):
        expect(service, session, name, [])
    assert expect(service, session, "r9", range(20)) == 1


def test_requests_that_come_and_go_while_there_is_no_room_leave_nothing(service, session):
    put(service, session, range(CHUNKS))
    expect(service, session, "large", range(CHUNKS))
    for number in range(1000):
        expect(service, session, f"r{number}", [5000 + number])
        expect(service, session, f"r{number}", [])
    assert len(service.look_ahead._due) <= look_ahead.SPARE + 4
    expect(service, session, "last", [7000])
    service.below.keys = set(keys([7000]))
    assert not load(service), "there is no room"
    expect(service, session, "large", [])
    assert load(service) == [7000]


# ---- what the proxy tells of ----------------------------------------------------------------


def asks(service, session, numbers, name, request="r"):
    service.handle(session, Admit(keys(numbers), lease_s=1.0, request=request, hints=Hints(name)))
    service.turn()


def forget(service, numbers):
    service.store.delete(keys(numbers))
    service.below.keys |= set(keys(numbers))


def arrives(service, name):
    service.look_ahead.arriving((b"", name))
    service.turn()


def test_what_the_last_request_of_a_session_used_is_loaded_when_the_next_one_arrives(service, session, clock):
    put(service, session, range(4))
    asks(service, session, range(4), "a session")
    arrives(service, "another one")
    assert len(service.look_ahead) == 0
    forget(service, range(4))
    arrives(service, "a session")
    arrives(service, "a session")
    assert load(service) == [0, 1, 2, 3]
    assert service.counters["arrivals"] == 1
    clock.now += 2  # the leases are over
    service.tick()
    put(service, session, range(1000, 1000 + CHUNKS - 4))
    assert there(service, range(4)) == [0, 1, 2, 3], "they are evicted last"
    asks(service, session, range(6), "a session")
    assert len(service.look_ahead) == 0, "it has come"
    clock.now += 2
    service.tick()
    put(service, session, range(2000, 2000 + CHUNKS))
    assert there(service, range(4)) == []


def test_a_request_that_does_not_come_is_given_up_and_each_arrival_has_its_own_time(service, session, clock):
    put(service, session, range(4))
    asks(service, session, range(4), "a session")
    arrives(service, "a session")
    clock.now += 20
    asks(service, session, range(4), "a session")
    forget(service, range(4))
    arrives(service, "a session")
    clock.now += look_ahead.ARRIVAL_S - 1
    service.tick()
    assert len(service.look_ahead) == 1, "the time of the one before it is over"
    clock.now += 1
    service.tick()
    assert len(service.look_ahead) == 0
    assert service.counters["prefetches_cancelled"] == 1
    service.below.end()
    service.turn()


def test_sessions_that_came_last_are_remembered(service, session, monkeypatch):
    monkeypatch.setattr(look_ahead, "MAX_SESSIONS", 3)
    monkeypatch.setattr(look_ahead, "MAX_KEYS", 10)
    for name in "abcd":
        asks(service, session, range(2), name)
    asks(service, session, range(4), "b")
    asks(service, session, range(5), "e")
    asks(service, session, range(11), "f")

    def is_known(name):
        arrives(service, name)
        return len(service.look_ahead) > 0 and not asks(service, session, range(1), name, "")

    assert [name for name in "acdf" if is_known(name)] == []
    assert is_known("b")


def prefetch(service, name, numbers):
    heeded = service.look_ahead.prefetch((b"tenant", name), look_ahead.Wanted(keys(numbers), 1, (), is_named=False))
    service.turn()
    return heeded


def test_what_sessions_may_want_leaves_the_queues_of_engines_half_of_the_places(service, session, monkeypatch):
    monkeypatch.setattr(look_ahead, "MAX_REQUESTS", 8)
    monkeypatch.setattr(look_ahead, "MAX_KEYS", 40)
    assert [prefetch(service, f"s{number}", [number]) for number in range(6)] == [1, 1, 1, 1, 0, 0]
    assert [expect(service, session, f"r{number}", [100 + number]) for number in range(5)] == [1, 1, 1, 1, 0]
    for number in range(4):
        expect(service, session, f"r{number}", [])
    assert expect(service, session, "long", range(100, 136)) == 1
    asks(service, session, range(1), "s0")
    assert not prefetch(service, "s9", [9]), "the queue has more than half of the keys"


def test_what_sessions_may_want_leaves_the_queues_of_engines_half_of_the_room(service, session):
    service.below.keys = set(keys(range(10 * CHUNKS)))
    size = HALF // 4
    heeded = [prefetch(service, f"s{number}", range(number * size, (number + 1) * size)) for number in range(4)]
    assert heeded == [True, True, False, False]
    load(service)
    assert expect(service, session, "r", range(HALF, HALF + size)) == 1
    assert load(service) == list(range(HALF, HALF + size))


def test_what_is_shared_is_shared_no_more_when_the_other_session_is_forgotten(service, session, monkeypatch):
    monkeypatch.setattr(look_ahead, "MAX_SESSIONS", 2)

    def came(name, numbers, salt=b""):
        service.look_ahead.came(session, Admit(keys(numbers), hints=Hints(name, salt=salt)), ())

    came("a", [0, 1, 1])
    assert shared(service, keys([0, 1]), (b"", "a")) == 0
    assert shared(service, keys([0, 1, 2]), (b"", "other")) == 2
    assert shared(service, keys([0]), (b"tenant", "other")) == 0
    came("b", [0])
    assert shared(service, keys([0, 1]), (b"", "a")) == 1
    came("b", [9])
    assert shared(service, keys([0, 1]), (b"", "a")) == 0
    came("c", [9], b"tenant")
    assert shared(service, keys([0, 1]), (b"", "other")) == 0
    came("d", [5], b"tenant")
    assert service.look_ahead._users == {b"tenant": {**dict.fromkeys(keys([9, 5]), 1)}}
