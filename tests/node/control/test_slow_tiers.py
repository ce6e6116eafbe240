"""Moves from and to tiers that take their time, or lack some of what was asked for, in a node without sockets."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
from control_bed import ControlBed, control_bed
from raw_engine import CHUNK_BYTES, LAYERS, key

from pdx.errors import JobConflict, NodeError, TierError
from pdx.node.control import verbs
from pdx.node.control.jobs import STALLED_S
from pdx.node.control.moves import ANSWER_S
from pdx.store.chunk import NODE, Claim, Wanted
from pdx.store.disk import files
from pdx.store.disk.tier import DiskTier
from pdx.store.health import PAUSE_S, SILENT
from pdx.store.remote.backend import Backend, Found, fill
from pdx.store.remote.tier import RemoteTier
from pdx.telemetry.env import Env
from pdx.wire.verbs import Clear, Find, Move, PinIn, Recode, Selection
from pdx.wire.verbs import Found as Answered


class Shelf(Backend):
    """A remote store that is a dictionary. A write waits for a permit, and a question until it may be answered."""

    place = "shelf://"

    def __init__(self):
        self.kept = {}
        self.begun = []  # names of writes
        self.permits = threading.Semaphore(1000)
        self.answers = threading.Event()
        self.answers.set()
        self.is_asked = self.is_away = False  # something waits for an answer; nothing gets there

    def connect(self, count):
        pass

    def heads(self, names, nbytes):
        if self.is_away:
            raise TierError("no route", "unreachable")
        self.is_asked = not self.answers.is_set()
        self.answers.wait(30)
        kept = [self.kept.get(name) for name in names]
        return [None if data is None else Found(memoryview(data[:nbytes]), len(data)) for data in kept]

    def read(self, name, into):
        data = self.kept.get(name)
        return None if data is None else fill(into, data)

    def write(self, name, data):
        self.begun.append(name)
        self.permits.acquire(timeout=30)
        self.kept[name] = b"".join(data)

    def remove(self, names):
        for name in names:
            self.kept.pop(name, None)

    def close(self):
        pass


class Bed(ControlBed):
    """With a `shelf`, too. Its time is `now`."""

    def __init__(self, place, arena):
        self.now = 100.0
        self.shelf = Shelf()
        super().__init__(place, arena, Env(lambda: self.now), push_s=1e6)
        self.service.peers.turn = list
        self.remote = RemoteTier(self.service.tiers, self.shelf)
        self.service.tiers.below.append([self.remote])
        self.until(lambda: self.remote.status().is_up, "it answers")

    def move(self, keys, source, target):
        return self.run(Move(Selection(keys), source, target))

    def put_away(self, first, count, nbytes=CHUNK_BYTES):
        """Chunks that the shelf alone has, and nobody knows of that."""
        keys = self.put(first, count, nbytes)
        assert self.move(keys, "host", "remote").state == "done"
        self.now += 60.0
        return keys

    def found(self, keys):
        """By tier, of each of the keys whether it is there."""
        found = {}
        for one in keys:
            ask = Find(Selection([one]))
            self.until(lambda ask=ask: not self.service.control(ask).asking, "all tiers have answered")
            for tier, count in self.service.control(ask).tiers.items():
                found.setdefault(tier, []).append(count)
        return found


@pytest.fixture
def bed(place, monkeypatch):
    monkeypatch.setattr(files, "SILENT_S", math.inf)  # its disk is a real one, which the bed's time says nothing of
    with control_bed(place, Bed, 16 << 20) as made:
        yield made
        made.shelf.answers.set()
        made.shelf.permits.release(1000)


def test_a_store_that_takes_longer_for_a_batch_than_for_an_answer_is_asked_what_it_has(bed):
    keys = bed.put(1, 4)
    bed.shelf.permits = threading.Semaphore(0)
    status = bed.service.control(Move(Selection(keys), "host", "remote"))
    bed.until(lambda: bed.service.copies.queue(bed.remote).in_flight, "they are being stored")
    bed.now += 12.0
    bed.shelf.permits.release(1000)
    status = bed.over(status)
    assert (status.state, status.chunks_done, status.why) == ("done", 4, "")
    assert bed.found(keys) == {"host": [0] * 4, "disk": [0] * 4, "remote": [1] * 4}


def test_a_batch_of_which_a_chunk_is_stored_now_and_then_goes_on(bed):
    """Each within the time in which something has to move, and all of them in twice that."""
    keys = bed.put(1, 4)
    bed.shelf.permits = threading.Semaphore(0)
    status = bed.service.control(Move(Selection(keys), "host", "remote"))
    for count in range(4):
        bed.until(lambda: bed.service.copies.queue(bed.remote).in_flight, "they are being stored")
        bed.now += 0.6 * STALLED_S
        bed.shelf.permits.release()
        bed.until(lambda count=count: bed.service.counters["remote_stored"] == count + 1, "one is stored")
        bed.turn()
    assert (bed.over(status).state, bed.over(status).chunks_done) == ("done", 4)


@pytest.mark.parametrize("source", ["host", "disk"])
def test_what_is_pinned_while_it_is_moved_stays_where_it_is_pinned(bed, source):
    keys = bed.put(1, 64)
    what = Selection(keys)
    if source == "disk":
        assert bed.move(keys, "host", "disk").state == "done"
    target = {"host": "disk", "disk": "host"}[source]
    job = bed.service.control(Move(what, source, target))
    assert not job.is_over
    # The same turn of the control loop reads it: the job has just begun.
    pinned = bed.service.control(PinIn(what, source))
    assert pinned.chunks == 64
    assert bed.over(job).state == "done"
    assert bed.service.control(Find(what)).tiers == {"host": 64, "disk": 64, "remote": 0}
    assert bed.service.control(Find(what)).pinned == {source: 64}


def test_two_moves_of_one_chunk_are_one_and_an_error_that_names_it(bed):
    keys = bed.put(1, 16)
    job = bed.service.control(Move(Selection(keys), "host", "disk"))
    assert job.state == "running"
    with pytest.raises(JobConflict, match=job.job):
        bed.service.control(Move(Selection(keys[:1]), "host", "remote"))
    assert bed.over(job).state == "done"
    assert bed.found(keys) == {"host": [0] * 16, "disk": [1] * 16, "remote": [0] * 16}


def test_a_peer_that_takes_nothing_is_said_to_take_nothing(bed, monkeypatch):
    """What is moved there comes from a disk, so that the job has begun before the peer is asked."""
    keys = bed.put(1, 4)
    assert bed.move(keys, "host", "disk").state == "done"
    peers = bed.service.peers
    monkeypatch.setattr(peers, "ask", lambda node, question: 1)
    monkeypatch.setattr(peers, "answer", lambda number: Answered(len(keys), 0, {}))
    monkeypatch.setattr(peers, "push", lambda *_: [])
    job = bed.service.control(Move(Selection(keys), "disk", "disk", "b"))
    turn = bed.turn

    def turn_and_wait():
        turn()
        bed.now += 0.0 if len(bed.service.copies) else 0.5  # its disk takes its own time

    monkeypatch.setattr(bed, "turn", turn_and_wait)
    status = bed.over(job)
    assert status.state == "failed"
    assert "b/disk did not take 4 chunks" in status.why
    assert bed.found(keys)["disk"] == [1] * 4


def test_what_a_store_is_being_asked_for_can_be_moved_from_there(bed):
    keys = bed.put_away(1, 4)
    bed.shelf.answers.clear()
    assert bed.service.control(Find(Selection(keys))).asking == ["remote"]
    status = bed.service.control(Move(Selection(keys), "remote", "host"))
    bed.shelf.answers.set()
    status = bed.over(status)
    assert (status.state, status.chunks_done) == ("done", 4)
    assert bed.found(keys) == {"host": [1] * 4, "disk": [0] * 4, "remote": [0] * 4}


def test_what_no_tier_has_does_not_keep_the_rest_from_being_moved(bed):
    """A store that has to be asked may have it, until it has answered."""
    keys, nowhere = bed.put(1, 6), [key(number) for number in range(100, 106)]
    status = bed.move([*keys, *nowhere], "", "disk")
    assert (status.state, status.chunks, status.chunks_done) == ("done", 6, 6)
    assert status.why == "6 chunks were not in remote"
    status = bed.move(nowhere, "remote", "host")
    assert (status.state, status.chunks_done, status.why) == ("failed", 0, "none of 6 chunks is in remote")
    assert bed.found(keys)["disk"] == [1] * 6


def test_what_a_store_lacks_does_not_hide_what_is_behind_it(bed):
    keys = bed.put_away(1, 8)
    bed.shelf.remove([name for name in bed.shelf.kept if keys[3].hex() in name])
    status = bed.move(keys, "remote", "host")
    assert (status.state, status.chunks, status.chunks_done) == ("done", 7, 7)
    assert bed.found(keys)["host"] == [1, 1, 1, 0, 1, 1, 1, 1]


def test_more_than_the_arena_holds_is_moved_from_a_store(bed):
    """How large its chunks are is known only when it has said what it has."""
    keys = [each for first in range(1, 100, 25) for each in bed.put_away(first, 25, 256 << 10)]
    status = bed.move(keys, "remote", "disk")
    assert (status.state, status.chunks_done, status.why) == ("done", 100, "")
    assert bed.found(keys)["disk"] == [1] * 100


def test_moves_at_the_same_time_wait_for_room_in_the_arena(bed):
    """All of them need it on the way, and three times as much as there is."""
    kept = []
    for first in range(1, 200, 32):
        kept.append(bed.put(first, 24, 256 << 10))
        assert bed.move(kept[-1], "host", "disk").state == "done"
    bed.shelf.permits = threading.Semaphore(0)
    jobs = [bed.service.control(Move(Selection(keys), "disk", "remote")) for keys in kept]
    for count in range(1, 49):
        bed.until(lambda: not bed.remote._catalog.seeking, "it has answered, which takes no time")
        bed.now += 1.0
        bed.shelf.permits.release()
        bed.until(lambda count=count: bed.service.counters["remote_stored"] == count, "another one is stored")
    bed.shelf.permits.release(1000)
    over = [bed.over(job) for job in jobs]
    assert [(status.state, status.chunks_done, status.why) for status in over] == [("done", 24, "")] * len(kept)


def test_a_disk_that_does_not_answer_any_more_is_said_not_to(bed):
    keys = bed.put(1, 24, 256 << 10)
    assert bed.move(keys, "host", "disk").state == "done"
    job = bed.service.control(Move(Selection(keys), "disk", "remote"))
    bed.disk._doubt(SILENT)
    assert "disk does not answer; 0 of 24 chunks were moved" in bed.over(job).why


def test_a_store_that_does_not_say_that_it_has_what_it_took_is_said_not_to(bed):
    keys = bed.put(1, 4)
    bed.shelf.permits = threading.Semaphore(0)
    job = bed.service.control(Move(Selection(keys), "host", "remote"))
    bed.until(lambda: len(bed.shelf.begun) == 4, "they are being stored")
    bed.shelf.answers.clear()
    bed.shelf.permits.release(1000)
    bed.until(lambda: bed.service.counters["remote_stored"] == 4, "they are there")
    bed.until(lambda: bed.shelf.is_asked, "it is asked for them")
    bed.now += ANSWER_S + 1.0
    why = bed.over(job).why
    assert "remote did not take 4 chunks (was asked, and had not answered yet); 0 of 4 chunks were moved" in why
    assert all(bed.service.store.index.of(one) for one in keys)


def test_many_chunks_are_recoded_a_few_at_a_time(bed, monkeypatch):
    """Messages wait for what is looked at between two of them."""
    monkeypatch.setattr(verbs, "STEP_KEYS", 8)
    keys = bed.put(1, 12, 4096)
    assert bed.move(keys, "host", "disk").state == "done"
    begun, recode = [], DiskTier.recode

    def counted(tier, pairs, *args):
        begun.append(len(pairs))
        return recode(tier, pairs, *args)

    monkeypatch.setattr(DiskTier, "recode", counted)
    status = bed.run(Recode(Selection(keys), "disk", "lossless"))
    assert (status.state, status.chunks_done) == ("done", len(keys))
    assert begun == [8, 4]


def test_what_is_cleared_leaves_a_store_without_a_look_first(bed):
    keys = bed.put(1, 8)
    assert bed.run(Move(Selection(keys), "host", "remote", keeps=True)).state == "done"
    bed.now += 60.0  # and nobody has looked since
    done = bed.service.control(Clear(Selection(keys)))
    assert {kept.name: kept.chunks for kept in done.tiers}["remote"] == 8
    bed.until(lambda: not bed.shelf.kept, "all is removed there")
    assert bed.found(keys)["remote"] == [0] * 8


def test_what_another_node_has_put_in_a_store_is_cleared_there(bed):
    keys = [key(number) for number in range(1, 5)]
    bed.shelf.kept = {f"v3/{one.hex()}-{shard}": b"anything" for one in keys for shard in (0, 1)}
    bed.service.control(Clear(Selection(keys, 2), "remote"))
    bed.until(lambda: not bed.shelf.kept, "all is removed there")


@pytest.mark.parametrize(
    ("tier", "others"), [("remote", ""), ("", "4 chunks from host, 0 chunks from disk are forgotten; ")]
)
def test_a_store_that_does_not_answer_has_forgotten_nothing_and_does_later(bed, tier, others):
    keys = bed.put(1, 4)
    assert bed.run(Move(Selection(keys), "host", "remote", keeps=True)).state == "done"
    bed.shelf.is_away = True
    others_of = itertools.count(100)
    ask = bed.service.control
    bed.until(lambda: ask(Find(Selection([key(next(others_of))]))) and not bed.remote.status().is_up, "it is paused")
    bed.shelf.is_away = False
    with pytest.raises(NodeError, match=f"^{others}remote does not answer: unreachable.* is removed when it answers"):
        bed.service.control(Clear(Selection(keys), tier))
    assert len(bed.shelf.kept) == 4
    bed.now += PAUSE_S
    bed.until(lambda: bed.service.tick() or not bed.shelf.kept, "it answers, and all is removed there")


def test_what_a_tenant_deletes_is_removed_in_all_its_shards(bed):
    """Memory knows how many there are."""
    claim = Claim(keys=[key(1)], nbytes=CHUNK_BYTES, layers=LAYERS, owner=NODE, writers=[NODE] * 3)
    bed.service.store.reserve(claim)
    bed.shelf.kept = {f"v3/{key(1).hex()}-{shard}": b"anything" for shard in range(3)}
    bed.service.tiers.forget([key(1)])
    bed.until(lambda: not bed.shelf.kept, "all is removed there")


def test_what_a_controller_looks_at_or_plans_is_no_use(bed):
    """A controller that polls would change what a disk keeps."""
    keys = bed.put(1, 8)
    assert bed.move(keys, "host", "disk").state == "done"
    disk = bed.disk
    before = [each.file.key for each in disk._index._order.peek()]
    what = Selection([keys[-1], keys[3]])
    for verb in (
        Find(what),
        Move(what, "disk", "host", dry_run=True),
        Move(what, "", "host", dry_run=True),
        Clear(what, "disk", dry_run=True),
        PinIn(what, "disk", dry_run=True),
        Recode(what, "disk", "lossless", dry_run=True),
    ):
        bed.service.control(verb)
    assert [each.file.key for each in disk._index._order.peek()] == before
    bed.service.tiers.may_come(Wanted([keys[3]], 1), 0)
    assert [*disk._index._order.peek()][-1].file.key == keys[3], "what a request finds is used"
