"""What controllers and peers may say that makes little sense, at the wrong time, or too often: no chunk is lost."""

from __future__ import annotations

import os

import pytest
import redis
from node_harness import MIB, Wire, attached
from peers_harness import disk_pair, put
from raw_engine import CHUNK_BYTES, LAYERS, Engine, key
from remote_bed import made

from pdx.memory.keys import named_key
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Fill, Refused
from pdx.wire.verbs import CheckFinish, Clear, Find, JobStatus, Move, PinIn, Selection


@pytest.fixture
def bed(start_node, place):
    """A node with a disk, an engine and a controller."""
    node = start_node(disks=[str(place / "disk")], store="write-back", store_window=1e-9, pin_share=0.8)
    engine, wire = Engine(node.address), attached(node.address, kind="controller")
    wait_until(lambda: node.status().tiers[0].state != "counting the files", what="the disk is counted")
    yield node, engine, wire
    engine.close()
    wire.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two nodes with a disk each and one remote store; the second has a small arena."""
    folder = tmp_path_factory.mktemp("pair")
    folder.chmod(0o700)
    server = made("redis", folder / "redis").start()
    try:
        of_one = {"a": {"arena_bytes": 64 * MIB}, "b": {"arena_bytes": 4 * MIB}}
        with disk_pair(folder, of_one=of_one, remote=server.url) as cluster:
            engine = Engine(cluster.address("a"))
            wires = {name: attached(cluster.address(name), kind="controller") for name in "ab"}
            yield cluster, engine, wires, server
            for one in [engine, *wires.values()]:
                one.close()
    finally:
        server.kill()


def contents_of(seed, count, nbytes=CHUNK_BYTES):
    return {key(seed * 1000 + number): os.urandom(nbytes) for number in range(count)}


def over(wire, status, timeout_s=20.0):
    """The job's end."""
    assert isinstance(status, JobStatus), status
    states = [status]

    def is_over():
        states.append(wire.ask(CheckFinish(status.job)))
        return states[-1].is_over

    wait_until(is_over, timeout_s=timeout_s, what="the job is over")
    return states[-1]


def test_chunks_of_two_shards_that_are_named_as_of_one_stay(bed):
    """One shard of them would be copied, and both would be dropped."""
    node, _, wire = bed
    scheduler = Wire(node.address)
    scheduler.hello(kind="scheduler", engine="f" * 16)
    workers = [attached(node.address, kind="worker", engine="f" * 16, shard=shard) for shard in range(2)]
    try:
        keys = [key(number) for number in range(6)]
        granted = scheduler.ask(Admit(keys, CHUNK_BYTES, LAYERS, shards=2))
        for shard, worker in enumerate(workers):
            worker.ask(Fill(granted.granted_slots[shard::2], 0, LAYERS, seal=True))
        assert wire.refused(Move(Selection(keys), "host", "disk")) == "ChunkMissing"
        assert wire.refused(PinIn(Selection(keys), "host")) == "ChunkMissing"
        assert wire.ask(Find(Selection(keys))).tiers == {"host": 0, "disk": 0}
        assert wire.ask(Find(Selection(keys, 2))).tiers == {"host": 6, "disk": 0}
    finally:
        for one in [scheduler, *workers]:
            one.close()


def test_a_request_that_asked_for_no_chunks(bed):
    node, engine, wire = bed
    engine.scheduler.ask(Admit([], request="empty"))
    what = Selection(request="empty")
    for verb in (Find(what), Move(what, "host", "disk"), Clear(what), PinIn(what)):
        assert wire.refused(verb) == "ChunkMissing"
    assert "Traceback" not in node.log


def test_a_chunk_that_a_request_named_twice_is_one(bed):
    _, engine, wire = bed
    contents = contents_of(1, 2)
    one, two = contents
    engine.save(contents)
    engine.scheduler.ask(Admit([one, two, one], request="twice"))
    what = Selection(request="twice")
    assert wire.ask(PinIn(what, "host")).chunks == 2
    assert wire.ask(PinIn(what, "host", pinned=False)).chunks == 2
    assert wire.ask(Find(what)).pinned == {}
    status = over(wire, wire.ask(Move(what, "host", "disk")))
    assert (status.state, status.chunks_done) == ("done", 2)


def test_what_a_client_has_named_reaches_no_store_that_nodes_share(pair):
    cluster, _, wires, server = pair
    put(cluster["a"], "one", os.urandom(CHUNK_BYTES))
    put(cluster["a"], "two", os.urandom(CHUNK_BYTES), push_to="b")
    one, two = (Selection([named_key(name)]) for name in ("one", "two"))
    wait_until(lambda: wires["b"].ask(Find(two)).tiers["host"], what="it is pushed")
    over(wires["a"], wires["a"].ask(Move(one, "host", "disk")))
    refused = [
        wires["a"].ask(Move(one, "disk", "remote")),
        wires["a"].ask(Move(one, "disk", "remote", "b")),
        wires["a"].ask(Move(one, "disk", "host", "b")),
        wires["b"].ask(Move(two, "host", "remote")),
    ]
    assert all(isinstance(each, Refused) and "a client has named" in each.text for each in refused), refused
    over(wires["b"], wires["b"].ask(Move(two, "host", "disk")))
    with redis.Redis(port=server.port) as store:
        assert store.dbsize() == 0


def test_more_than_a_peer_has_room_for_is_moved_there_piece_by_piece(pair):
    _, engine, wires, _ = pair
    contents = contents_of(1, 160)  # 10 MiB, by way of 4
    engine.save(contents)
    what = Selection(list(contents))
    status = over(wires["a"], wires["a"].ask(Move(what, "host", "disk", "b")), timeout_s=60)
    assert (status.state, status.chunks_done, status.why) == ("done", 160, "")
    assert wires["b"].ask(Find(what)).tiers["disk"] == 160
    assert wires["a"].ask(Find(what)).tiers["host"] == 0


def test_a_move_whose_batches_all_end_at_once_goes_on(bed):
    _, engine, wire = bed
    contents = contents_of(1, 1000, 4096)  # four batches, of which three are under way at a time
    what = Selection(list(contents))
    engine.save(contents)
    assert over(wire, wire.ask(Move(what, "host", "disk", keeps=True))).state == "done"
    status = over(wire, wire.ask(Move(what, "disk", "host")))
    assert (status.state, status.chunks_done) == ("done", 1000)
    assert wire.ask(Find(what)).tiers == {"host": 1000, "disk": 0}
    assert wire.ask(Find(Selection(what.keys[-1:]))).tiers == {"host": 1, "disk": 0}


def test_jobs_do_not_keep_others_from_what_is_done_at_once(bed):
    node, engine, wire = bed
    contents = contents_of(1, 1000, 4096)
    engine.save(contents)
    what = Selection(list(contents))
    others = contents_of(2, 65, 4096)
    engine.save(others)
    numbers = [wire.tell(Move(Selection([one]), "host", "disk"), reply=True) for one in others]
    numbers.append(wire.tell(Clear(what, "host"), reply=True))
    answers = dict(wire.answer() for _ in numbers)
    assert answers[numbers[-1]].chunks == 1000
    for number in numbers[:-1]:
        if isinstance(answers[number], JobStatus):
            assert over(wire, answers[number]).state == "done"


def test_what_is_in_a_shared_store_is_not_moved_to_it_by_way_of_another_node(pair):
    """It would be there already, and then be dropped at its source, which is the same store."""
    _, engine, wires, _ = pair
    contents = contents_of(7, 4)
    engine.save(contents)
    what = Selection(list(contents))
    over(wires["a"], wires["a"].ask(Move(what, "host", "remote")))
    for source in ("remote", ""):
        answer = wires["a"].ask(Move(what, source, "remote", "b"))
        if isinstance(answer, JobStatus):
            over(wires["a"], answer)
        assert engine.look(list(contents)) == list(contents.values())
        over(wires["a"], wires["a"].ask(Move(what, "host", "remote")))
        assert isinstance(answer, Refused)
    wires["a"].ask(Clear(what))


def test_what_a_shared_store_has_already_another_node_says_to_have_there(pair):
    _, engine, wires, _ = pair
    contents = contents_of(8, 4)
    engine.save(contents)
    what = Selection(list(contents))
    over(wires["a"], wires["a"].ask(Move(what, "host", "remote", keeps=True)))
    status = over(wires["a"], wires["a"].ask(Move(what, "host", "remote", "b")))
    assert (status.state, status.chunks_done, status.why) == ("done", 4, "")
    assert engine.look(list(contents)) == list(contents.values())
    wires["a"].ask(Clear(what))
