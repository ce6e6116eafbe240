"""Engines that no proxy places: their node asks its peers what they have of a prompt, and fetches the most of it."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
from connection_stage import Raw
from kept import kept
from node_harness import MIB, NodeThread, attached
from peers_harness import ARENA, LocalCluster, put

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES as G
from pdx.memory.rules import needed
from pdx.node import daemon
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Delete, Done, Fill, Group, Ping, Push, Release, decode_peer
from pdx.wire.verbs import Why

COUNT = 6
KEYS = [bytes([at + 1]) * 16 for at in range(COUNT)]
PATIENT = {"peer_lookup_s": 20.0}  # a slow machine makes nobody late


@pytest.fixture
def standing(monkeypatch, clock):
    """The clock of nodes in this process: it stands still until the test moves it, so that nobody is late by itself."""
    monkeypatch.setattr(daemon, "Env", partial(daemon.Env, clock))
    return clock


@pytest.fixture
def cluster(place):
    with LocalCluster(place, "abc", channels=["tcp"], **PATIENT) as made:
        made.start("a", "b", "c")
        wait_connected(made, "abc")
        yield made


def wait_connected(cluster, names):
    def are_all() -> bool:
        states = [cluster.peer(name, other) for name in names for other in names if other != name]
        return all(peer is not None and peer.state == "ready" for peer in states)

    wait_until(are_all, what="all know each other")


def engine(cluster, name):
    return attached(cluster.address(name), kind="scheduler", engine=f"engine-{name}")


def store(cluster, name, keys):
    with attached(cluster.address(name)) as client:
        granted = client.ask(Admit(keys, nbytes=G, layers=1)).granted_slots
        client.ask(Fill(granted, layers=1, seal=True))


def question(keys=KEYS, **fields):
    return Admit(keys, lease_s=5.0, wait_s=20.0, part="keeps", request="r", **fields)


def look(scheduler, keys=KEYS, **fields):
    return hits(scheduler, scheduler.ask(question(keys, **fields)))


def hits(scheduler, answer):
    if answer.lease:
        scheduler.ask(Release(answer.lease))
    assert not answer.waiting
    return answer.hits


def test_a_prompt_is_fetched_from_the_peer_that_has_most_of_it(cluster):
    store(cluster, "b", KEYS[:2])
    store(cluster, "c", KEYS[:5])
    with engine(cluster, "a") as a:
        assert look(a) == 5
        assert look(a) == 5
    assert [cluster.counter(name, "wants_served") for name in "bc"] == [0, 1]
    assert cluster.counter("a", "peer_lookups") == 1
    cluster.settle()


def test_what_is_here_counts(cluster):
    store(cluster, "a", KEYS[:3])
    store(cluster, "b", KEYS[:3])
    with engine(cluster, "a") as a:
        assert look(a) == 3, "nobody has more"
        store(cluster, "c", KEYS[:4])
        assert look(a, KEYS[:5]) == 4, "another prompt is another question"
        assert look(a, KEYS[:4]) == 4
    assert [cluster.counter(name, "wants_served") for name in "bc"] == [0, 1]
    assert cluster.counter("a", "peer_lookups") == 2
    assert cluster.counter("c", "copies") == 1
    cluster.settle()


def test_nobody_is_asked_where_a_client_or_a_leg_asks_or_computing_is_faster(cluster):
    store(cluster, "b", KEYS)
    with (
        engine(cluster, "a") as a,
        attached(cluster.address("a"), kind="worker", engine="engine-a") as worker,
        attached(cluster.address("a")) as client,
    ):
        assert look(client) == 0, "its keys are names"
        assert a.ask(Admit(KEYS, lease_s=5.0)).hits == 0, "it does not wait"
        assert look(a, source="a") == 0, "a proxy says that nobody has more"
        worker.ask(Ping(chunk_s=1e-6))
        assert look(a) == 0
        assert cluster.counter("a", "peer_lookups") == 0
        worker.ask(Ping(chunk_s=60.0))
        assert look(a) == COUNT
    cluster.settle()


def test_an_answer_says_why_a_peer_that_has_it_was_not_asked_for_it(standing, cluster):
    store(cluster, "b", KEYS)
    with engine(cluster, "a") as a, attached(cluster.address("a"), kind="worker", engine="engine-a") as worker:
        assert look(a, KEYS[:1]) == 1
        wait_until(lambda: not cluster.peer("a", "b").landing, what="b has said that all was written, so it is known")
        a.ask(Delete(KEYS))
        worker.ask(Ping(chunk_s=1.0))
        now_ns = int(standing() * 1e9)
        cluster.nodes["a"].daemon.service.peers.fetches._rates["b"].moved(1, now_ns, now_ns + 60 * 10**9)
        assert look(a, KEYS[:5]) == 0
        reasons = a.ask(Why("r")).requests[0].reasons
    assert reasons[-1].text.startswith("not asked of node b: it would take")


@pytest.fixture
def cluster_with_disk(place):
    (place / "disk").mkdir(mode=0o700)
    disk = {"b": {"disks": [str(place / "disk")], "disk_reserve_bytes": 0, "peer_share": 4.5 * G / ARENA}}
    with LocalCluster(place, "ab", of_one=disk, channels=["tcp"], **PATIENT) as made:
        made.start("a", "b")
        wait_connected(made, "ab")
        yield made


def on_disk(cluster, keys):
    """Node b has these, and none of them in memory."""
    store(cluster, "b", keys)
    wait_until(lambda: cluster.counter("b", "disk_stored") == len(keys), what="all are on the disk")
    cluster.nodes["b"].close()
    cluster.start("b")
    wait_connected(cluster, "ab")
    return cluster.nodes["b"].daemon.service


@pytest.mark.parametrize("in_memory", [0, 2])
def test_what_a_peer_has_on_its_disk_is_loaded_there_and_fetched(cluster_with_disk, in_memory):
    cluster = cluster_with_disk
    on_disk(cluster, KEYS)
    with engine(cluster, "b") as b:
        assert not in_memory or look(b, KEYS[:in_memory]) == in_memory
    with engine(cluster, "a") as a:
        assert look(a, KEYS[:4]) == 4
        assert look(a, KEYS[:4]) == 4
        assert cluster.counter("b", "disk_loaded") == 4
        wait_until(lambda: cluster.is_quiet("b"), what="b knows that all of them have landed")
        assert look(a, KEYS[4:]) == 2, "what is loaded for peers at once is bounded, and those are not any more"
    assert cluster.counter("b", "wants_served") == 2
    cluster.settle("a")


def test_what_is_loaded_for_peers_has_one_bound_for_all_questions(standing, cluster_with_disk, monkeypatch):
    """Each question had a share of its own: two disjoint prompts took all memory."""
    cluster = cluster_with_disk
    service, jobs = on_disk(cluster, KEYS), []
    ((disk,),) = service.tiers.below
    monkeypatch.setattr(disk, "load", jobs.append)  # it hangs
    with engine(cluster, "a") as a:
        a.tell(Admit(KEYS[:4], lease_s=5.0, wait_s=20.0, part="keeps", request="first"))
        wait_until(lambda: sum(len(job.parts) for job in jobs) == 4, what="its disk is asked")
        assert look(a, KEYS[4:]) == 0
        assert sum(len(job.parts) for job in jobs) == 4
        standing.now += service.config.fetch_s
        wait_until(lambda: not kept(service.peers)["Load"], what="they are given up")
    assert cluster.counter("b", "wants_served") == 0


# ---- of several cache groups ----------------------------------------------------------------

GROUPS = [
    Group(nbytes=4 * G, layers=4),
    Group(reach=2, tail_reach=1, nbytes=2 * G, layers=2),
    Group(reach=1, tail_reach=0, nbytes=3 * G, layers=1),
]
OF_GROUPS = [bytes([group + 1, chunk + 1]) * 8 for group in range(len(GROUPS)) for chunk in range(COUNT)]


def test_of_several_groups_the_longest_part_that_can_be_restored_counts(cluster):
    """And not the number of chunks: a state alone is of no use, and of a window few are needed."""
    gone = {"b": [(0, 5), (1, 2), (2, 3)], "c": [(0, 4)]}  # all full chunks but the last; few, and all of the others
    for name in "bc":
        with (
            attached(cluster.address(name), kind="scheduler", engine="e") as scheduler,
            attached(cluster.address(name), kind="worker", engine="e") as worker,
        ):
            granted = scheduler.ask(Admit(OF_GROUPS, groups=GROUPS, part="writes"))
            for slot, at in zip(granted.granted_slots, granted.granted, strict=True):
                worker.ask(Fill([slot], 0, GROUPS[at // COUNT].layers, seal=True))
            scheduler.ask(Delete([OF_GROUPS[group * COUNT + chunk] for group, chunk in gone[name]]))
    sizes = [Group(reach=each.reach, tail_reach=each.tail_reach, layers=each.layers, nbytes=0) for each in GROUPS]
    with engine(cluster, "a") as a:
        assert look(a, OF_GROUPS, groups=sizes) == 5
        here = [at for at, key in enumerate(OF_GROUPS) if a.ask(Admit([key])).hits]
        assert here == [*needed(GROUPS, COUNT, 5, has_tail=False)]
        assert look(a, OF_GROUPS, groups=sizes) == 5
    assert [cluster.counter(name, "wants_served") for name in "bc"] == [1, 0]
    cluster.settle()


# ---- peers that do not keep their word --------------------------------------------------------


def test_a_peer_that_is_stopped_is_waited_for_once_and_not_long(place, standing):
    stopped, go_on = threading.Event(), threading.Event()
    with LocalCluster(place, "abc", channels=["tcp"], peer_lookup_s=0.2) as cluster:
        cluster.start("a", "b", "c")
        wait_connected(cluster, "abc")
        store(cluster, "c", KEYS[:4])
        cluster.nodes["b"].daemon.env.mailbox.post(lambda: stopped.set() or go_on.wait(60))
        assert stopped.wait(60)
        try:
            with engine(cluster, "a") as a:
                number = a.tell(question(), reply=True)
                wait_until(lambda: cluster.counter("a", "peer_lookups"), what="they are asked")
                put(cluster["a"], "later", b"x", push_to="c")
                wait_until(lambda: cluster["c"].lookup(["later"]), what="c has answered what came before it")
                standing.now += 0.2
                seq, answer = a.answer()
                assert (seq, hits(a, answer)) == (number, 4), "of those that have answered"
                assert cluster.counter("a", "peer_lookups_late") == 1
                for at in range(1, COUNT):
                    assert look(a, [bytes([at, 8]) * 8]) == 0
                assert cluster.counter("a", "peer_lookups") == COUNT
                assert cluster.counter("a", "peer_lookups_late") == 1
        finally:
            go_on.set()
        store(cluster, "b", [b"x" * 16])
        with engine(cluster, "a") as a:  # its late answer has come: it is asked again
            keys = iter(bytes([at, 7]) * 8 for at in range(256))
            wait_until(lambda: look(a, [b"x" * 16, next(keys)]) or a.ask(Delete([b"x" * 16])) and None)


class Liar:
    """A peer that says that it has as many chunks as it is told to say, and has none."""

    def __init__(self, address, count, kept):
        self.raw = Raw(None, SimpleNamespace(connections=SimpleNamespace(address=f"{address}.peers")))
        self.raw.hello(name="liar")
        self.count, self.kept, self.asked = count, kept, []
        wait_until(self.raw.hear, what="it is let in")

    def serve(self):
        """Answer what has come."""
        while self.raw.socket.poll(0):
            frame = decode_peer(self.raw.socket.recv())
            if isinstance(frame.body, Push):
                self.asked.append(frame.body)
                is_question = frame.body.dry_run
                if is_question or self.kept:
                    self.raw.send(Done(self.count if is_question else 0), frame.about)
            self.raw.send(Ping())


@pytest.mark.parametrize(("count", "asks"), [(0, 1), (1 << 19, 2)])
def test_a_peer_that_has_not_what_it_says_costs_its_answers(place, standing, count, asks):
    node = NodeThread(NodeConfig(address=f"ipc://{place}/node.sock", arena_bytes=8 * MIB, channels=["tcp"]))
    liar = Liar(node.address, count, kept=True)
    try:
        with attached(node.address, kind="scheduler", engine="e") as a:
            number = a.tell(Admit(KEYS, lease_s=5.0, wait_s=20.0, part="keeps"), reply=True)

            def answered():
                liar.serve()
                return a.answer(0.01)

            seq, answer = wait_until(answered, what="the request goes on")
            assert (seq, answer.hits, answer.waiting) == (number, 0, False)
            assert [push.dry_run for push in liar.asked] == [True, False][:asks]
            assert look(a) == 0, "it was found out: no answer of it is waited for, which would take for ever"
            assert len(liar.asked) == asks
    finally:
        liar.raw.close()
        node.close()
