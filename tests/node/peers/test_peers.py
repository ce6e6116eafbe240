"""What peers that dialled may ask for: what is here, as far as it may be held for one of them."""

from types import SimpleNamespace

import pytest
from push_stage import FakeSession, Granted, SendingStage, key

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.slot import Slot
from pdx.node.peers import peers as module
from pdx.node.peers.connection import ConnectionState, Ending
from pdx.node.peers.peers import Peers
from pdx.node.peers.regions import Regions
from pdx.node.sessions import Sessions
from pdx.store.copy import Priority
from pdx.store.tiers import Tiers
from pdx.store.transfers import Transfers
from pdx.wire.messages import Push, Settle
from pdx.wire.verbs import Found

TRANSFER = "transfer-0123456789"


class Stage(SendingStage):
    """A store of 16 granules, beside another arena, whose chunks `b` asks for."""

    def __init__(self, folder):
        super().__init__(folder, granules=16, other_granules=16)
        self.config = NodeConfig(address=f"ipc://{folder}/node.sock", name="a", peer_share=0.5)
        self.sessions, self.epoch, self.marks = Sessions(), 1, []
        self.transfers = Transfers(self.env)
        self.tiers = Tiers(self.store, self.copies, self.env, store_s=1.0, load_s=1.0)
        self.peers = Peers(self, Regions(self.config, self.env, self.arena, Slot(0, 4096, 0)))
        self.peer_tiers = self.peers.tiers
        self.peers.tiers = SimpleNamespace(
            is_pushing=lambda transfer, name: self.copies.of_transfer(transfer, self.way) is not None,
            push=self.push,
            look=lambda name: self.way,
        )
        self.peer = FakeSession(1, "b")

    def close(self):
        self.peers.tiers = self.peer_tiers
        self.peers.close()
        self.sessions.close()
        super().close()

    def push(self, name, keys, shards, *, transfer, layout, want):
        return self.copies.store(
            self.way,
            keys,
            shards,
            priority=Priority.HANDOFF,
            deadline=self.now + 60.0,
            transfer=transfer,
            layout=layout,
            want=want,
        )

    def want(self, numbers, number=1, **fields):
        """The answer to a question for these chunks."""
        self.peers.message(self.peer, Push([key(number) for number in numbers], **fields), number)
        assert self.peer.abouts[-1] == number
        return self.peer.sent[-1].count


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.close()


def seal(stage, numbers):
    slots = stage.reserve(numbers, GRANULE_BYTES)
    stage.fill(slots, 0, 1, seal=True)
    return slots


def test_what_is_sealed_is_pushed_and_of_a_transfer_also_what_is_being_filled(stage):
    seal(stage, [0, 1])
    stage.reserve([2], GRANULE_BYTES)
    assert stage.want([0, 1, 2, 3]) == 2
    assert stage.want([0, 1, 2, 3], 2, transfer=TRANSFER) == 3
    assert stage.want([0, 1, 2, 3], 3, transfer=TRANSFER) == 4
    assert stage.want([5], 4) == 0
    assert stage.counters["wants_served"] == 2


def test_what_a_peer_has_held_is_at_most_its_share_of_the_arena(stage):
    """Held chunks cannot be evicted: a peer that asks for everything would take the room of the engines here."""
    seal(stage, list(range(16)))
    assert stage.want(list(range(16))) == 8
    assert stage.want([9], 2) == 0
    assert stage.holds() == 8
    assert stage.counters["wants_limited"] == 2
    offer = stage.way.offers[0]
    stage.granted(stage.way, stage.grants(offer, [0, 1]))
    assert (stage.copies.queue(stage.way).wants, stage.copies.queue(stage.way).wanted_bytes) == (1, 2 * GRANULE_BYTES)
    assert stage.want(list(range(4, 16)), 3) == 6, "what was not granted is held no longer"
    stage.copies.lost(stage.way)
    assert (stage.copies.queue(stage.way).wants, stage.copies.queue(stage.way).wanted_bytes) == (0, 0)
    assert stage.holds() == 0


def test_a_key_that_is_asked_for_twice_and_granted_once_leaves_nothing_held(stage):
    """A chunk that stays held can never be evicted again."""
    slots = seal(stage, [0, 1])
    assert stage.want([0, 0, 1]) == 3
    assert stage.holds() == 3
    stage.granted(stage.way, stage.grants(stage.way.offers[0], [0]))
    assert stage.holds() == 1
    stage.copies.pump()
    stage.finish_all()
    assert stage.holds() == 0
    stage.assert_idle()
    assert all(stage.store.at(slot).is_evictable for slot in slots)


def test_a_chunk_larger_than_the_share_is_pushed_alone(stage):
    slots = stage.reserve([0], 12 * GRANULE_BYTES)
    stage.fill(slots, 0, 1, seal=True)
    seal(stage, [1])
    assert stage.want([0, 1]) == 1
    assert stage.want([1], 2) == 0
    stage.granted(stage.way, Granted(1, [], []))
    assert stage.want([1], 3) == 1


def test_a_peer_asks_for_no_more_pushes_than_may_be(stage, monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_WANTS", 2)
    seal(stage, [0])
    assert [stage.want([0], number) for number in range(1, 5)] == [
        1,
        1,
        0,
        0,
    ]
    assert stage.counters["wants_limited"] == 2
    assert caplog.text.count("wants_limited") == 1
    stage.copies.stopped(stage.way, 1, "enough")
    assert stage.want([0], 5) == 1


def test_what_waits_for_a_peer_that_is_turned_down_waits_no_longer(stage, monkeypatch):
    """No channel works here, and the peer has dialled this node while it was dialled."""
    peers, told = stage.peers, []
    monkeypatch.setattr(peers.connections, "leave", lambda peer, why: told.append(why))
    monkeypatch.setattr(peers.regions, "when_open", lambda call: call())
    peers.tiers.gone = lambda name, why: told.append((name, why))
    stage.peer.state = ConnectionState.NEW
    peers.greeted(stage.peer, ["tcp"])
    why = "no channel works at a: tcp: closed; see `pdx doctor` there"
    assert told == [why, ("b", why)]


@pytest.mark.parametrize("ending", list(Ending))
def test_only_another_life_proves_that_a_peer_is_dead(stage, monkeypatch, ending):
    """One that said bye, or is silent, may still write where nobody checks."""
    said = []
    monkeypatch.setattr(stage.peers.inbound, "session_over", lambda peer, is_dead: said.append(is_dead))
    stage.peers.tiers.gone = lambda name, why: None
    stage.peers.connection_over(stage.peer, ending, "")
    assert said == [ending is Ending.RESTARTED]


def test_an_answer_counts_only_from_the_peer_that_was_asked_and_once(stage, monkeypatch):
    """What a peer says to have is dropped here: nobody else may say so for it."""
    peers, other = stage.peers, FakeSession(2, "c")
    stage.peer.state, stage.peer.send = ConnectionState.READY, lambda body, about: None
    monkeypatch.setattr(peers.connections, "dial", lambda name: stage.peer)
    forgotten, first, *_, number = (peers.ask("b", Settle([key(0)], 1, "disk")) for _ in range(module.MAX_ASKED + 1))
    for kept in (forgotten, first):
        peers.message(stage.peer, Found(1, 1, {}), kept)
    assert [peers.answer(forgotten), peers.answer(first)] == [None, Found(1, 1, {})]
    peers.message(other, Found(1, 1, {}), number)
    assert peers.answer(number) is None
    peers.message(stage.peer, Found(1, 1, {}), number)
    peers.message(stage.peer, Found(2, 2, {}), number)
    assert peers.answer(number) == Found(1, 1, {})
    peers.message(stage.peer, Found(1, 1, {}), number)
    assert peers.answer(number) is None
    assert stage.counters["answers_dropped"] == 4


def test_a_peer_may_ask_what_is_here_without_getting_it(stage):
    seal(stage, [0, 1, 2])
    assert stage.want([0, 1, 2, 3], dry_run=True) == 3
    assert stage.want([4], 2, dry_run=True) == 0
    assert stage.holds() == stage.counters["wants_served"] == 0
    assert stage.want([0, 1], 3) == 2
