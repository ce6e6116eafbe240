"""A peer dies, or stops and goes on, in the middle of a push: nobody hangs, nothing stays held, no byte is wrong."""

import signal
import threading

import pytest
from node_harness import MIB, is_stopped
from peers_harness import ARENA, Cluster, pattern, put, read

from pdx.node.peers.connection import ConnectionState
from pdx.testing.waiting import wait_until

pytestmark = pytest.mark.long

SILENCE_S = 3.0  # a machine that takes a core away for a second does not make a peer silent


@pytest.fixture(params=["shm", "tcp"])
def cluster(request, place):
    """Two nodes that take each other for lost after some seconds."""
    with Cluster(place, "ab", channels=[request.param], peer_timeout_s=SILENCE_S) as made:
        made.start("a", "b")
        yield made


def half(cluster, name="x"):
    """A push of 4 MiB of which half is across."""
    chunk = cluster["a"].reserve(name, 4 * MIB, parts=4, push_to="b")
    data = pattern(7, 4 * MIB)
    chunk.view[: 2 * MIB] = data[: 2 * MIB]
    before = cluster.counter("b", "landed_bytes")
    chunk.fill(0)
    chunk.fill(1)
    wait_until(lambda: cluster.counter("b", "landed_bytes") >= before + 2 * MIB)
    return chunk, data


def complete(chunk, data):
    chunk.view[2 * MIB :] = data[2 * MIB :]
    chunk.seal()


def freeze(node):
    node.signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(node.pid))


def works_again(cluster, seed):
    """A push and a fetch in each direction, with the right bytes."""
    for source, target in ("ab", "ba"):
        name = f"again-{source}-{seed}"
        data = pattern(seed, MIB)
        put(cluster[source], name, data)
        assert read(cluster[target], name, source=source, wait_s=30.0) == data


def test_the_receiver_is_killed_and_started_again(cluster):
    chunk, data = half(cluster)
    cluster.nodes["b"].kill()
    wait_until(lambda: cluster.counter("a", "copies_lost"), what="the sender notices")
    wait_until(lambda: cluster.peer("a", "b").pushes == 0)
    complete(chunk, data)
    assert read(cluster["a"], "x") == data, "the chunk is what it was, here"
    cluster.start("b")
    wait_until(lambda: cluster.peer("a", "b").state == ConnectionState.READY)
    cluster["a"].push("x", to="b")
    assert read(cluster["b"], "x", wait_s=30.0) == data
    works_again(cluster, 1)
    cluster.settle()
    assert cluster["a"].delete("x", "again-a-1", "again-b-1") == 3
    assert cluster["a"].status().free_bytes == ARENA, "nothing is held for a push that is over"


def test_the_sender_is_killed_and_started_again(cluster):
    half(cluster)
    cluster.nodes["a"].kill()
    cluster.settle("b", timeout_s=30.0)
    assert cluster["b"].status().chunks == {}, "what was not whole is not there"
    assert cluster["b"].status().free_bytes == ARENA
    cluster.start("a")
    works_again(cluster, 2)
    cluster.settle()


def test_the_receiver_stops_for_longer_than_it_may_be_silent(cluster):
    chunk, data = half(cluster)
    node = cluster.nodes["b"]
    freeze(node)
    complete(chunk, data)
    wait_until(lambda: cluster.counter("a", "copies_lost"))
    wait_until(lambda: cluster.peer("a", "b").pushes == 0, what="nobody waits for it")
    node.signal(signal.SIGCONT)
    cluster.settle("b", timeout_s=30.0)
    if cluster["b"].lookup(["x"]):
        assert read(cluster["b"], "x") == data
    works_again(cluster, 3)
    cluster.settle()


def test_the_sender_stops_and_its_late_writes_harm_nobody(cluster):
    """Its room is given away meanwhile, to others that write something else there."""
    chunk, data = half(cluster)
    node = cluster.nodes["a"]
    writer = threading.Thread(target=complete, args=(chunk, data))
    before, before_b = (cluster.counter(name, "peers_lost") for name in "ab")
    freeze(node)
    wait_until(lambda: cluster.counter("b", "peers_lost") > before_b)
    cluster.settle("b", timeout_s=30.0)
    others = {f"other-{number}": pattern(50 + number, 4 * MIB - 4096) for number in range(4)}
    for name, other in others.items():
        put(cluster["b"], name, other)
    writer.start()
    node.signal(signal.SIGCONT)
    writer.join()
    wait_until(lambda: cluster.counter("a", "peers_lost") > before, what="it hears that its session is over")
    cluster.settle("a", timeout_s=30.0)
    for name, other in others.items():
        assert read(cluster["b"], name) == other
    cluster["b"].delete(*others)
    cluster["a"].push("x", to="b")
    assert read(cluster["b"], "x", wait_s=30.0) == data
    works_again(cluster, 4)
    cluster.settle()
