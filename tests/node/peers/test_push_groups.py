"""Prompts of several cache groups between two nodes: handoffs, and what one fetches from the other."""

import contextlib

import msgspec
import pytest
from node_harness import attached
from peers_harness import ARENA, LocalCluster

from pdx.memory.arena import GRANULE_BYTES as G
from pdx.memory.rules import needed
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Abort, Admit, Delete, Fill, Group, Push, Release

COUNT = 8
GROUPS = [
    Group(nbytes=4 * G, layers=4, tail_nbytes=2 * G),
    Group(reach=2, tail_reach=1, nbytes=2 * G, layers=2, tail_nbytes=G),
    Group(reach=1, tail_reach=0, nbytes=3 * G, layers=1, tail_nbytes=3 * G),
]
KEYS = [bytes([group + 1, chunk + 1]) * 8 for group in range(len(GROUPS)) for chunk in range(COUNT)]
TRANSFER = "transfer-0123456789"


def sized(groups, **changes):
    return [Group(**{**{name: getattr(each, name) for name in Group.__struct_fields__}, **changes}) for each in groups]


@contextlib.contextmanager
def engines(cluster):
    """An engine at each node: its scheduler's and its worker's connection."""
    with contextlib.ExitStack() as stack:
        yield {
            name: [
                stack.enter_context(attached(cluster.address(name), kind=kind, engine=f"engine-{name}"))
                for kind in ("scheduler", "worker")
            ]
            for name in "ab"
        }


@pytest.fixture
def cluster(place):
    with LocalCluster(place, "ab", channels=["tcp"]) as made:
        made.start("a", "b")
        yield made


@pytest.fixture
def at(cluster):
    with engines(cluster) as found:
        yield found


def places(indices):
    return [divmod(index, COUNT) for index in indices]


def here(scheduler):
    """Which (group, chunk) a node has."""
    return [divmod(at, COUNT) for at, key in enumerate(KEYS) if scheduler.ask(Admit([key])).hits]


def fill(worker, slots, groups):
    for slot, (group, _) in zip(slots, groups, strict=True):
        worker.ask(Fill([slot], 0, GROUPS[group].layers, seal=True))


def test_a_handoff_moves_what_the_whole_prompt_needs_of_each_group(cluster, at):
    (prefill, worker), (decode, _) = at["a"], at["b"]
    written = prefill.ask(
        Admit(KEYS, groups=GROUPS, transfer=TRANSFER, part="writes", push_to="b", lease_s=20.0, partial=True)
    )
    assert len(written.granted) == len(KEYS)
    assert written.by_layer
    asked = Admit(KEYS, groups=sized(GROUPS, nbytes=0), transfer=TRANSFER, part="expects", lease_s=20.0, wait_s=30.0)
    number = decode.tell(asked, reply=True)
    fill(worker, written.granted_slots, places(written.granted))
    seq, answer = decode.answer()
    needs = places(needed(GROUPS, COUNT, COUNT, has_tail=True))
    assert (seq, answer.hits, answer.waiting) == (number, COUNT, False)
    sizes = [GROUPS[group].tail_nbytes if chunk == COUNT - 1 else GROUPS[group].nbytes for group, chunk in needs]
    assert [slot.nbytes for slot in answer.slots] == sizes
    assert here(decode) == needs, "no other chunk of the window, and no other state, was moved"
    assert cluster.counter("b", "offers") == len(GROUPS), "one of each size"
    decode.ask(Release(answer.lease))
    cluster.settle()
    assert cluster.clients["b"].status().transfers == cluster.clients["a"].status().transfers == 0


def test_a_transfer_of_several_pushes_is_over_with_the_last(cluster, at):
    """The window's push ends long before the full group's."""
    (prefill, worker), (decode, _) = at["a"], at["b"]
    written = prefill.ask(Admit(KEYS, groups=GROUPS, transfer=TRANSFER, part="writes", push_to="b", partial=True))
    slots = list(zip(written.granted_slots, places(written.granted), strict=True))
    later = [pair for pair in slots if pair[1][0] == 0]
    fill(worker, *zip(*[pair for pair in slots if pair[1][0]], strict=True))
    wait_until(lambda: len(here(decode)) == 3, what="the window and the state are across")
    asked = Admit(KEYS, groups=sized(GROUPS, nbytes=0), transfer=TRANSFER, lease_s=20.0)
    answer = decode.ask(asked)
    assert (answer.hits, answer.waiting) == (0, True)
    number = decode.tell(msgspec.structs.replace(asked, wait_s=30.0), reply=True)
    fill(worker, *zip(*later, strict=True))
    seq, answer = decode.answer()
    assert (seq, answer.hits) == (number, COUNT)
    decode.ask(Release(answer.lease))
    cluster.settle()


def test_where_there_is_room_for_a_part_alone_that_part_can_be_restored(cluster, at):
    (prefill, worker), (decode, _) = at["a"], at["b"]
    room = sum(group.nbytes for group in GROUPS) * 3
    taken = prefill.ask(Admit([b"somebody else's!"], nbytes=ARENA - room, layers=1, part="writes"))
    written = prefill.ask(Admit(KEYS, groups=GROUPS, transfer=TRANSFER, part="writes", push_to="b", partial=True))
    assert (written.full, places(written.granted)) == (True, [(group, at) for group in range(3) for at in range(3)])
    ask = Admit(KEYS, groups=sized(GROUPS, nbytes=0), transfer=TRANSFER, part="expects", lease_s=20.0, wait_s=30.0)
    number = decode.tell(ask, reply=True)
    fill(worker, written.granted_slots, places(written.granted))
    seq, answer = decode.answer()
    assert (seq, answer.hits) == (number, 3)
    assert here(decode) == places(needed(GROUPS, COUNT, 3, has_tail=True))
    decode.ask(Release(answer.lease))
    prefill.ask(Abort(taken.granted_slots, unused=True))
    cluster.settle()


@pytest.mark.parametrize(("gone", "hits"), [([], 8), ([(1, 7), (2, 6)], 6), ([(2, chunk) for chunk in range(8)], 0)])
def test_of_a_peer_the_longest_part_that_it_has_is_fetched(cluster, at, gone, hits):
    (scheduler, worker), (asker, _) = at["a"], at["b"]
    groups = sized(GROUPS, tail_nbytes=0)
    stored = scheduler.ask(Admit(KEYS, groups=groups, part="writes"))
    fill(worker, stored.granted_slots, places(stored.granted))
    scheduler.ask(Delete([KEYS[group * COUNT + chunk] for group, chunk in gone]))
    ask = Admit(KEYS, groups=sized(groups, nbytes=0), lease_s=20.0, wait_s=20.0, source="a")
    answer = asker.ask(ask)
    assert (answer.hits, answer.waiting) == (hits, False)
    assert here(asker) == places(needed(groups, COUNT, hits, has_tail=False))
    if answer.lease:
        asker.ask(Release(answer.lease))
    cluster.settle()
    assert cluster.counter("a", "wants_served") == bool(hits)


def test_a_peer_says_that_groups_make_no_sense(cluster, at):
    """It is dropped, and the connection stays."""
    b = cluster.nodes["b"].daemon
    wait_until(lambda: cluster.peer("b", "a").state == "ready", what="they know each other")
    peer = b.service.peers.connections.of("a")
    b.env.mailbox.post(lambda: peer.send(Push(KEYS[:7], groups=GROUPS), 77))
    wait_until(lambda: cluster.counter("a", "messages_dropped"), what="it was dropped")
    assert cluster.peer("b", "a").state == "ready"
