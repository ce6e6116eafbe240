"""`Settle`, as often as a peer may say it, in a node without sockets."""

from __future__ import annotations

import random

import pytest
from control_bed import control_bed
from raw_engine import key

from pdx.errors import NodeError
from pdx.node.control import moves as module
from pdx.node.control.moves import BATCH_KEYS
from pdx.store.chunk import Origin
from pdx.store.tenant_leases import TenantLeases
from pdx.wire.messages import Settle


@pytest.fixture
def bed(place):
    with control_bed(place, nbytes=16 << 20, store="all") as made:
        made.service.peers.turn = list
        yield made


def put(bed, first, count, origin="node b"):
    """Sealed chunks, from there."""
    return bed.put(first, count, origin=Origin(origin))


def settled(bed, keys):
    """How many the disk has, once it has all or will not."""
    return bed.service.peers.on_settle("b", Settle(keys, 1, "disk")).hits


def until_settled(bed, keys):
    bed.until(lambda: settled(bed, keys) == len(keys), "they are stored")
    settled(bed, keys)


def test_however_often_it_is_asked_each_chunk_is_copied_once(bed, monkeypatch):
    keys = put(bed, 0, 64)
    before = len(bed.service.copies)
    for seed in range(40):
        some = random.Random(seed).sample(keys, len(keys))
        bed.service.peers.on_settle("b", Settle(some, 1, "disk"))
    assert sum(len(copy.keys) for copy in bed.service.copies.of(bed.service.tiers.below[0][0])) == 64
    assert len(bed.service.copies) - before <= 64
    until_settled(bed, keys)
    assert not any(bed.service.store.index.of(key) for key in keys)


def test_what_a_tenant_has_leased_stays_in_memory(bed):
    keys = put(bed, 0, 8)
    leases = TenantLeases(bed.service.store.pools, bed.service.store.index, share=1.0, kept_share=1.0)
    assert leases.lease(b"tenant", [bed.service.store.index.of(one) for one in keys[:4]], 1e9) == 4
    until_settled(bed, keys)
    assert [bool(bed.service.store.index.of(one)) for one in keys] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("origin", ["engine e", "disk", "node c"])
def test_what_others_have_brought_to_memory_stays_there(bed, origin):
    """Also when no request has found it yet: an engine has just computed it, say."""
    keys = put(bed, 0, 4) + put(bed, 4, 4, origin)
    until_settled(bed, keys)
    assert [bool(bed.service.store.index.of(one)) for one in keys] == [False] * 4 + [True] * 4


def test_what_peers_ask_for_and_leave_is_bounded(bed, monkeypatch):
    monkeypatch.setattr(module, "MAX_SETTLING", 16)
    for first in range(0, 160, 8):
        keys = put(bed, first, 8)
        settled(bed, keys)
        bed.until(lambda: not len(bed.service.copies), "they are stored")
    for first in (200, 208):
        settled(bed, put(bed, first, 8))
    keys = put(bed, 216, 8)
    with pytest.raises(NodeError, match="being stored for peers already"):
        settled(bed, keys)


def test_a_peer_may_not_ask_for_too_much_at_a_time(bed):
    keys = [key(number) for number in range(BATCH_KEYS + 1)]
    with pytest.raises(NodeError, match="at a time"):
        bed.service.peers.on_settle("b", Settle(keys, 1, "disk"))
