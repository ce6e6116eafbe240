"""Two and three real nodes over real channels: pushes while chunks are filled, fetches, and little room."""

import contextlib
import gc
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import service_stage
from connection_stage import Raw
from node_harness import MIB, NodeProcess, attached
from peers_harness import Cluster, LocalCluster, pattern, put, read, why_not

from pdx.config import NodeConfig
from pdx.errors import ChunkExists, ChunkMissing, NodeError
from pdx.memory.keys import named_key
from pdx.node import daemon
from pdx.node.peers.connection import ConnectionState
from pdx.telemetry.names import SOURCES
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Bye, Cancel, Fill, Mark
from pdx.wire.verbs import Clear, Selection

CHUNK = 600 << 10  # one of them fits into an arena of 1 MiB
TRANSFER = "transfer-0123456789"


@pytest.fixture
def cluster_of(place):
    def start(names, up=None, kind=LocalCluster, **settings):
        cluster = stack.enter_context(kind(place, names, **{"channels": ["tcp"], **settings}))
        cluster.start(*(names if up is None else up))
        return cluster

    with contextlib.ExitStack() as stack:
        yield start


class Clock(service_stage.Clock):
    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """That of nodes in this process: it stands still until the test moves it, so that a slow machine makes nothing
    late."""
    made = Clock()
    monkeypatch.setattr(daemon, "Env", partial(daemon.Env, made))
    return made


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("shm", LocalCluster),
        ("tcp", LocalCluster),
        pytest.param("ucx", Cluster, marks=pytest.mark.long),
        pytest.param("nixl", Cluster, marks=pytest.mark.long),
    ],
)
def test_parts_are_across_before_the_last_is_filled(cluster_of, scheme, kind):
    if why := why_not(scheme):
        pytest.skip(why)
    cluster = cluster_of("ab", kind=kind, channels=[scheme])
    a, b = cluster["a"], cluster["b"]
    data = pattern(1, 4 * MIB)
    with a.reserve("x", len(data), parts=4, push_to="b") as chunk:
        for part in range(3):
            chunk.view[part * MIB : (part + 1) * MIB] = data[part * MIB : (part + 1) * MIB]
            chunk.fill(part)
            wait_until(lambda part=part: cluster.counter("b", "landed_bytes") >= (part + 1) * MIB)
        with pytest.raises(ChunkMissing):
            b.get("x")
        chunk.view[3 * MIB :] = data[3 * MIB :]
        chunk.seal()
    assert read(b, "x", wait_s=10.0) == data
    assert cluster.peer("a", "b").channel == scheme
    cluster.settle()
    assert cluster.counter("b", "digest_mismatches") == 0


def test_sealed_chunks_are_pushed_and_fetched_in_both_directions(cluster_of):
    cluster = cluster_of("ab")
    a, b = cluster["a"], cluster["b"]
    sizes = {"one": 1, "odd": 12_345, "large": 3 * MIB}
    for number, (name, nbytes) in enumerate(sizes.items()):
        put(a, f"a-{name}", pattern(number, nbytes))
        put(b, f"b-{name}", pattern(100 + number, nbytes))
    a.push(*[f"a-{name}" for name in sizes], "a-one", to="b")  # one name twice: it is pushed once
    for number, (name, nbytes) in enumerate(sizes.items()):
        assert read(b, f"a-{name}", wait_s=10.0) == pattern(number, nbytes)
        assert read(a, f"b-{name}", wait_s=10.0, source="b") == pattern(100 + number, nbytes)
    assert cluster.counter("b", "wants_served") == len(sizes)
    for name in sizes:
        read(a, f"b-{name}", source="b")
    assert cluster.counter("b", "wants_served") == len(sizes), "they are here now"
    with pytest.raises(ChunkMissing):
        a.get("nothing", source="b", wait_s=0.1)
    with pytest.raises(ChunkMissing):
        a.push("a-one", "nothing", to="b")
    cluster.settle()
    assert [cluster.counter(name, "messages_dropped") for name in "ab"] == [0, 0]


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_nodes_that_are_closed_map_no_arena_any_more(place, scheme):
    """Whoever still holds an object of theirs: memory would come back only when the collector runs."""
    gc.disable()
    try:
        with LocalCluster(place, "ab", channels=[scheme]) as cluster:
            cluster.start("a", "b")
            put(cluster["a"], "x", b"x", push_to="b")
            assert read(cluster["b"], "x", wait_s=10.0) == b"x"
            assert ".arena" in Path("/proc/self/maps").read_text()
        assert ".arena" not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_third_node_gets_what_is_still_landing_at_the_second(cluster_of, is_sealed):
    """Or not, where the source gives up: that ends the push at all nodes."""
    cluster = cluster_of("abc")
    a, b, c = (cluster[name] for name in "abc")
    data = pattern(1, 4 * MIB)
    with a.reserve("x", len(data), parts=4, push_to="b") as chunk:
        chunk.view[:] = data
        chunk.fill(0)
        wait_until(lambda: cluster.counter("b", "landed_bytes") >= MIB)
        with pytest.raises(ChunkExists):
            b.reserve("x", len(data), parts=4, push_to="c")
        wait_until(lambda: cluster.counter("c", "landed_bytes") >= MIB)
        if is_sealed:
            chunk.seal()
    assert not is_sealed or read(c, "x", wait_s=10.0) == data
    cluster.settle()
    assert is_sealed or [cluster[name].status().chunks for name in "abc"] == [{}] * 3


def test_a_name_that_is_pushed_anew_has_no_older_bytes_on_the_peers_disk(cluster_of, place):
    disk = {"disks": [str(place / "disk")], "disk_limit_bytes": 64 * MIB, "disk_reserve_bytes": 0}
    cluster = cluster_of("ab", of_one={"b": disk})
    a, b = cluster["a"], cluster["b"]
    with attached(cluster.address("b"), kind="controller") as controller:
        for stored, data in enumerate((pattern(1, CHUNK), pattern(2, CHUNK)), 1):
            a.delete("weights")
            put(a, "weights", data, push_to="b")
            wait_until(lambda stored=stored: cluster.counter("b", "offers") == stored, what="b has heard of it")
            assert read(b, "weights", wait_s=20.0) == data
            wait_until(lambda stored=stored: cluster.counter("b", "disk_stored") == stored, what="it is on the disk")
            controller.ask(Clear(Selection([named_key("weights")], 1), "host"))
            assert read(b, "weights", wait_s=20.0) == data, "from the disk"
            wait_until(lambda: not b.status().leases, what="nobody reads it")
            controller.ask(Clear(Selection([named_key("weights")], 1), "host"))
    cluster.settle()


def test_names_that_no_roster_has(cluster_of):
    cluster = cluster_of("a")
    a = cluster["a"]
    put(a, "x", b"x", push_to="nobody")
    assert cluster.counter("a", "push_impossible") == 1
    with pytest.raises(NodeError):
        a.push("x", to="nobody")
    with pytest.raises(ChunkMissing):
        a.get("y", source="nobody", wait_s=0.1)
    a.push("x", to="a")
    assert read(a, "x", source="a") == b"x"


def test_a_peer_that_was_there_and_left_is_forgotten(place):
    """Also by who asked for the status meanwhile."""
    node = NodeProcess(
        NodeConfig(address=f"ipc://{place}/node.sock", arena_bytes=8 * MIB, channels=["tcp"])
    ).wait_ready()
    with Raw(None, SimpleNamespace(connections=SimpleNamespace(address=f"{node.address}.peers"))) as peer:
        peer.hello(name="guest")
        wait_until(peer.hear)
        assert [each.name for each in node.status().peers] == ["guest"]
        peer.send(Bye())
        wait_until(lambda: not node.status().peers)
    node.close()


def test_a_peer_that_is_not_there(place, clock):
    with LocalCluster(place, "ab", channels=["shm"]) as cluster:
        cluster.start("a")
        put(cluster["a"], "x", b"x", push_to="b")
        wait_until(lambda: clock.passes(1.0) or cluster.counter("a", "peers_lost"), what="nobody is heard")
        with pytest.raises(ChunkMissing):
            cluster["a"].get("y", source="b", wait_s=0.1)
        wait_until(lambda: clock.passes(1.0) or cluster.is_quiet("a"), what="the push is given up")
        wait_until(lambda: clock.passes(1.0) or cluster.peer("a", "b").state == ConnectionState.DIALING)
        cluster.start("b")
        wait_until(lambda: cluster.peer("a", "b").state == ConnectionState.READY)
        cluster["a"].push("x", to="b")
        assert read(cluster["b"], "x", wait_s=10.0) == b"x"


def test_a_full_peer_gets_it_when_there_is_room(cluster_of):
    cluster = cluster_of("ab", of_one={"b": {"arena_bytes": MIB}}, grant_s=30.0)
    a, b = cluster["a"], cluster["b"]
    put(b, "old", pattern(1, CHUNK))
    with b.get("old"):
        put(a, "new", pattern(2, CHUNK), push_to="b")
        wait_until(lambda: cluster.counter("b", "reserve_full"), what="it has asked for room")
        assert b.lookup(["new"]) == 0
    assert read(b, "new", wait_s=10.0) == pattern(2, CHUNK)
    assert b.lookup(["old"]) == 0
    cluster.settle()


def test_64_at_once_with_room_for_one_chunk_all_come_to_an_end(cluster_of):
    cluster = cluster_of("ab", of_one={"a": {"arena_bytes": 64 * MIB}, "b": {"arena_bytes": MIB}}, grant_s=30.0)
    a, b = cluster["a"], cluster["b"]
    outcomes = {}

    def one(number):
        data = pattern(number, CHUNK)
        put(a, f"chunk-{number}", data, parts=3, push_to="b")
        try:
            outcomes[number] = read(b, f"chunk-{number}", wait_s=0.2) == data
        except ChunkMissing:
            outcomes[number] = True  # it was there, or will be, but another took its place

    threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == dict.fromkeys(range(64), True)
    wait_until(lambda: cluster.counter("a", "granted_chunks") == 64, what="each gets its turn")
    cluster.settle()
    assert cluster.counter("b", "sealed") == 64
    b.delete(*[f"chunk-{number}" for number in range(64)])
    assert b.status().free_bytes == MIB


@pytest.mark.parametrize("where", ["a", "b"])
def test_a_transfer_that_is_cancelled_ends_at_both_nodes(cluster_of, where):
    cluster = cluster_of("ab")
    keys = [bytes([number]) * 16 for number in range(2)]
    with attached(cluster.address("a")) as prefill, attached(cluster.address("b")) as decode:
        reserved = prefill.ask(Admit(keys, 2 * MIB, layers=2, transfer=TRANSFER, push_to="b", part="writes"))
        prefill.ask(Fill(reserved.granted_slots, 0))
        wait_until(lambda: cluster.counter("b", "landed_bytes") >= 2 * MIB)
        ask = Admit(keys, transfer=TRANSFER, lease_s=1.0)
        assert decode.ask(ask).waiting
        (prefill if where == "a" else decode).ask(Cancel(TRANSFER))
        wait_until(lambda: not decode.ask(ask).waiting)
        cluster.settle("b")
        assert decode.status().free_bytes == cluster["b"].status().arena_bytes
        wait_until(lambda: cluster.peer("a", "b").pushes == 0)
        prefill.ask(Fill(reserved.granted_slots, 1, seal=True))
    cluster.settle()
    assert cluster["b"].status().chunks == {}


@pytest.mark.parametrize("is_up", [False, True], ids=["not up yet", "up"])
def test_a_transfer_that_ended_before_it_was_offered_is_not_waited_for(cluster_of, is_up):
    """Its prefill was aborted before a channel between the two nodes was chosen."""
    cluster = cluster_of("ab", up="ab" if is_up else "a")
    keys = [bytes([number]) * 16 for number in range(2)]
    with attached(cluster.address("a")) as prefill:
        prefill.ask(Admit(keys, MIB, layers=2, transfer=TRANSFER, push_to="b", part="writes"))
        prefill.ask(Cancel(TRANSFER))
        if not is_up:
            cluster.start("b")
        with attached(cluster.address("b")) as decode:
            # Longer than `ask` waits for an answer: only what node a says ends the waiting.
            answer = decode.ask(Admit(keys, transfer=TRANSFER, part="expects", lease_s=5.0, wait_s=60.0))
    assert (answer.hits, answer.waiting) == (0, False)
    cluster.settle()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_prefill_is_pushed_once_and_found_by_the_decoder(cluster_of, is_over):
    """`is_over`: it is pushed before its engine says that prefill has ended."""
    cluster = cluster_of("ab")
    keys = [bytes([number]) * 16 for number in range(3)]
    with attached(cluster.address("a")) as prefill, attached(cluster.address("b")) as decode:
        reserve = Admit(keys, MIB, layers=2, tail_nbytes=5000, transfer=TRANSFER, push_to="b", part="writes")
        reserved = prefill.ask(reserve)
        assert prefill.ask(reserve).granted == []
        end = Mark(TRANSFER, "prefill_end", time.monotonic_ns() - 10**9)
        if not is_over:
            prefill.ask(end)
        prefill.ask(Fill(reserved.granted_slots, 0, 2, seal=True))
        ask = Admit(keys, lease_s=5.0, transfer=TRANSFER)
        found = wait_until(lambda: (got := decode.ask(ask)).hits == 3 and not got.waiting and got)
        assert [slot.nbytes for slot in found.slots] == [MIB, MIB, 5000]
        assert [SOURCES[source] for source in found.sources[:3]] == ["peer"] * 3
        assert decode.ask(Admit(keys[:2], lease_s=5.0)).sources == b"", "the second request finds them in memory"
        wait_until(lambda: cluster.counter("a", "peer_stored_bytes") == 2 * MIB + 5000)
        assert cluster.counter("a", "copies") == 1
        if is_over:
            cluster.settle()
            prefill.ask(end)
    cluster.settle()
    timings = cluster.nodes["a"].daemon.env.timings
    handoffs = timings[("pdx_node_handoff_seconds",)]
    assert (sum(handoffs.counts), handoffs.sum > 1.0, handoffs.sum == 0) == (1, not is_over, is_over)
    assert sum(timings["pdx_node_copy_seconds", "peer", "store"].counts) == 1
    assert cluster["a"].status().chunk_bytes == {"sealed": 2 * MIB}, "the tail was for the push"
    assert cluster["b"].status().chunk_bytes == {"sealed": 2 * MIB}, "and there for the decoder"
