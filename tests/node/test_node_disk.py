"""A real node with a disk: chunks outlive the node that had them, whatever ends it."""

from __future__ import annotations

import glob
import os
import random
import stat
import time
from functools import partial

import pytest
from node_harness import MIB, refused_node

from pdx.client.api import connect
from pdx.errors import ChunkExists, ChunkMissing
from pdx.telemetry import trace
from pdx.testing.waiting import wait_until

NAMES = [f"chunk {number}" for number in range(6)]
NBYTES = 100_000


def content(name, salt=""):
    return random.Random(name + salt).randbytes(NBYTES)


@pytest.fixture
def start_here(start_here):
    return partial(start_here, fetch_s=60.0)  # however late a thread of the disk gets a core


@pytest.fixture
def start_node(start_node):
    return partial(start_node, fetch_s=60.0)


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


def read(address, name, wait_s=30.0):
    with connect(address, timeout_s=30) as node:
        try:
            with node.get(name, wait_s=wait_s) as found:
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
    assert counters["disk_loaded_bytes"] == len(NAMES) * NBYTES
    assert "disk_corrupt" not in counters


def test_what_is_encoded_on_the_disk_is_told_and_comes_back(start_here, disk):
    settings = {"arena_bytes": 4 * MIB, "disks": [disk]}
    node = start_here(**settings, disk_codec="lossless")
    alike = bytes(byte for each in random.Random(0).randbytes(250_000) for byte in (each, 63))
    with connect(node.address, timeout_s=30) as client:
        put(client, "alike", alike)
    wait_until(lambda: node.status().tiers[0].stores == 1, what="it is on the disk")
    tier = node.status().tiers[0]
    assert tier.stored_bytes == 500_000
    assert 250_000 < tier.written_bytes < 260_000
    node.close()
    node = start_here(**settings)
    wait_until(lambda: node.status().tiers[0].chunks == 1, what="the index is read")
    assert read(node.address, "alike") == alike
    tier = node.status().tiers[0]
    assert (tier.loaded_bytes, 250_000 < tier.read_bytes < 260_000) == (500_000, True)


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
    assert [(span.num_layers, span.nbytes, span.transfer) for span in found] == [(1, NBYTES, "")] * 2
    assert sum(span.end_ns - span.start_ns for span in found) == counters["disk_loaded_ns"]
    stored = [span for span in trace.read(spans) if span.lane is trace.Lane.DISK_STORE]
    assert len(stored) == 3
    assert all(begin_ns < span.start_ns < span.end_ns < end_ns for span in [*found, *stored])


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
    assert read(node.address, NAMES[0], None) is None
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


def test_several_disks_have_a_part_each_and_all_of_it_is_found_by_more_disks_too(start_here, place):
    folders = [str(place / name) for name in "abc"]
    node = start_here(disks=folders)
    fill(node.address)
    tiers = node.status().tiers
    assert [(tier.name, tier.place) for tier in tiers] == [(f"disk {folder}", folder) for folder in folders]
    assert sum(tier.chunks for tier in tiers) == len(NAMES)
    assert all(tier.chunks for tier in tiers), "each has some"
    node.close()
    node = start_here(disks=[str(place / "another"), *folders])
    wait_until(lambda: sum(tier.chunks for tier in node.status().tiers) == len(NAMES), what="the indices are read")
    assert [read(node.address, name) for name in NAMES] == [content(name) for name in NAMES]
    assert node.status().counters["disk_loaded"] == len(NAMES)
