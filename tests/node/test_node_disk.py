"""A real node with a disk: chunks outlive the node that had them, whatever ends it."""

from __future__ import annotations

import glob
import os
import random
import stat
import time

import pytest
from node_harness import MIB, refused_node

from pdx.client.api import connect
from pdx.errors import ChunkExists, ChunkMissing
from pdx.telemetry import trace
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Fill, Ping, Release
from pdx.wire.status import COUNTING
from pdx.wire.verbs import Why

NAMES = [f"chunk {number}" for number in range(12)]


def content(name, salt=""):
    return random.Random(name + salt).randbytes(500_000)


@pytest.fixture
def disk(place):
    return str(place / "disk")


def put(node, name, data):
    with node.reserve(name, len(data)) as chunk:
        chunk.view[:] = data
        chunk.seal()


def fill(address, names=NAMES, salt=""):
    """Put these into the node, and wait until they are on its disk, too."""
    with connect(address, timeout_s=30) as node:
        for name in names:
            before = node.status().counters.get("disk_stored", 0)
            put(node, name, content(name, salt))
            wait_until(
                lambda before=before: node.status().counters.get("disk_stored", 0) == before + 1, what="it is stored"
            )


def read(address, name):
    with connect(address, timeout_s=30) as node:
        try:
            with node.get(name) as found:
                return bytes(found.view)
        except ChunkMissing:
            return None


def test_what_a_killed_node_had_is_found_by_the_next_one(start_node, disk):
    node = start_node(disks=[disk])
    fill(node.address)
    node.kill()
    node = start_node(disks=[disk])
    wait_until(lambda: node.status().tiers[0].chunks == len(NAMES), what="the index is read")
    assert node.status().chunks == {}
    for name in NAMES:
        assert read(node.address, name) == content(name)
    counters = node.status().counters
    assert counters["disk_loaded"] == len(NAMES)
    assert counters["disk_loaded_bytes"] == len(NAMES) * 500_000
    assert "disk_corrupt" not in counters


def test_what_is_encoded_on_the_disk_is_told_and_comes_back(start_here, disk):
    settings = {"arena_bytes": 4 * MIB, "disks": [disk]}
    node = start_here(**settings, disk_codec="lossless")
    data = random.Random(0).randbytes(250_000)
    alike = bytes(byte for each in data for byte in (each, 63))
    with connect(node.address, timeout_s=30) as client:
        put(client, "alike", alike)
    wait_until(lambda: node.status().counters.get("disk_stored", 0) == 1, what="it is on the disk")
    fill(node.address, NAMES[:1])
    wait_until(lambda: node.status().tiers[0].stores == 2, what="both are on the disk")
    tier = node.status().tiers[0]
    assert (tier.stored_bytes, tier.loaded_bytes) == (1_000_000, 0)
    assert 750_000 < tier.written_bytes < 760_000  # one of them does not shrink
    assert tier.used_bytes < 790_000
    node.close()
    node = start_here(**settings)
    wait_until(lambda: node.status().tiers[0].chunks == 2, what="the index is read")
    assert (read(node.address, "alike"), read(node.address, NAMES[0])) == (alike, content(NAMES[0]))
    tier = node.status().tiers[0]
    assert (tier.loaded_bytes, tier.read_bytes) == (1_000_000, tier.read_bytes)
    assert 750_000 < tier.read_bytes < 760_000


def test_what_the_arena_evicts_is_found_on_the_disk(start_here, disk):
    node = start_here(arena_bytes=4 * MIB, disks=[disk])
    for name in NAMES:
        fill(node.address, [name])
    assert node.status().chunks["sealed"] < len(NAMES)
    for name in NAMES:
        assert read(node.address, name) == content(name)
    assert node.status().counters["disk_loaded"] > 0
    assert node.status().counters["disk_stored"] == len(NAMES)  # what was loaded is not stored again


def test_each_store_and_load_has_a_span_and_its_time_is_counted(start_here, disk, place):
    spans = place / "spans"
    spans.mkdir(mode=0o700)
    trace.switch(spans, True)
    node = start_here(disks=[disk], trace=str(spans))
    begin_ns = time.monotonic_ns()
    fill(node.address, NAMES[:3])
    node.close()
    node = start_here(disks=[disk], trace=str(spans))
    wait_until(lambda: node.status().tiers[0].chunks == 3, what="the index is read")
    for name in NAMES[:2]:
        assert read(node.address, name) == content(name)
    end_ns = time.monotonic_ns()
    counters = node.status().counters

    def loads():
        return [span for span in trace.read(spans) if span.lane is trace.Lane.DISK_LOAD]

    wait_until(lambda: len(loads()) == 2, what="the node has written its spans")
    found = loads()
    assert [(span.num_layers, span.nbytes, span.transfer) for span in found] == [(1, 500_000, "")] * 2
    assert all(begin_ns < span.start_ns < span.end_ns < end_ns for span in found)
    assert sum(span.end_ns - span.start_ns for span in found) == counters["disk_loaded_ns"]
    stored = [span for span in trace.read(spans) if span.lane is trace.Lane.DISK_STORE]
    assert len(stored) <= 3, "the node was killed: what it had not written is lost"
    assert all(begin_ns < span.start_ns < span.end_ns < end_ns for span in stored)


def test_what_is_deleted_or_written_anew_is_not_found_again(start_here, disk):
    node = start_here(disks=[disk])
    fill(node.address, NAMES[:2])
    with connect(node.address, timeout_s=30) as client:
        with pytest.raises(ChunkExists):
            client.reserve(NAMES[0], 1000)
        assert client.delete(NAMES[0])
        assert not client.delete(NAMES[0])
    wait_until(lambda: len(glob.glob(f"{disk}/??/*")) == 1, what="its file is removed")
    node.close()
    node = start_here(disks=[disk])
    wait_until(lambda: node.status().tiers[0].chunks == 1, what="the index is read")
    assert read(node.address, NAMES[0]) is None
    fill(node.address, [NAMES[1]], "new")  # its old bytes are on the disk
    node.close()
    node = start_here(disks=[disk])
    wait_until(lambda: node.status().tiers[0].chunks == 1, what="the index is read")
    assert read(node.address, NAMES[1]) == content(NAMES[1], "new")


def test_a_second_node_does_not_share_the_folder(start_node, disk, place):
    node = start_node(disks=[disk])
    assert stat.S_IMODE(os.stat(disk).st_mode) == 0o700
    refused = refused_node(f"ipc://{place}/other.sock", arena_bytes=MIB, disks=[disk])
    assert refused.returncode == 1
    assert f"{disk} is the disk tier of another node (process {node.pid})" in refused.stderr
    fill(node.address, NAMES[:1])


@pytest.mark.parametrize("what", ["a file", "others may enter"])
def test_a_folder_that_cannot_be_used_is_refused(address, place, what):
    path = place / "disk"
    if what == "a file":
        path.write_text("")
    else:
        path.mkdir(mode=0o755)
        path.chmod(0o755)
    refused = refused_node(address, arena_bytes=MIB, disks=[str(path)])
    assert refused.returncode == 1
    assert str(path) in refused.stderr
    assert "Traceback" not in refused.stderr


HANGS = """
import os, threading
real = os.preadv
def preadv(*args):
    if os.path.exists({flag!r}):
        threading.Event().wait()
    return real(*args)
os.preadv = preadv
"""


def test_a_disk_that_does_not_answer_is_waited_for_once_and_keeps_no_node_from_ending(
    start_node, attach, place, disk, monkeypatch
):
    (place / "sitecustomize.py").write_text(HANGS.format(flag=str(place / "hangs")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
    node = start_node(arena_bytes=MIB, disks=[disk])
    engine = {"engine": "an engine"}
    worker, scheduler = (attach(node, kind=kind, **engine) for kind in ("worker", "scheduler"))

    def hits(numbers, request):
        keys = [number.to_bytes(16, "big") for number in numbers]
        found = scheduler.ask(Admit(keys, MIB // 16, 4, lease_s=20.0, request=request, wait_s=20.0, partial=True))
        if found.granted_slots:
            worker.ask(Fill(found.granted_slots, layers=4, seal=True))
        scheduler.ask(Release(found.lease))
        return found.hits

    hits(range(8), "first")
    wait_until(lambda: scheduler.status().counters.get("disk_stored", 0) == 8, what="all of it is stored")
    hits(range(100, 116), "others")
    wait_until(lambda: scheduler.status().counters.get("disk_stored", 0) == 24, what="all of it is stored")
    assert hits(range(1), "while it answers") == 1
    (place / "hangs").touch()
    begin = time.monotonic()
    assert hits(range(4, 5), "waits") == 0
    first_s = time.monotonic() - begin
    assert first_s < 15.0, "fetch_s is five"
    wait_until(lambda: scheduler.status().tiers[0].state == "does not answer", what="the node notices")
    begin = time.monotonic()
    for number in range(5, 8):
        assert hits([number], f"does not wait {number}") == 0
    assert time.monotonic() - begin < first_s, "three of them together"
    counters = scheduler.status().counters
    assert counters["disk_silent"] == 1
    assert counters["disk_loaded"] == 1
    begin = time.monotonic()
    node.close()
    assert time.monotonic() - begin < 15.0
    assert node.log.count("does not answer") == 1


def test_several_disks_have_a_part_each_and_with_one_more_all_of_it_is_found_again(start_here, place):
    folders = [str(place / name) for name in "ab"]
    node = start_here(disks=folders)
    fill(node.address)
    tiers = node.status().tiers
    assert [(tier.name, tier.place) for tier in tiers] == [(f"disk {folder}", folder) for folder in folders]
    assert sum(tier.chunks for tier in tiers) == len(NAMES)
    assert all(tier.chunks for tier in tiers), "each has some"
    node.close()
    node = start_here(disks=[str(place / "c"), *folders])
    wait_until(lambda: sum(tier.chunks for tier in node.status().tiers) == len(NAMES), what="the indices are read")
    assert [read(node.address, name) for name in NAMES] == [content(name) for name in NAMES]
    assert node.status().counters["disk_loaded"] == len(NAMES)


def test_a_disk_that_is_taken_leaves_the_others_free_for_the_next_node(start_node, place):
    folders = [str(place / "a"), str(place / "b")]
    node = start_node(disks=folders[1:])
    refused = refused_node(f"ipc://{place}/other.sock", arena_bytes=MIB, disks=folders)
    assert f"{folders[1]} is the disk tier of another node" in refused.stderr
    node.kill()
    start_node(disks=folders)


def test_what_an_engine_computes_sooner_than_the_disk_loads_it_is_not_waited_for(start_here, attach, disk):
    """The engine says that it is faster than any disk."""
    node = start_here(disks=[disk])
    engine = {"engine": "an engine"}
    worker, scheduler = (attach(node, kind=kind, **engine) for kind in ("worker", "scheduler"))
    keys = [number.to_bytes(16, "big") for number in range(8)]

    def ask(request):
        return scheduler.ask(Admit(keys, MIB // 4, 4, lease_s=20.0, request=request, wait_s=10.0))

    granted = ask("first").granted_slots
    worker.ask(Fill(granted, layers=4, seal=True))
    wait_until(lambda: scheduler.status().counters.get("disk_stored", 0) == len(keys), what="all of it is stored")
    node.close()
    node = start_here(disks=[disk])
    worker, scheduler = (attach(node, kind=kind, **engine) for kind in ("worker", "scheduler"))
    wait_until(lambda: scheduler.status().tiers[0].chunks == len(keys), what="the index is read")
    assert scheduler.status().tiers[0].load_gb_s == 0.0
    worker.ask(Ping(chunk_s=1e-9))
    half = scheduler.ask(Admit(keys[:4], lease_s=20.0, request="measures", wait_s=10.0))
    assert half.hits == 4, "of a disk that was not measured everything is loaded"
    assert scheduler.status().tiers[0].load_gb_s > 0
    assert ask("computes").hits == 4
    told = scheduler.ask(Why("computes")).requests[0]
    assert told.waited_s == 0.0
    assert [(each.count, each.is_hit) for each in told.reasons] == [(4, True), (3, False), (1, False)]
    assert told.reasons[1].text.startswith("on disk, but computing it is faster: it loads ")
    assert told.reasons[2].text == "being filled by disk at that time", "a look how fast it is, which nobody waits for"
    assert scheduler.status().counters["loads_not_worth"] == 4


def test_what_memory_hits_all_the_time_is_not_the_first_to_leave_the_disk(start_here, disk):
    settings = {"arena_bytes": 4 * MIB, "disks": [disk], "disk_limit_bytes": 12 * MIB, "disk_reserve_bytes": 0}
    node = start_here(**settings)
    with connect(node.address, timeout_s=30) as client:
        put(client, "hot", content("hot"))
        for number in range(40):  # the disk has room for 23
            put(client, f"cold {number}", content(f"cold {number}"))
            assert bytes(client.get("hot").view) == content("hot")
            wait_until(
                lambda number=number: client.status().counters.get("disk_stored", 0) >= number + 1, what="it is stored"
            )
        counters = client.status().counters
        assert counters["disk_removed"] > 10
        assert "disk_loaded" not in counters, "memory has had it all the time"
    node.close()
    node = start_here(**settings)
    wait_until(lambda: node.status().tiers[0].state != COUNTING, what="the index is read")
    assert read(node.address, "cold 0") is None
    assert read(node.address, "hot") == content("hot")
