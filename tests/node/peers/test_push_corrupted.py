"""A channel that changes bytes on their way: what it changed never becomes a chunk. Two nodes in this process."""

from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
from inproc import InprocListener, InprocRegion
from node_harness import MIB
from peers_harness import LocalCluster, pattern, put, read

import pdx
from pdx.testing.waiting import wait_until
from pdx.transports import registry
from pdx.wire.messages import decode_landed

WRONG = set()  # numbers of the writes that change a byte
COUNT = iter(())


class FlippingListener(InprocListener):
    """Reads some writes from a copy in which one byte is another."""

    def invite(self, token):
        return msgspec.structs.replace(super().invite(token), scheme=FlippingRegion.scheme)

    def copy(self, transfer):
        is_probe = decode_landed(transfer.notify).admit == 0
        if not is_probe and next(COUNT) in WRONG:
            copy = bytearray(transfer.channel.memory.view)
            last = transfer.pieces[-1]
            copy[last.local + last.nbytes - 1] ^= 0x10
            channel = SimpleNamespace(session=transfer.channel.session, memory=SimpleNamespace(view=memoryview(copy)))
            transfer = SimpleNamespace(channel=channel, pieces=transfer.pieces, notify=transfer.notify)
        return super().copy(transfer)


class FlippingRegion(InprocRegion):
    """Third parties' channels come by name, too."""

    scheme: ClassVar[str] = "flipping"
    crosses_wire: ClassVar[bool] = True

    def _listening(self):
        return FlippingListener(self.memory, self.wake)


@pytest.fixture
def nodes(place, monkeypatch):
    global COUNT
    COUNT = iter(range(1 << 30))
    WRONG.clear()
    monkeypatch.setitem(registry._OURS, "flipping", f"{__name__}:FlippingRegion")
    with LocalCluster(place, "ab", arena_bytes=8 * MIB, channels=["flipping"]) as cluster:
        cluster.start("a", "b")
        yield cluster["a"], cluster["b"]


@pytest.mark.parametrize("write", [0, 3])
def test_a_byte_that_changed_on_its_way_is_never_seen(nodes, write):
    a, b = nodes
    data = pattern(1, 4 * MIB)
    WRONG.add(write)
    with a.reserve("x", len(data), parts=4, push_to="b") as chunk:
        chunk.view[:] = data
        for part in range(4):
            chunk.fill(part)
            wait_until(lambda part=part: has_answered(a, b, part + 1))
        chunk.seal()
    wait_until(lambda: not any(peer.pushes for peer in a.status().peers), what="the sender has given up or is done")
    wait_until(lambda: not any(peer.landing for peer in b.status().peers))
    assert b.status().counters["digest_mismatches"] == 1
    assert b.lookup(["x"]) == 0
    assert (b.status().chunks, b.status().free_bytes) == ({}, 8 * MIB)
    a.push("x", to="b")
    assert read(b, "x", wait_s=10.0) == data, "the next time it is right"


def has_answered(a, b, writes):
    """So many writes are across, or the push was stopped before."""
    return (
        b.status().counters.get("digest_mismatches") or a.status().counters.get("peer_stored_bytes", 0) >= writes * MIB
    )


def test_what_is_fetched_is_checked_too(nodes):
    a, b = nodes
    put(a, "x", pattern(2, MIB))
    WRONG.add(0)
    with pytest.raises(pdx.PdxError):
        b.get("x", source="a", wait_s=0.3)
    wait_until(lambda: b.status().counters.get("digest_mismatches") == 1)
    assert b.status().chunks == {}
    assert read(b, "x", source="a", wait_s=10.0) == pattern(2, MIB), "asked again, after a while"
