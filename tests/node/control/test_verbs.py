"""Verbs of controllers other than moves: each says what it would do before it does that."""

from __future__ import annotations

import array
import signal

import pytest
from control_bed import BedEngine, Said, contents_of, control_bed
from gpu_harness import GpuNode
from node_harness import MIB, attached, run
from raw_engine import CHUNK_BYTES, LAYERS, Engine, key

from pdx.config import NodeConfig
from pdx.node.control import moves
from pdx.testing.waiting import wait_until
from pdx.wire.hints import Hints
from pdx.wire.messages import Admit, Fill, Ping, Release
from pdx.wire.verbs import (
    CheckFinish,
    Clear,
    Effect,
    EndJob,
    Evict,
    Find,
    Found,
    Jobs,
    Kept,
    List,
    Models,
    Move,
    PinIn,
    Prefetch,
    Recode,
    Selection,
)

SHAPE = {"model": "0123abcd", "block_tokens": "16", "chunk_tokens": "64"}
LAYOUT = b"l" * 16


@pytest.fixture
def bed(place):
    """A node with a disk, an engine and a controller."""
    with control_bed(place, pin_share=0.5) as made:
        yield made, BedEngine(made, layout=LAYOUT, shape=SHAPE), made.wire


def test_clear_drops_chunks_in_one_tier_or_in_all(bed):
    node, engine, wire = bed
    contents = contents_of(0)
    engine.save(contents)
    what = Selection(list(contents))
    node.run(Move(what, "host", "disk", keeps=True))
    planned = wire.ask(Clear(what, "host", dry_run=True))
    assert planned == Effect([Kept("host", 8, 8 * CHUNK_BYTES)], dry_run=True)
    assert wire.ask(Find(what)).tiers == {"host": 8, "disk": 8}
    assert wire.ask(Clear(what, "host")).tiers == [Kept("host", 8, 8 * CHUNK_BYTES)]
    assert wire.ask(Find(what)).tiers == {"host": 0, "disk": 8}
    assert [kept.chunks for kept in wire.ask(Clear(what)).tiers] == [0, 8]
    assert wire.ask(Find(what)).hits == 0
    assert engine.look(list(contents)) == []
    assert wire.ask(Clear(what)).chunks == 0, "again it is nothing"


def test_clear_of_everything_is_a_job(bed):
    node, engine, wire = bed
    engine.save(contents_of(0, 100, 16 << 10))
    planned = wire.ask(Clear(Selection(), everything=True, dry_run=True))
    assert (planned.chunks, planned.nbytes) == (100, 100 * (16 << 10))
    status = node.run(Clear(Selection(), everything=True))
    assert (status.state, status.chunks_done) == ("done", 100)
    assert [(job.job, job.state) for job in wire.ask(Jobs()).jobs] == [(status.job, "done")]
    assert node.status().chunks == {}


def test_what_is_read_is_free_with_its_last_lease(bed):
    node, engine, wire = bed
    contents = contents_of(0)
    engine.save(contents)
    found = engine.scheduler.ask(Admit(list(contents), lease_s=30.0))
    assert wire.ask(Clear(Selection(list(contents)), "host")).chunks == 8
    assert [bytes(engine.arena.view(slot)) for slot in found.slots] == list(contents.values())
    assert node.status().chunks == {"retired": 8}
    engine.scheduler.ask(Release(found.lease))
    assert node.status().chunks == {}


def test_pins_of_a_tier_have_a_bound_and_keep_what_they_name(bed):
    node, engine, wire = bed
    contents = contents_of(0, 40, 128 << 10)  # 5 of 8 MiB, of which 4 may be pinned
    engine.save(contents)
    some, rest = list(contents)[:20], list(contents)[20:]
    assert wire.ask(PinIn(Selection(some), dry_run=True)) == Effect([Kept("host", 20, 20 * (128 << 10))], dry_run=True)
    assert node.status().pins == 0
    assert wire.ask(PinIn(Selection(some))).chunks == 20
    assert node.status().pinned_bytes == 20 * (128 << 10)
    assert wire.refused(PinIn(Selection(rest))) == "ArenaFull"
    assert wire.refused(PinIn(Selection([key(999)]), "disk")) == "ChunkMissing"
    engine.save(contents_of(1000, 40, 128 << 10))
    assert wire.ask(Find(Selection(some))).tiers["host"] == 20, "others went for those"
    assert wire.ask(PinIn(Selection(some), pinned=False)).chunks == 20
    engine.save(contents_of(2000, 60, 128 << 10))
    assert wire.ask(Find(Selection(some))).tiers["host"] == 0


def test_what_is_pinned_on_a_disk_is_not_removed_to_make_room(place):
    with control_bed(place, disk_limit_bytes=2 * MIB, store="write-through", pin_share=0.5) as node:
        engine, wire = BedEngine(node), node.wire

        def fill(numbers):
            for first in numbers:
                more = contents_of(first)
                engine.save(more)
                node.until(lambda more=more: wire.ask(Find(Selection(list(more)))).tiers["disk"] == 8, "it is stored")

        pinned = contents_of(0)
        engine.save(pinned)
        what = Selection(list(pinned))
        node.until(lambda: wire.ask(Find(what)).tiers["disk"] == 8, "they are stored")
        assert wire.ask(PinIn(what, "disk")).chunks == 8
        fill(range(1000, 6000, 1000))
        assert wire.ask(Find(what)).tiers["disk"] == 8
        assert wire.ask(PinIn(what, "disk", pinned=False)).chunks == 8
        fill(range(7000, 12000, 1000))
        assert wire.ask(Find(what)).tiers["disk"] < 8


def test_evict_takes_the_low_priorities_first_and_no_others(bed):
    node, engine, wire = bed
    low, high = contents_of(0, 10), contents_of(100, 10)
    engine.save(low, hints=Hints("", priority=2))
    engine.save(high, hints=Hints("", priority=5))
    planned = wire.ask(Evict(3, 4 * CHUNK_BYTES, dry_run=True))
    assert planned == Effect([Kept("host", 4, 4 * CHUNK_BYTES)], dry_run=True)
    assert wire.ask(Evict(3, 4 * CHUNK_BYTES)).chunks == 4
    assert wire.ask(Find(Selection(list(low)))).hits == 6, "the end of a prompt goes first"
    assert wire.ask(Evict(3, 100 * MIB)).chunks == 6
    assert wire.ask(Find(Selection(list(high)))).hits == 10
    assert wire.ask(Evict(6, 100 * MIB)).chunks == 10
    assert wire.refused(Evict(3, 1, "disk")) == "NodeError"


def test_a_request_names_its_chunks(bed):
    node, engine, wire = bed
    contents = contents_of(0)
    engine.save(contents, request="cmpl-one")
    assert wire.ask(Find(Selection(request="mpl-on"))) == Found(8, 8, {"host": 8, "disk": 0}, nbytes=CHUNK_BYTES)
    engine.scheduler.ask(Admit([], request="empty"))
    for request in ("two", "empty"):
        what = Selection(request=request)
        for verb in (Find(what), Move(what, "host", "disk"), Clear(what), PinIn(what)):
            assert wire.refused(verb) == "ChunkMissing"
    assert wire.refused(Find(Selection())) == "ProtocolError"
    assert wire.ask(Clear(Selection(request="one"), "host")).chunks == 8


def test_ls_counts_memory_by_model_and_session(bed):
    node, engine, wire = bed
    engine.save(contents_of(0, 3), hints=Hints("alice"), lease_s=10.0)
    engine.save(contents_of(100, 5), hints=Hints("bob"), lease_s=10.0)
    listing = wire.ask(List())
    assert listing.models == [Kept(f"0123abcd ({'e' * 16})", 8, 8 * CHUNK_BYTES)]
    assert listing.sessions == [Kept("bob", 5, 5 * CHUNK_BYTES), Kept("alice", 3, 3 * CHUNK_BYTES)]
    assert wire.ask(List(session="ali")).sessions == [Kept("alice", 3, 3 * CHUNK_BYTES)]
    assert wire.ask(List(model="zz")).models == []
    wire.ask(Clear(Selection(list(contents_of(100, 5))), "host"))
    assert wire.ask(List()).models == [Kept(f"0123abcd ({'e' * 16})", 3, 3 * CHUNK_BYTES)]
    assert [(model.layout, model.shape) for model in wire.ask(Models()).models] == [(LAYOUT, SHAPE)]


def test_an_engine_that_was_reset_names_its_chunks_otherwise_and_is_listed_as_before(bed):
    node, engine, wire = bed
    engine.save(contents_of(0, 3))
    engine.scheduler.ask(Ping(keyed=b"k" * 16))
    assert [model.layout for model in wire.ask(Models()).models] == [b"k" * 16]
    engine.save(contents_of(100, 5))
    assert wire.ask(List()).models == [Kept(f"0123abcd ({'e' * 16})", 8, 8 * CHUNK_BYTES)]


def test_chunks_on_a_disk_are_compressed_and_back(bed):
    node, engine, wire = bed
    contents = {key(number): bytes([number]) * CHUNK_BYTES for number in range(8)}
    engine.save(contents)
    what = Selection(list(contents))
    assert node.run(Move(what, "host", "disk")).state == "done"
    before = node.status().tiers[0].used_bytes
    planned = wire.ask(Recode(what, "disk", "lossless", dry_run=True))
    assert (planned.state, planned.chunks) == ("planned", 8)
    status = node.run(Recode(what, "disk", "lossless"))
    assert (status.state, status.chunks_done, status.bytes_done) == ("done", 8, 8 * CHUNK_BYTES)
    node.until(lambda: node.status().tiers[0].used_bytes < before / 2, "the old files are gone")
    assert engine.look(list(contents)) == list(contents.values())
    wire.ask(Clear(what, "host"))
    assert node.run(Recode(what, "disk", "none")).state == "done"
    node.until(lambda: node.status().tiers[0].used_bytes == before, "the old files are gone")
    assert engine.look(list(contents)) == list(contents.values())


def test_what_cannot_be_compressed_is_refused(bed):
    node, engine, wire = bed
    contents = contents_of(0)
    engine.save(contents)
    what = Selection(list(contents))
    assert "as engines read them" in wire.ask(Recode(what, "host", "lossless")).text
    assert "zip9" in wire.ask(Recode(what, "disk", "zip9")).text
    assert wire.refused(Recode(what, "disk", "lossless")) == "ChunkMissing"
    form = "fp8:fp32:1x1x1x1x1024"
    assert "has another key" in wire.ask(Recode(what, "disk", form)).text
    assert wire.refused(Recode(what, "disk", form, [key(999)])) == "ProtocolError"


def test_a_lossy_codec_gives_chunks_other_keys(bed):
    """Of float32: 64 KiB in four slices of a page of 4,096 elements each."""
    node, engine, wire = bed
    values = {number: array.array("f", [number + at / 64 for at in range(CHUNK_BYTES // 4)]) for number in range(4)}
    contents = {key(number): values[number].tobytes() for number in values}
    engine.save(contents)
    what, lossy = Selection(list(contents)), [key(1000 + number) for number in values]
    assert node.run(Move(what, "host", "disk")).state == "done"
    status = node.run(Recode(what, "disk", "int8:fp32:1x1x1x1x4096", lossy))
    assert (status.state, status.why, status.chunks_done) == ("done", "", 4)
    assert wire.ask(Find(what)).hits == 0
    for number, found in zip(values, engine.look(lossy), strict=True):
        decoded = array.array("f", found)
        assert decoded != values[number]
        worst = max(abs(one - other) for one, other in zip(decoded, values[number], strict=True))
        assert worst <= max(values[number]) / 127


def test_a_pinned_chunk_keeps_its_key(bed):
    """What is stored with a loss has another one, and the chunk that was pinned would be gone."""
    node, engine, wire = bed
    contents = contents_of(0)
    engine.save(contents)
    what, lossy = Selection(list(contents)), [key(1000 + number) for number in range(8)]
    assert node.run(Move(what, "host", "disk")).state == "done"
    assert wire.ask(PinIn(what, "disk")).chunks == 8
    for is_plan in (True, False):
        refused = wire.ask(Recode(what, "disk", "int8:fp32:1x1x1x1x4096", lossy, is_plan))
        assert "is pinned in disk: unpin it" in refused.text
    assert wire.ask(Find(what)).pinned == {"disk": 8}
    assert node.run(Recode(what, "disk", "lossless")).state == "done"
    assert wire.ask(Find(what)).pinned == {"disk": 8}


def test_new_keys_are_each_once_and_none_of_the_old(bed):
    """Of two chunks that a store kept under one key one would be lost."""
    node, engine, wire = bed
    contents = contents_of(0)
    engine.save(contents)
    what, form = Selection(list(contents)), "int8:fp32:1x1x1x1x4096"
    assert node.run(Move(what, "host", "disk")).state == "done"
    assert wire.refused(Recode(what, "disk", form, [key(1000)] * 8)) == "ProtocolError"
    assert wire.refused(Recode(what, "disk", form, [key(number) for number in range(1, 9)])) == "ProtocolError"
    assert wire.ask(Find(what)).tiers["disk"] == 8


def test_chunks_move_to_a_gpu_are_pinned_there_and_come_back(place):
    """The driver is a fake; host memory of another process stands for the GPU's."""
    config = NodeConfig(
        address=f"ipc://{place}/node.sock",
        arena_bytes=8 * MIB,
        more_gpus=["0"],
        gpu_arena_bytes=8 * MIB,
        store="write-back",
        store_window=1e-9,
    )
    node = GpuNode(config, "--gpus", "1")
    try:
        node.wait_ready()
        engine, wire = Engine(node.address), attached(node.address, kind="controller")
        contents = contents_of(0)
        what = Selection(list(contents))
        engine.save(contents)

        status = run(wire, Move(what, "host", "gpu"))
        assert (status.state, status.chunks_done, status.why) == ("done", 8, "")
        assert wire.ask(Find(what)).tiers == {"gpu": 8, "host": 0}
        assert wire.ask(PinIn(what, "gpu")).chunks == 8
        assert wire.ask(Find(what)).pinned == {"gpu": 8}
        assert "pinned in gpu" in wire.ask(Move(what, "gpu", "host")).text
        assert wire.ask(PinIn(what, "gpu", pinned=False)).chunks == 8
        assert run(wire, Move(what, "gpu", "host")).state == "done"
        assert wire.ask(Find(what)).tiers == {"gpu": 0, "host": 8}
        assert engine.look(list(contents)) == list(contents.values())
        assert wire.ask(Prefetch(what, "gpu")).chunks == 8
        wait_until(lambda: wire.ask(Find(what)).tiers == {"gpu": 8, "host": 8})
        assert wire.ask(Prefetch(what, "gpu", dry_run=True)).chunks == 0
        engine.close()
        wire.close()
    finally:
        node.signal(signal.SIGTERM)
        node.close()


def test_two_shards_are_moved_together_and_only_as_two(bed):
    """One shard of a chunk that is named as of one would be copied, and both would be dropped."""
    node, _, wire = bed
    scheduler = Said(node, kind="scheduler", engine="f" * 16)
    workers = [Said(node, kind="worker", engine="f" * 16, shard=shard) for shard in range(2)]
    keys = [key(number) for number in range(6)]
    granted = scheduler.ask(Admit(keys, CHUNK_BYTES, LAYERS, shards=2))
    for shard, worker in enumerate(workers):
        worker.ask(Fill(granted.granted_slots[shard::2], 0, LAYERS, seal=True))
    assert wire.refused(Move(Selection(keys), "host", "disk")) == "ChunkMissing"
    assert wire.refused(PinIn(Selection(keys), "host")) == "ChunkMissing"
    assert wire.ask(Find(Selection(keys))).tiers == {"host": 0, "disk": 0}
    assert wire.ask(Find(Selection(keys, 2))).tiers == {"host": 6, "disk": 0}
    status = node.run(Move(Selection(keys, 2), "host", "disk"))
    assert (status.state, status.chunks, status.chunks_done) == ("done", 12, 12)
    assert wire.ask(Find(Selection(keys, 2))).tiers == {"host": 0, "disk": 6}
    assert wire.ask(Find(Selection(keys, 1))).hits == 0, "a chunk is all of its shards"
    for dry_run in (True, False):
        assert wire.ask(Clear(Selection(keys, 2), "disk", dry_run=dry_run)).tiers == [
            Kept("disk", 12, 12 * CHUNK_BYTES)
        ]


def test_a_chunk_that_a_request_named_twice_is_one(bed):
    node, engine, wire = bed
    contents = contents_of(1000, 2)
    one, two = contents
    engine.save(contents)
    engine.scheduler.ask(Admit([one, two, one], request="twice"))
    what = Selection(request="twice")
    assert wire.ask(PinIn(what, "host")).chunks == 2
    assert wire.ask(PinIn(what, "host", pinned=False)).chunks == 2
    assert wire.ask(Find(what)).pinned == {}
    status = node.run(Move(what, "host", "disk"))
    assert (status.state, status.chunks_done) == ("done", 2)


def test_a_move_whose_batches_all_end_at_once_goes_on(bed, monkeypatch):
    monkeypatch.setattr(moves, "BATCH_KEYS", 8)
    node, engine, wire = bed
    contents = contents_of(1000, 30, 4096)  # four batches, of which three are under way at a time
    what = Selection(list(contents))
    engine.save(contents)
    assert node.run(Move(what, "host", "disk", keeps=True)).state == "done"
    status = node.run(Move(what, "disk", "host"))
    assert (status.state, status.chunks_done) == ("done", 30)
    assert wire.ask(Find(what)).tiers == {"host": 30, "disk": 0}


def test_jobs_of_yesterday_and_such_that_never_were(bed):
    node, _, wire = bed
    life = f"{node.service.name}:{node.status().epoch:x}"
    for name, why in (("a:abc-1", "another life"), (f"{life}-99999", "never was one")):
        for ask in (CheckFinish(name), EndJob(name)):
            refused = wire.ask(ask)
            assert (refused.error, why in refused.text) == ("JobUnknown", True)
