"""`Settle`, as often as a peer may say it, in a node without sockets."""

from __future__ import annotations

import random

import pytest
from raw_engine import CHUNK_BYTES, LAYERS, key

from pdx.config import NodeConfig
from pdx.errors import NodeError
from pdx.memory.arena import Arena
from pdx.node.control import moves as module
from pdx.node.control.moves import BATCH_KEYS
from pdx.node.service import Service
from pdx.store.chunk import NODE, Origin
from pdx.store.claim import Claim
from pdx.store.tenant_leases import TenantLeases
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Settle


@pytest.fixture
def service(place):
    """A node with a disk."""
    with Arena.create(place / "arena", 17 << 20) as arena:
        config = NodeConfig(address=f"ipc://{place}/node.sock", arena_bytes=16 << 20, disks=[str(place / "disk")])
        made = Service(config, [arena], 1, Env())
        made.peers.turn = list
        made.open_tiers()
        yield made
        made.tiers.close()
        made.sessions.close()
        made.peers.close()


def turn(service):
    service.env.mailbox.deliver()
    service.turn()


def put(service, numbers, origin="node b"):
    """Sealed chunks, from there."""
    keys = [key(n) for n in numbers]
    claim = Claim(keys=keys, nbytes=CHUNK_BYTES, layers=LAYERS, owner=NODE, writers=[NODE], origin=Origin(origin))
    _, slots, _ = service.store.reserve(claim)
    service.store.seal(service.store.fill(slots, 0, LAYERS, NODE))
    return list(claim.keys)


def settled(service, keys):
    """How many the disk has, once it has all or will not."""
    return service.peers.on_settle("b", Settle(keys, 1, "disk")).hits


def test_however_often_it_is_asked_each_chunk_is_copied_once(service, monkeypatch):
    wait_until(lambda: turn(service) or service.tiers.below[0][0].is_counted, what="it is counted")
    keys = put(service, range(64))
    before = len(service.copies)
    for seed in range(200):
        some = random.Random(seed).sample(keys, len(keys))
        service.peers.on_settle("b", Settle(some, 1, "disk"))
    assert sum(len(copy.keys) for copy in service.copies.of(service.tiers.below[0][0])) == 64
    assert len(service.copies) - before <= 64
    assert len(service.controls._mover._settling) == 64
    wait_until(lambda: turn(service) or settled(service, keys) == 64, what="they are stored")
    settled(service, keys)
    assert not service.controls._mover._settling
    assert not any(service.store.index.of(key) for key in keys)


def test_what_a_tenant_has_leased_stays_in_memory(service):
    wait_until(lambda: turn(service) or service.tiers.below[0][0].is_counted, what="it is counted")
    keys = put(service, range(8))
    leases = TenantLeases(service.store.pools, service.store.index, share=1.0, kept_share=1.0)
    assert leases.lease(b"tenant", [service.store.index.of(one) for one in keys[:4]], 1e9) == 4
    wait_until(lambda: turn(service) or settled(service, keys) == 8, what="they are stored")
    settled(service, keys)
    assert [bool(service.store.index.of(one)) for one in keys] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("origin", ["engine e", "disk", "node c"])
def test_what_others_have_brought_to_memory_stays_there(service, origin):
    """Also when no request has found it yet: an engine has just computed it, say."""
    wait_until(lambda: turn(service) or service.tiers.below[0][0].is_counted, what="it is counted")
    keys = put(service, range(4)) + put(service, range(4, 8), origin)
    wait_until(lambda: turn(service) or settled(service, keys) == 8, what="they are stored")
    settled(service, keys)
    assert [bool(service.store.index.of(one)) for one in keys] == [False] * 4 + [True] * 4


def test_what_peers_ask_for_and_leave_is_bounded(service, monkeypatch):
    monkeypatch.setattr(module, "MAX_SETTLING", 16)
    wait_until(lambda: turn(service) or service.tiers.below[0][0].is_counted, what="it is counted")
    for first in range(0, 160, 8):
        keys = put(service, range(first, first + 8))
        settled(service, keys)
        assert len(service.controls._mover._settling) <= 16
        wait_until(lambda: turn(service) or not len(service.copies), what="they are stored")
    for first in (200, 208):
        settled(service, put(service, range(first, first + 8)))
    keys = put(service, range(216, 224))
    with pytest.raises(NodeError, match="being stored for peers already"):
        settled(service, keys)


def test_a_peer_may_not_ask_for_too_much_at_a_time(service):
    keys = [key(number) for number in range(BATCH_KEYS + 1)]
    with pytest.raises(NodeError, match="at a time"):
        service.peers.on_settle("b", Settle(keys, 1, "disk"))
