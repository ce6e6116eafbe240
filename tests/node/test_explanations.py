"""What a node says of why each chunk of a request was a hit, or was not: from the service, with a clock of its own."""

import os

import msgspec
import pytest
from explanations_bed import attach, keep, told, why, worker
from explanations_bed import service as service
from explanations_bed import session as session
from service_stage import CHUNKS, keys

from pdx.memory.arena import GRANULE_BYTES
from pdx.node import explanations
from pdx.store import history
from pdx.wire.base import MAX_NAME, MAX_REASONS
from pdx.wire.hints import Hints
from pdx.wire.messages import VERSION, Abort, Admit, Bye, Delete, Fill, FindMoved, Hello, Release
from pdx.wire.moved import Part, PromptTokens
from pdx.wire.status import Explained
from pdx.wire.verbs import Why


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


def test_what_may_have_been_here_and_is_forgotten_is_not_said_to_be_new(service, session, monkeypatch):
    monkeypatch.setattr(history, "MAX_GONE", 2)
    for number in range(3):
        keep(service, session, [number], f"before {number}")
        service.handle(session, Delete(keys([number])))
    service.handle(session, Admit(keys([0]), lease_s=1.0, request="a"))
    assert told(service, session, "a") == [
        (0, 1, False, "never stored here under this key, or so long ago that it is forgotten")
    ]


def delete(service, session, clock):
    keep(service, session, [1], "before")
    service.handle(session, Delete(keys([1])))


def give_up(service, session, clock):
    answer = service.handle(session, Admit(keys([1]), GRANULE_BYTES, 1))
    service.handle(session, Abort(answer.granted_slots, unused=True))


def end(service, session, clock):
    other = attach(service, "two")
    service.handle(other, Admit(keys([1]), GRANULE_BYTES, 1))
    service.handle(worker(service, other), Bye())
    service.handle(other, Bye())


def let_time_pass(service, session, clock):
    """Its writer never lets go, so the key is granted anew elsewhere."""
    service.handle(session, Admit(keys([1]), GRANULE_BYTES, 1))
    clock.now += 601.0
    service.store.expire()


def let_it_expire(service, session, clock):
    keep(service, session, [1], "before")
    clock.now += 61.0
    service.store.expire()


@pytest.mark.parametrize(
    ("service", "happens", "text"),
    [
        ({}, delete, "deleted"),
        ({}, give_up, "never whole: its writer gave it up"),
        ({}, end, "never whole: its process ended"),
        ({}, let_time_pass, "not filled in time"),
        ({"policy": "age:60"}, let_it_expire, "expired (--policy)"),
    ],
    indirect=["service"],
)
def test_what_became_of_a_chunk_is_told_apart_with_its_time(service, session, clock, happens, text):
    happens(service, session, clock)
    clock.now += 1.0
    keep(service, session, [1], "a")
    assert told(service, session, "a") == [(0, 1, False, f"{text}, 1.0 s ago")]


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


def test_who_holds_the_room_that_another_lacks_is_named_with_transfers_for_themselves(service, session):
    other = attach(service, "two")
    service.handle(other, Admit(keys(range(100)), GRANULE_BYTES, 1, partial=True))
    transfer = "t" * 20
    service.handle(other, Admit(keys(range(100, 156)), GRANULE_BYTES, 1, transfer=transfer, part="writes"))
    answer = service.handle(session, Admit(keys(range(200, 300)), GRANULE_BYTES, 1, partial=True))
    service.handle(worker(service, session), Fill(answer.granted_slots, 0, 1, True))
    service.handle(session, Admit(keys(range(200, 290)), lease_s=60.0))
    keep(service, session, range(1000, 1020), "late")
    [note] = why(service, session, "late").notes
    assert note.startswith("10 chunks found no room")
    held = [
        f"{100 * GRANULE_BYTES} being filled for engine two",
        f"{90 * GRANULE_BYTES} leased by engine one",
        f"{56 * GRANULE_BYTES} being filled for transfer {transfer}",
        f"{10 * GRANULE_BYTES} being filled for engine one",
    ]
    assert note.split("; ")[1:] == held


def test_an_engine_that_has_gone_is_compared_with_as_well(service, clock):
    shape = {"model": "m", "dtype": "bf16"}
    for engine, dtype in (("one", "bf16"), ("two", "fp8")):
        hello = Hello(VERSION, os.getpid(), "scheduler", engine=engine, shape=shape | {"dtype": dtype})
        session, _ = service.attach(engine.encode(), hello, os.getpid())
        service.handle(session, Admit(keys([1]), lease_s=1.0, request=engine))
        told_of = why(service, session, engine).notes
        service.handle(session, Bye())
    fields = "dtype 'fp8' and 'bf16' (--dtype and --kv-cache-dtype)"
    assert f"its engine shares no chunks with engine 'one', which has gone: {fields}" in told_of
    assert not service.counters["engine_layouts_differ"], "nobody is there to share with"


def ask_for(service, session, request, block, parent=b"root" * 4, salt=b""):
    blocks = block.encode() * 16
    service.handle(
        session,
        Admit(
            [f"{block}{parent.decode()}{salt.decode()}"[:16].ljust(16).encode()],
            lease_s=1.0,
            request=request,
            blocks=blocks,
            chunk_blocks=1,
            parent=parent,
            hints=Hints("", salt=salt),
        ),
    )


@pytest.mark.parametrize(
    ("before", "asks", "differs"),
    [
        ([], {"block": "a"}, None),
        ([{"block": "a"}], {"block": "a"}, None),
        ([{"block": "a"}], {"block": "b"}, "the tokens differ, or what its engine hashes with them"),
        ([{"block": "a"}], {"block": "b", "salt": b"x"}, "its cache salt is new here"),
        ([{"block": "a", "salt": b"x"}], {"block": "b"}, "it has no cache salt, and all of them had one"),
        (
            [{"block": "a", "salt": b"x"}, {"block": "b"}],
            {"block": "c"},
            "the tokens differ, or what its engine hashes with them, or the cache salt, of which there are several",
        ),
    ],
)
def test_in_what_a_prompt_differs_from_those_before_it_is_told_as_far_as_names_tell(
    service, session, before, asks, differs
):
    for at, one in enumerate(before):
        ask_for(service, session, f"before {at}", **one)
    ask_for(service, session, "this one", **asks)
    notes = [note for note in why(service, session, "this one").notes if "room" not in note]
    assert notes == ([f"no prompt before it began with its first block: {differs}"] if differs else [])


def test_a_first_block_that_may_be_forgotten_is_not_said_to_be_new(service, session, monkeypatch):
    monkeypatch.setattr(explanations, "MAX_BEGUN", 2)
    for block, salt in (("a", b"x"), ("b", b"y"), ("c", b"z"), ("a", b"x")):
        ask_for(service, session, f"{block} it is", block, salt=salt)
    ask_for(service, session, "this one", "d", salt=b"v")
    [note] = [note for note in why(service, session, "this one").notes if "room" not in note]
    assert note == "none of the last 2 prompts began with its first block: its cache salt was in none of them"


def test_the_same_blocks_under_another_layout_name_the_fields(service):
    for engine, dtype in (("one", "bf16"), ("two", "fp8")):
        hello = Hello(VERSION, os.getpid(), "scheduler", engine=engine, shape={"model": f"of {engine}", "dtype": dtype})
        session, _ = service.attach(engine.encode(), hello, os.getpid())
        ask_for(service, session, engine, "a", parent=engine.encode().ljust(16))
    fields = "dtype 'fp8' and 'bf16' (--dtype and --kv-cache-dtype), model 'of two' and 'of one'"
    text = f"engine 'one' has had the same first block, but under other keys: {fields}"
    assert text in why(service, session, "two").notes


@pytest.mark.parametrize(
    ("failed_chunk", "parts"),
    [
        (0, [(0, 4, False, "failed"), (4, 1, False, "new")]),
        (3, [(0, 3, True, "memory"), (3, 1, False, "failed"), (4, 1, False, "new")]),
        (4, [(0, 4, True, "memory"), (4, 1, False, "new")]),
    ],
)
def test_what_its_engine_could_not_load_is_no_hit_any_more(service, session, failed_chunk, parts):
    keep(service, session, range(4), "a")
    lease = service.handle(session, Admit(keys(range(5)), lease_s=1.0, request="b")).lease
    service.handle(session, Release(lease, request="b", failed_chunk=failed_chunk))
    report = why(service, session, "b")
    assert [(one.first, one.count, one.is_hit, one.kind) for one in report.reasons] == parts
    assert report.hits == failed_chunk
    failed = [one.text for one in report.reasons if one.kind == "failed"]
    assert all(text.endswith("out of reach; from engine one, 0.0 s ago") for text in failed)


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


@pytest.mark.parametrize("letter", ["\x1b", "\U000e0001"])
def test_names_of_requests_and_engines_steer_no_terminal_and_stay_readable(service, letter):
    """A client may choose the name of its request, and what cannot be read is escaped, which makes it longer."""
    name = letter * MAX_NAME
    session = attach(service, name)
    keep(service, session, [1, 2], "a")
    lease = service.handle(session, Admit(keys([1, 2, 3]), lease_s=1.0, request=name)).lease
    service.handle(session, Release(lease, request=name, failed_chunk=1))
    answer = msgspec.msgpack.decode(msgspec.msgpack.encode(service.handle(session, Why())), type=Explained)
    assert answer.requests[0].reasons[1].kind == "failed"
    for one in answer.requests:
        texts = [one.request, one.engine, *one.notes, *(reason.text for reason in one.reasons)]
        assert all(text.isprintable() for text in texts)


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
    monkeypatch.setattr(explanations, "MAX_EXPLAINED", 2 * MAX_REASONS)
    service.handle(session, Admit(keys(range(200)), lease_s=1.0, request="striped"))
    for number in range(0, 200, 2):
        service.handle(session, Delete(keys([number])))
        keep(service, session, [10_000 + number], "x")
    for number in range(0, 200, 4):
        keep(service, session, [number], "y")
    service.handle(session, Admit(keys([9_999, *range(200)]), lease_s=1.0, request="striped"))
    assert len(why(service, session, "striped").reasons) == MAX_REASONS


def test_what_was_moved_is_told_with_how_far(service, session):
    keep(service, session, range(4), "before")
    parts = [Part(256, 0), Part(20, -1234), Part(256, -1234), Part(256, 1000)]
    service.handle(session, Admit(keys(range(4)), lease_s=1.0, request="a", moved=parts))
    texts = [
        (reason.first, reason.count, reason.text.partition(": ")[0]) for reason in why(service, session, "a").reasons
    ]
    assert texts[1:] == [(1, 2, "moved by -1,234"), (3, 1, "moved by +1,000")]
    assert texts[0][:2] == (0, 1)
    assert "moved" not in texts[0][2]
    assert not why(service, session, "a").notes, "what is missing it asks room for by itself"
    assert service.counters["moved_tokens"] == 20 + 2 * 256


def test_what_was_blended_says_so_as_its_blender_has_and_who_asks_does_not(service, session):
    blender = service.attach(b"b", Hello(VERSION, os.getpid(), "client", name="b"), os.getpid())[0]
    granted = service.handle(blender, Admit(keys([1, 2]), GRANULE_BYTES, 1)).granted_slots
    service.handle(blender, Fill(granted, 0, 1, True, blended=0.125))
    keep(service, session, [1, 2, 3], "before")
    tokens = PromptTokens(bytes(16), bytes(12), 1, is_moved=True)
    service.handle(session, Admit(keys([1, 2, 3]), lease_s=1.0, request="a", tokens=tokens))
    assert told(service, session, "a") == [
        (0, 2, True, "blended, 12.5% recomputed: from client b, 0.0 s ago"),
        (2, 1, True, "from engine one, 0.0 s ago"),
    ]
    assert "asks for `reuse`" in why(service, session, "a").notes[-1]
    assert not [each for each in why(service, session, "before").notes if "reuse" in each]


def test_what_became_of_the_hint_is_told_beside_what_became_of_others(service, session):
    keep(service, session, range(4), "before")
    hints = Hints("chat", priority=3)
    service.handle(session, Admit(keys([9]), GRANULE_BYTES, 1, lease_s=1.0, request="a", hints=hints, partial=True))
    service.handle(session, Admit(keys(range(4)), lease_s=1.0, request="a", moved=[Part(256, -1)] * 4))
    assert verdicts(service, session, "a") == {"session": "accepted", "priority": "accepted", "reuse": "accepted"}
    service.handle(session, Admit(keys([9]), lease_s=1.0, request="a", hints=hints))
    assert verdicts(service, session, "a")["reuse"] == "accepted", "asked again"
    service.handle(session, FindMoved(bytes(16), bytes(4), 256, "b"))
    service.handle(session, Admit(keys([9]), lease_s=1.0, request="b"))
    assert verdicts(service, session, "b") == {"reuse": "refused"}
    service.handle(session, Admit(keys([9]), lease_s=1.0, request="c"))
    service.handle(session, FindMoved(bytes(16), bytes(4), 256, "c"))
    assert verdicts(service, session, "c") == {"reuse": "refused"}


def verdicts(service, session, request):
    return {each.field: each.outcome for each in why(service, session, request).verdicts}
