"""Frames that are wrong in every way: the node drops and counts them, lives, and still serves."""

import msgpack
import pytest
from node_harness import MIB, Wire, attached

from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.slot import Slot
from pdx.testing.waiting import wait_until
from pdx.wire.base import MAX_KEYS
from pdx.wire.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Admit,
    Admitted,
    Delete,
    Done,
    Fill,
    Pin,
    Ping,
    Refused,
    Release,
    Renew,
    ToNode,
    Welcome,
    encode,
)
from pdx.wire.verbs import Status

KEY = b"k" * 16


@pytest.fixture
def node(node_here):
    before = node_here.status()
    yield node_here
    after = node_here.status()
    assert after.free_bytes == before.free_bytes
    assert after.pid == before.pid, "the node was restarted"
    assert (after.chunks, after.leases, len(after.attached)) == ({}, 0, 1)


@pytest.fixture
def wire(node):
    with attached(node.address) as connection:
        yield connection


def dropped(wire):
    return wire.status().counters.get("messages_dropped", 0)


GOOD = encode(ToNode(1000, True, Status()))
MALFORMED = {
    "empty": [b""],
    "garbage": [b"\xc1\xff\x00garbage"],
    "truncated": [GOOD[:-1]],
    "trailing": [GOOD + b"\x00"],
    "nested": [b"\x91" * 10_000],
    "unknown tag": [msgpack.packb([1000, True, ["Shutdown"]])],
    "a bare body": [msgpack.packb(["Status"])],
    "negative seq": [msgpack.packb([-1, True, ["Status"]])],
    "two frames": [GOOD, GOOD],
    "REQ envelope": [b"", GOOD],
    "no frame but empty ones": [b"", b"", b""],
    "too many keys": [msgpack.packb([1000, True, ["Delete", [KEY] * (MAX_KEYS + 1)]])],
    "huge size": [msgpack.packb([1000, True, ["Admit", [KEY], (1 << 64) - 1]])],
    "negative size": [msgpack.packb([1000, True, ["Admit", [KEY], -1]])],
    "no layers": [msgpack.packb([1000, True, ["Admit", [KEY], 1, 0]])],
    "a pickle": [b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94."],
}


@pytest.mark.parametrize("with_hello", [True, False], ids=["attached", "stranger"])
def test_a_malformed_message_is_dropped_and_counted(node, wire, with_hello):
    with Wire(node.address) as stranger:
        for what, frames in MALFORMED.items():
            before = dropped(wire)
            (wire if with_hello else stranger).send_frames(*frames)
            wait_until(lambda before=before: dropped(wire) > before, what=what)
            assert dropped(wire) == before + 1, what
            assert wire.answer(0) is None, "nobody answers what is not a message"


def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(node, wire):
    with Wire(node.address) as rude:
        rude.send_frames(bytes(MAX_FRAME_BYTES + 1))
        assert wire.status().free_bytes == 8 * MIB
        assert isinstance(rude.hello(), Welcome), "a new connection serves it again"


def test_a_replayed_message_is_dropped_and_counted(wire):
    reserved = wire.ask(Admit([KEY], GRANULE_BYTES))
    assert len(reserved.granted_slots) == 1
    before = dropped(wire)
    seq = wire.seq
    for replayed in (seq, seq - 1, 1):
        wire.tell(Abort(reserved.granted_slots), seq=replayed, reply=True)
    wire.seq = seq
    status = wire.status()
    assert status.counters["messages_dropped"] == before + 3
    assert status.chunks == {"filling": 1}, "a replayed message was carried out"
    assert wire.ask(Abort(reserved.granted_slots)).count == 1
    wire.tell(Ping(), seq=1 << 40)
    wire.tell(Release(99))
    assert isinstance(wire.ask(Ping()), Done), "numbers may skip, and what wants no answer gets none"


# ---- messages that are well formed and make no sense ------------------------------------------------


def test_forged_slots_are_stale(wire):
    """CVE-2026-103764, CVE-2026-115912: an offset from the wire reaches no memory unchecked."""
    slot = wire.ask(Admit([KEY], 3 * GRANULE_BYTES)).granted_slots[0]
    forged = [
        Slot(slot.offset, slot.nbytes, slot.generation + 1),
        Slot(slot.offset, slot.nbytes, 0),
        Slot(slot.offset, slot.nbytes + GRANULE_BYTES, slot.generation),
        Slot(slot.offset + GRANULE_BYTES, slot.nbytes, slot.generation),
        Slot(slot.offset + 1, slot.nbytes, slot.generation),
        Slot(1 << 47, slot.nbytes, slot.generation),
        Slot(8 * MIB, 0, 0),
    ]
    for bad in forged:
        assert wire.refused(Fill([bad], seal=True)) == "StaleSlot"
        assert wire.refused(Fill([slot, bad], seal=True)) == "StaleSlot"
        assert wire.ask(Abort([bad])).count == 0
    assert wire.status().chunks == {"filling": 1}
    assert wire.ask(Abort([*forged, slot])).count == 1


def test_what_belongs_to_another_session_cannot_be_touched(node, wire):
    """CVE-2026-96762: ownership is checked at every message, not only when something is handed out."""
    with attached(node.address) as other:
        slot = wire.ask(Admit([KEY], GRANULE_BYTES)).granted_slots[0]
        assert other.refused(Fill([slot])) == "StaleSlot"
        assert other.refused(Fill([slot], seal=True)) == "StaleSlot"
        assert other.ask(Abort([slot])).count == 0
        assert other.ask(Abort([slot], unused=True)).count == 0
        assert wire.ask(Fill([slot], seal=True)).count == 1
        lease = wire.ask(Admit([KEY], lease_s=5.0)).lease
        assert other.refused(Release(lease)) == "ChunkMissing"
        assert other.refused(Renew(lease, 0.0)) == "ChunkMissing"
        assert wire.status().leases == 1
        assert isinstance(wire.ask(Release(lease)), Done)
        assert wire.ask(Pin([KEY], pinned=False)).count == 1
        assert other.refused(Fill([slot])) == "StaleSlot", "a sealed chunk never changes"
        assert wire.refused(Fill([slot])) == "StaleSlot", "not even by who sealed it"
        forget(wire)


def forget(wire):
    assert wire.ask(Delete([KEY])).count == 1


def test_a_slot_that_stands_twice_in_one_message_is_sealed_once(wire):
    """It once ended the node with a KeyError."""
    slot = wire.ask(Admit([KEY], GRANULE_BYTES)).granted_slots[0]
    assert isinstance(wire.ask(Fill([slot, slot], seal=True)), Done)
    assert wire.status().chunks == {"sealed": 1}
    forget(wire)


def test_slots_that_are_gone_do_not_keep_the_others_from_being_aborted(wire):
    """One evicted chunk in a request's list must not strand the room of all the others."""
    slots = wire.ask(Admit([bytes([n]) * 16 for n in range(4)], GRANULE_BYTES)).granted_slots
    wire.ask(Fill(slots[:1], seal=True))
    assert wire.ask(Abort(slots[1:2])).count == 1
    assert wire.ask(Abort(slots)).count == 2
    assert wire.status().chunks == {"sealed": 1}
    wire.ask(Delete([bytes(16)]))


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (Admit([KEY], 1 << 48), "ArenaTooSmall"),
        (Admit([KEY], 1 << 48, partial=True), "ArenaTooSmall"),
        (Admit([bytes([n]) * 16 for n in range(250)], 1 << 40), "ArenaTooSmall"),
        (Admit([KEY, KEY], 1), "ProtocolError"),
        (Admit([KEY], 1, shards=2), "ProtocolError"),
        (Admit([KEY], 8, layers=9), "ProtocolError"),
        (Admit([KEY], 64, layers=9, tail_nbytes=8), "ProtocolError"),
        (Admit([KEY] * MAX_KEYS, shards=1023), "ProtocolError"),
        (Renew(1 << 62, 86_400.0), "ChunkMissing"),
        (Release(0), "ChunkMissing"),
        (Pin([KEY]), "ChunkMissing"),
        (Fill([Slot(0, 4096, 0)], first_layer=4095, layers=4096), "StaleSlot"),
    ],
)
def test_huge_and_senseless_requests_are_refused(wire, ask, error):
    """CVE-2026-93838, CVE-2026-94626."""
    assert wire.refused(ask) == error


def test_an_engine_cannot_reserve_for_workers_it_does_not_have(node, attach):
    scheduler = attach(node, kind="scheduler", engine="e")
    attach(node, kind="worker", engine="e", shard=0)
    attach(node, kind="worker", engine="other", shard=1)
    refused = scheduler.ask(Admit([KEY], 1, shards=2))
    assert isinstance(refused, Refused)
    assert "'e' does not have 2 attached workers" in refused.text


def test_the_largest_requests_are_served(wire):
    keys = [number.to_bytes(16, "little") for number in range(MAX_KEYS)]
    found = wire.ask(Admit(keys, shards=8, lease_s=86_400.0))
    assert (found.hits, found.lease) == (0, 0)
    reserved = wire.ask(Admit(keys, GRANULE_BYTES, layers=4096, partial=True))
    assert isinstance(reserved, Admitted)
    assert (len(reserved.granted_slots), reserved.full) == (8 * MIB // GRANULE_BYTES, True)
    assert wire.ask(Fill(reserved.granted_slots, layers=4096)).count == len(reserved.granted_slots)
    assert wire.ask(Abort(reserved.granted_slots)).count == len(reserved.granted_slots)


def test_what_answers_that_find_no_room_grant_is_free_again(start_here, attach):
    """The asker reads nothing for a while; what it is told later is all that it has."""
    own = start_here(arena_bytes=64 * MIB)
    asker, watcher = attach(own), attach(own)
    asked = 6_000
    for number in range(asked):
        asker.tell(Admit([number.to_bytes(16, "big")], GRANULE_BYTES), reply=True)

    def dropped():
        status = watcher.status()
        lost = status.counters.get("answers_dropped", 0)
        return lost if lost + status.chunks.get("filling", 0) == asked else None

    lost = wait_until(dropped, what="each reservation is told, or taken back")
    assert 0 < lost < asked
    granted = [slot for _ in range(asked - lost) for slot in asker.answer()[1].granted_slots]
    assert len(granted) == asked - lost
    assert asker.ask(Abort(granted[:8192])).count + asker.ask(Abort(granted[8192:])).count == len(granted)
    assert watcher.status().chunks == {}
