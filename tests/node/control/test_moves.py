"""Moves between the tiers of real nodes: a disk each, a real remote store that both use, and each other's memory."""

from __future__ import annotations

import itertools
import os

import pytest
import redis
from control_bed import BedEngine, control_bed
from node_harness import MIB, attached, over, run
from peers_harness import disk_pair
from peers_harness import put as put_named
from raw_engine import CHUNK_BYTES, Engine, key
from remote_bed import made

from pdx.memory.keys import named_key
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Refused, Settle
from pdx.wire.verbs import Clear, EndJob, Find, Found, Jobs, Move, PinIn, Selection

NUM = 12


def contents_of(seed, count=NUM, nbytes=CHUNK_BYTES):
    return {key(seed * 1000 + number): os.urandom(nbytes) for number in range(count)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two nodes, an engine and a controller at each; `--store write-back` leaves what is saved in memory alone."""
    folder = tmp_path_factory.mktemp("pair")
    folder.chmod(0o700)
    server = made("redis", folder / "redis").start()
    try:
        of_one = {"a": {"arena_bytes": 64 * MIB}, "b": {"arena_bytes": 4 * MIB}}
        with disk_pair(folder, of_one=of_one, remote=server.url, remote_lookup_s=20.0) as cluster:
            cluster.server = server
            engines = {name: Engine(cluster.address(name)) for name in "ab"}
            wires = {name: attached(cluster.address(name), kind="controller") for name in "ab"}
            yield cluster, engines, wires
            for one in [*engines.values(), *wires.values()]:
                one.close()
    finally:
        server.kill()


def found(wire, keys):
    """Of each tier how many of the keys it has, asked until all tiers have said."""
    ask = Find(Selection(list(keys)))
    return wait_until(lambda: not (last := wire.ask(ask)).asking and last.tiers, what="all tiers have answered")


def put(pair, place, contents):
    """These are in this tier of this node, and nowhere else."""
    _, engines, wires = pair
    node, tier = place.split("/")
    engines[node].save(contents)
    if tier != "host":
        assert run(wires[node], Move(Selection(list(contents)), "host", tier)).state == "done"


PLACES = ["a/host", "a/disk", "a/remote", "b/host", "b/disk"]
MOVES = [(*each, False) for each in itertools.product(PLACES[:3], PLACES) if each[0] != each[1]]
MOVES += [("a/remote", "a/disk", True), ("a/host", "b/disk", True)]


@pytest.mark.parametrize(("source", "target", "keeps"), MOVES)
def test_what_is_moved_is_in_the_other_tier_and_only_there(pair, source, target, keeps):
    _, engines, wires = pair
    contents = contents_of(100 + MOVES.index((source, target, keeps)))
    keys = list(contents)
    put(pair, source, contents)
    (_, tier), (node, to) = source.split("/"), target.split("/")
    planned = wires["a"].ask(Move(Selection(keys), tier, to, node, keeps, dry_run=True))
    assert (planned.state, planned.chunks, planned.job) == ("planned", NUM, "")
    status = run(wires["a"], Move(Selection(keys), tier, to, node, keeps))
    assert (status.state, status.chunks_done, status.why) == ("done", NUM, "")
    here = {f"a/{name}": count for name, count in found(wires["a"], keys).items()}
    there = {f"b/{name}": count for name, count in found(wires["b"], keys).items() if name != "remote"}
    expected = dict.fromkeys(PLACES, 0) | {target: NUM} | ({source: NUM} if keeps else {})
    assert here | there == expected
    assert engines[node].look(keys) == list(contents.values())
    for name in "ab":
        wires[name].ask(Clear(Selection(keys)))
    clean(pair)


def clean(pair):
    cluster, _, wires = pair
    for name in "ab":
        status = cluster[name].status()
        assert (status.leases, status.pins) == (0, 0)
        assert {job.state for job in wires[name].ask(Jobs()).jobs} <= {"done", "failed", "cancelled"}
        wait_until(lambda name=name: cluster.is_quiet(name), what="nothing is under way")


def test_what_is_there_already_is_not_copied_again(pair):
    cluster, engines, wires = pair
    contents = contents_of(50)
    put(pair, "a/host", contents)
    run(wires["a"], Move(Selection(list(contents)), "host", "disk", keeps=True))
    before = cluster.counter("a", "disk_stored")
    status = run(wires["a"], Move(Selection(list(contents)), "host", "disk"))
    assert (status.state, status.chunks_done) == ("done", NUM)
    assert cluster.counter("a", "disk_stored") == before
    assert found(wires["a"], contents) == {"host": 0, "disk": NUM, "remote": 0}


def test_what_a_tier_lacks_is_left_where_it_is_and_said(pair):
    _, _, wires = pair
    refused = wires["a"].ask(Move(Selection([key(999_000)]), "disk", "host"))
    assert refused.error == "ChunkMissing"
    assert "none of 1 chunks is in disk; no tier of this node has any" in refused.text
    refused = wires["a"].ask(Move(Selection([key(1)]), "tape", "host"))
    assert refused.error == "TierUnknown"
    assert "'tape'; it has 'host', 'disk', 'remote'" in refused.text
    contents = contents_of(51)
    put(pair, "a/host", contents)
    refused = wires["a"].ask(Move(Selection(list(contents)), "host", "host"))
    assert (refused.error, "moved to itself" in refused.text) == ("ProtocolError", True)
    status = run(wires["a"], Move(Selection(list(contents)), "host", "host", "nobody"))
    assert (status.state, "'nobody'" in status.why) == ("failed", True)
    status = run(wires["a"], Move(Selection(list(contents)), "host", "tape", "b"))
    assert status.state == "failed"
    assert "node 'b' says: this node has no tier 'tape'" in status.why
    assert found(wires["a"], contents)["host"] == NUM


def test_a_pinned_chunk_is_not_moved_away(pair):
    _, _, wires = pair
    contents = contents_of(52)
    put(pair, "a/host", contents)
    what = Selection(list(contents))
    assert wires["a"].ask(PinIn(what, "host")).chunks == NUM
    refused = wires["a"].ask(Move(what, "host", "disk"))
    assert "is pinned in host" in refused.text
    assert run(wires["a"], Move(what, "host", "disk", keeps=True)).state == "done"
    assert wires["a"].ask(PinIn(what, "disk")).chunks == NUM
    assert wires["a"].ask(Find(what)).pinned == {"host": NUM, "disk": NUM}
    for tier in ("host", "disk"):
        assert wires["a"].ask(PinIn(what, tier, pinned=False)).chunks == NUM
    assert wires["a"].ask(Find(what)).pinned == {}
    assert run(wires["a"], Move(what, "host", "disk")).state == "done"


def test_what_is_larger_than_the_arena_passes_through_it(place):
    """64 chunks of a disk to another disk, through an arena that holds eight, with another chunk in it that stays."""
    disks = [str(place / "one"), str(place / "two")]
    names = [f"disk {disk}" for disk in disks]
    contents = contents_of(1, 64, 256 << 10)
    with control_bed(place, nbytes=2 * MIB, disks=disks) as node:
        engine = BedEngine(node)
        for one, data in contents.items():
            engine.save({one: data})
            assert node.run(Move(Selection([one]), "host", names[0])).state == "done"
        assert node.status().chunks == {}
        status = node.run(Move(Selection(list(contents)), names[0], names[1]))
        assert (status.state, status.chunks_done, status.bytes_done) == ("done", 64, 64 * (256 << 10))
        assert found(node.wire, contents) == {"host": 0, names[0]: 0, names[1]: 64}
        assert node.status().chunks == {}
        for one, data in list(contents.items())[::9]:
            assert engine.look([one]) == [data]


def test_a_job_that_is_cancelled_leaves_every_chunk_somewhere(place):
    contents = contents_of(1, 100, 256 << 10)
    with control_bed(place, nbytes=32 * MIB) as node:
        engine, wire = BedEngine(node), node.wire
        engine.save(contents)
        started = wire.ask(Move(Selection(list(contents)), "host", "disk"))
        assert wire.ask(EndJob(started.job)).state == "cancelled"
        assert wire.ask(EndJob(started.job)).state == "cancelled", "again it is the same"
        node.until(lambda: not any(tier.copies for tier in node.status().tiers), what="no copy is under way")
        places = [wire.ask(Find(Selection([one]))).tiers for one in contents]
        assert all(each["host"] + each["disk"] >= 1 for each in places)
        assert node.status().leases == 0
        assert engine.look(list(contents)[:16]) == list(contents.values())[:16]


@pytest.mark.parametrize("dies", ["a", pytest.param("b", marks=pytest.mark.long)])
def test_a_node_that_dies_meanwhile_loses_nothing(place, dies):
    """Sealed chunks in memory die with their node; all else is at the one or the other."""
    with disk_pair(place, arena_bytes=32 * MIB, peer_timeout_s=5.0) as cluster:
        engine, wire = Engine(cluster.address("a")), attached(cluster.address("a"), kind="controller")
        contents = contents_of(1, 60, 256 << 10)
        what = Selection(list(contents))
        engine.save(contents)
        assert run(wire, Move(what, "host", "disk")).state == "done"
        started = wire.ask(Move(what, "disk", "disk", "b"))
        assert started.state == "running"
        wait_until(lambda: cluster.counter("b", "disk_stored") >= 3, what="some have come")
        cluster.nodes[dies].kill()
        if dies == "b":
            status = over(wire, started)
            assert status.state in ("failed", "done")
            if status.state == "failed":
                assert "others are where they were" in status.why or "'b'" in status.why
        engine.close()
        wire.close()
        cluster.start(dies)
        places = {}
        for name in "ab":
            with attached(cluster.address(name), kind="controller") as asker:
                is_counted = lambda asker=asker: asker.status().tiers[0].state != "counting the files"  # noqa: E731
                wait_until(is_counted, what="it is counted")
                for one in contents:
                    tiers = asker.ask(Find(Selection([one]))).tiers
                    places[one] = places.get(one, 0) + sum(tiers.values())
        assert min(places.values()) >= 1


def test_a_peer_has_only_what_no_request_uses_here_stored_and_dropped(pair):
    """`Settle` is a peer's: what it names and requests have found stays in memory."""
    _, engines, wires = pair
    contents = contents_of(54)
    put(pair, "a/host", contents)
    engines["a"].look(list(contents))
    assert run(wires["a"], Move(Selection(list(contents)), "host", "host", "b", True)).state == "done"
    engines["b"].look(list(contents))
    assert run(wires["a"], Move(Selection(list(contents)), "host", "disk", "b")).state == "done"
    assert found(wires["b"], contents) == {"host": NUM, "disk": NUM, "remote": 0}
    refused = wires["a"].ask(Settle(list(contents), 1, "disk"))
    assert isinstance(refused, Refused), "a controller says Move"
    assert isinstance(wires["a"].ask(Find(Selection(list(contents)))), Found)


def test_what_a_client_has_named_reaches_no_store_that_nodes_share(pair):
    cluster, _, wires = pair
    with redis.Redis(port=cluster.server.port) as store:
        before = store.dbsize()
    put_named(cluster["a"], "one", os.urandom(CHUNK_BYTES))
    put_named(cluster["a"], "two", os.urandom(CHUNK_BYTES), push_to="b")
    one, two = (Selection([named_key(name)]) for name in ("one", "two"))
    wait_until(lambda: wires["b"].ask(Find(two)).tiers["host"], what="it is pushed")
    run(wires["a"], Move(one, "host", "disk"))
    refused = [
        wires["a"].ask(Move(one, "disk", "remote")),
        wires["a"].ask(Move(one, "disk", "remote", "b")),
        wires["a"].ask(Move(one, "disk", "host", "b")),
        wires["b"].ask(Move(two, "host", "remote")),
    ]
    assert all(isinstance(each, Refused) and "a client has named" in each.text for each in refused), refused
    run(wires["b"], Move(two, "host", "disk"))
    with redis.Redis(port=cluster.server.port) as store:
        assert store.dbsize() == before


def test_more_than_a_peer_has_room_for_is_moved_there_piece_by_piece(pair):
    _, engines, wires = pair
    engine = engines["a"]
    contents = contents_of(70, 160)  # 10 MiB, by way of 4
    engine.save(contents)
    what = Selection(list(contents))
    status = run(wires["a"], Move(what, "host", "disk", "b"))
    assert (status.state, status.chunks_done, status.why) == ("done", 160, "")
    assert wires["b"].ask(Find(what)).tiers["disk"] == 160
    assert wires["a"].ask(Find(what)).tiers["host"] == 0


def test_what_is_in_a_shared_store_is_not_moved_to_it_by_way_of_another_node(pair):
    """It would be there already, and then be dropped at its source, which is the same store."""
    _, engines, wires = pair
    engine = engines["a"]
    contents = contents_of(71, 4)
    engine.save(contents)
    what = Selection(list(contents))
    run(wires["a"], Move(what, "host", "remote"))
    for source in ("remote", ""):
        answer = wires["a"].ask(Move(what, source, "remote", "b"))
        assert isinstance(answer, Refused), answer
        assert engine.look(list(contents)) == list(contents.values())
        run(wires["a"], Move(what, "host", "remote"))
    wires["a"].ask(Clear(what))


def test_what_a_shared_store_has_already_another_node_says_to_have_there(pair):
    _, engines, wires = pair
    engine = engines["a"]
    contents = contents_of(72, 4)
    engine.save(contents)
    what = Selection(list(contents))
    run(wires["a"], Move(what, "host", "remote", keeps=True))
    status = run(wires["a"], Move(what, "host", "remote", "b"))
    assert (status.state, status.chunks_done, status.why) == ("done", 4, "")
    assert engine.look(list(contents)) == list(contents.values())
    wires["a"].ask(Clear(what))
