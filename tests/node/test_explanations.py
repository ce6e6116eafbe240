"""What a node says of why each chunk of a request was a hit, or was not: from the service, with a clock of its own."""

import os

import pytest

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.node import explanations
from pdx.node.service import Service
from pdx.wire.messages import (
    MAX_REASONS,
    VERSION,
    Abort,
    Admit,
    Bye,
    Delete,
    Fill,
    Hello,
    Pin,
    Release,
    Why,
)

CHUNKS = 256  # as many as the smallest arena has
LAYOUT = b"layout"


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service(place, clock, request):
    nbytes = CHUNKS * GRANULE_BYTES
    config = NodeConfig(address=f"ipc://{place}/n.sock", arena_bytes=nbytes, **getattr(request, "param", {}))
    with Arena.create(place / "arena", nbytes + (1 << 20)) as arena:
        made = Service(config, [arena], 1, clock)
        yield made
        made.sessions.close()
        made.peers.close()


@pytest.fixture
def session(service):
    return attach(service, "one")


def attach(service, engine):
    for kind, shard in (("worker", 0), ("scheduler", 0)):
        hello = Hello(VERSION, os.getpid(), kind, engine=engine, shard=shard)
        session, _ = service.attach(f"{engine} {kind}".encode(), hello, os.getpid())
    return session


def keys(numbers):
    return [number.to_bytes(16, "big") for number in numbers]


def worker(service, session):
    return service.sessions.workers(session.hello.engine, 1)[0]


def keep(service, session, numbers, request):
    """All of these are there from now on."""
    answer = service.handle(
        session, Admit(keys(numbers), GRANULE_BYTES, 1, lease_s=60.0, request=request, partial=True)
    )
    if answer.granted:
        service.handle(worker(service, session), Fill(answer.granted_slots, 0, 1, True))
    if answer.lease:
        service.handle(session, Release(answer.lease))
    return answer


def why(service, session, request):
    found = service.handle(session, Why(request)).requests
    return found[0] if found else None


def told(service, session, request):
    """(first, count, is it a hit, text) of each reason."""
    return [(one.first, one.count, one.is_hit, one.text) for one in why(service, session, request).reasons]


def test_what_is_there_is_said_to_come_from_who_computed_it_and_when(service, session, clock):
    keep(service, session, range(3), "first")
    clock.now += 12.0
    keep(service, session, range(5), "second")
    report = why(service, session, "second")
    assert (report.engine, report.chunks, report.hits, report.waited_s, report.notes) == ("one", 5, 3, 0.0, [])
    assert told(service, session, "second") == [
        (0, 3, True, "from engine one, 12.0 s ago"),
        (3, 2, False, "never stored here under this key"),
    ]
    clock.now += 7.0
    assert why(service, session, "second").age_s == 7.0
    assert told(service, session, "second")[0][3] == "from engine one, 12.0 s ago", "as it was when it was answered"


def test_what_was_evicted_is_said_to_have_gone_for_whom_and_when(service, session, clock):
    keep(service, session, range(CHUNKS), "old")
    clock.now += 5.0
    keep(service, session, range(1000, 1004), "greedy")
    clock.now += 3.0
    keep(service, session, range(CHUNKS), "old again")
    assert told(service, session, "old again") == [
        (0, CHUNKS - 4, True, "from engine one, 8.0 s ago"),
        (CHUNKS - 4, 4, False, "evicted for request greedy, 3.0 s ago"),
    ]


def test_what_a_client_deleted_or_a_writer_gave_up_is_told_apart(service, session, clock):
    keep(service, session, [1], "a")
    service.handle(session, Delete(keys([1])))
    answer = service.handle(session, Admit(keys([2]), GRANULE_BYTES, 1))
    service.handle(session, Abort(answer.granted_slots, unused=True))
    clock.now += 1.0
    keep(service, session, [1], "b")
    keep(service, session, [2], "c")
    assert told(service, session, "b") == [(0, 1, False, "deleted, 1.0 s ago")]
    assert told(service, session, "c") == [(0, 1, False, "never whole: its writer gave it up, 1.0 s ago")]


def test_a_process_that_ended_left_its_chunks_unfinished(service, session, clock):
    other = attach(service, "two")
    service.handle(other, Admit(keys([1]), GRANULE_BYTES, 1))
    service.handle(worker(service, other), Bye())
    service.handle(other, Bye())
    keep(service, session, [1], "a")
    assert told(service, session, "a") == [(0, 1, False, "never whole: its process ended, 0.0 s ago")]


def test_what_nobody_filled_in_time_says_so(service, session, clock):
    service.handle(session, Admit(keys([1]), GRANULE_BYTES, 1))
    clock.now += 601.0
    service.store.expire()
    keep(service, session, [1], "a")
    # Its writer never let go, so the key is granted anew elsewhere.
    assert told(service, session, "a") == [(0, 1, False, "not filled in time, 0.0 s ago")]


def test_what_another_request_fills_and_what_lies_behind_a_gap_is_no_hit_yet(service, session):
    other = attach(service, "two")
    service.handle(other, Admit(keys([2]), GRANULE_BYTES, 1))
    keep(service, session, [3], "a")
    keep(service, session, [1, 2, 3], "b")
    assert told(service, session, "b") == [
        (0, 1, False, "never stored here under this key"),
        (1, 1, False, "being filled by engine two at that time"),
        (2, 1, False, "here, but behind one that is missing"),
    ]


def test_a_missing_shard_is_named(service, session):
    hello = Hello(VERSION, os.getpid(), "worker", engine="one", shard=1)
    service.attach(b"second rank", hello, os.getpid())
    answer = service.handle(session, Admit(keys([1]), GRANULE_BYTES, 1, shards=2))
    service.handle(service.sessions.workers("one", 2)[0], Fill(answer.granted_slots[:1], 0, 1, True))
    service.handle(service.sessions.workers("one", 2)[1], Bye())
    service.handle(session, Admit(keys([1]), lease_s=1.0, shards=2, request="a"))
    assert told(service, session, "a") == [(0, 1, False, "shards [1] of it are missing")]


@pytest.mark.parametrize("service", [{"pin_share": 1.0}], indirect=True)
def test_room_that_was_not_there_is_a_note(service, session):
    keep(service, session, range(CHUNKS - 1), "a")
    service.handle(session, Pin(keys(range(CHUNKS - 1))))
    keep(service, session, [1000, 1001, 1002], "b")
    assert why(service, session, "b").notes == [
        f"2 chunks found no room: {CHUNKS * GRANULE_BYTES} of {CHUNKS * GRANULE_BYTES} bytes are leased, pinned "
        f"or being filled"
    ]


def test_a_question_that_asks_for_no_room_says_that_nothing_is_stored_by_it(service, session):
    service.handle(session, Admit(keys([1]), lease_s=1.0, request="a"))
    assert why(service, session, "a").notes == ["it asked for no room: nothing of it is stored by this request"]


def test_engines_that_share_nothing_are_told_of_where_nothing_is_found(service, clock):
    shape = {"model": "m", "dtype": "bf16"}
    for engine, dtype in (("one", "bf16"), ("two", "fp8")):
        hello = Hello(
            VERSION, os.getpid(), "scheduler", engine=engine, layout=dtype.encode(), shape=shape | {"dtype": dtype}
        )
        session, _ = service.attach(engine.encode(), hello, os.getpid())
    service.handle(session, Admit(keys([1]), lease_s=1.0, request="a"))
    notes = why(service, session, "a").notes
    assert any("its engine shares no chunks" in note and "dtype" in note for note in notes), notes


@pytest.mark.parametrize("service", [{"policy": "ttl:60"}], indirect=True)
def test_what_has_expired_says_so(service, session, clock, monkeypatch):
    keep(service, session, [1], "a")
    service.store.pools[0].order._levels[0]._clock = clock  # the policy's own is real
    [chunk] = service.store.of(keys([1])[0])
    service.store.pools[0].order.hold(chunk)
    chunk.expires_at = clock.now + 60.0
    service.store.pools[0].order.insert(chunk)
    clock.now += 61.0
    service.store.expire()
    keep(service, session, [1], "b")
    assert told(service, session, "b") == [(0, 1, False, "expired (--policy ttl), 0.0 s ago")]


def test_a_part_of_a_chunk_is_told_with_its_blocks(service, session):
    names = {letter: letter.encode() * 16 for letter in "abcdxy"}
    blocks = b"".join(names[letter] for letter in "abcd")
    fields = {"chunk_blocks": 4, "parent": b"root" * 4, "lease_s": 60.0}
    answer = service.handle(session, Admit(keys([1]), 4 * GRANULE_BYTES, 1, blocks=blocks, **fields))
    service.handle(worker(service, session), Fill(answer.granted_slots, 0, 1, True))
    blocks = b"".join(names[letter] for letter in "abxy")
    service.handle(session, Admit(keys([2]), 4 * GRANULE_BYTES, 1, blocks=blocks, request="a", **fields))
    assert told(service, session, "a") == [(0, 1, True, "the leading 2 blocks, from engine one, 0.0 s ago")]


def test_a_request_is_found_by_a_part_of_its_name_the_newest_first(service, session):
    for name in ("cmpl-x-1", "cmpl-y", "cmpl-x-2"):
        keep(service, session, [1], name)
    assert [one.request for one in service.handle(session, Why("-x-")).requests] == ["cmpl-x-2", "cmpl-x-1"]
    assert [one.request for one in service.handle(session, Why()).requests] == ["cmpl-x-2", "cmpl-y", "cmpl-x-1"]
    assert service.handle(session, Why("z")).remembered == 3


def test_long_words_of_others_are_cut_and_cannot_steer_a_terminal(service, session):
    answer = service.handle(session, Admit(keys([1]), GRANULE_BYTES, 1))
    chunks = service.store.unfinished(answer.granted_slots)
    service.store.let_go(chunks, "not loaded from remote: \x1b[2J" + "x" * 10_000)
    keep(service, session, [1], "a")
    [(_, _, _, text)] = told(service, session, "a")
    assert len(text) < 320
    assert "\x1b" not in text


def test_of_a_long_prompt_that_nobody_knows_the_first_chunks_are_explained(service, session):
    """The control loop does not stand still for it."""
    many = explanations.MAX_EXPLAINED
    service.handle(session, Admit(keys(range(10_000)), lease_s=1.0, request="long"))
    assert told(service, session, "long") == [
        (0, many, False, "never stored here under this key"),
        (many, 10_000 - many, False, "behind the first that are missing"),
    ]


def test_what_is_remembered_and_what_is_told_is_bounded(service, session, monkeypatch):
    monkeypatch.setattr(explanations, "MAX_REQUESTS", 40)
    for number in range(0, 200, 2):
        keep(service, session, [number], f"request {number}")
    answer = service.handle(session, Why())
    assert (len(answer.requests), answer.remembered) == (explanations.MAX_SHOWN, 40)
    service.handle(session, Admit(keys(range(200)), lease_s=1.0, request="striped"))
    for number in range(0, 200, 2):
        service.handle(session, Delete(keys([number])))
        keep(service, session, [10_000 + number], "x")
    for number in range(0, 200, 4):
        keep(service, session, [number], "y")
    service.handle(session, Admit(keys([9_999, *range(200)]), lease_s=1.0, request="striped"))
    assert len(why(service, session, "striped").reasons) == MAX_REASONS
