"""Real nodes that share a real remote store: the other serves what one has stored, but for what must not be shared."""

from __future__ import annotations

import itertools
import os

import pytest
from raw_engine import CHUNK_BYTES, Engine, key
from remote_bed import made

from pdx.testing.waiting import wait_until


@pytest.fixture
def redis(tmp_path):
    server = made("redis", tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture
def start(start_here, place):
    """Starts nodes with an address each."""
    numbers = itertools.count()
    return lambda **settings: start_here(address=f"ipc://{place}/{next(numbers)}.sock", **settings)


@pytest.fixture
def engine():
    engines = []

    def attach(node):
        engines.append(Engine(node.address))
        return engines[-1]

    yield attach
    for one in engines:
        one.close()


def counters(node):
    return node.status().counters


def test_what_one_node_has_stored_another_serves(start, engine, redis):
    contents = {key(number): os.urandom(CHUNK_BYTES) for number in range(40)}
    first, second = start(remote=redis.url), start(remote=redis.url)
    wait_until(lambda: [node.status().tiers[0].state for node in (first, second)] == ["ok", "ok"], what="it answers")
    writer, reader = engine(first), engine(second)
    writer.save(contents)
    wait_until(lambda: counters(first).get("remote_stored") == 40, what="all are stored")
    assert reader.look([*contents, key(999)]) == list(contents.values())
    assert counters(second)["remote_loaded"] == 40
    assert counters(second).get("remote_stored", 0) == 0, "what was loaded is not stored again"
    first.close()
    alone = start(remote=redis.url)
    wait_until(lambda: alone.status().tiers[0].state == "ok", what="it answers")
    third = engine(alone)
    assert third.look(list(contents)) == list(contents.values()), "it needs no node but its own"


def test_chunks_come_from_arena_disk_and_remote_in_one_answer(start, engine, redis, place):
    contents = {key(number): os.urandom(CHUNK_BYTES) for number in range(30)}
    keys = list(contents)
    disk = str(place / "disk")
    far, near = start(remote=redis.url), start(disks=[disk])
    wait_until(lambda: far.status().tiers[0].state == "ok", what="it answers")
    engine(far).save({name: contents[name] for name in keys[20:]})
    engine(near).save({name: contents[name] for name in keys[10:20]})
    wait_until(lambda: counters(far).get("remote_stored") == 10, what="all are stored")
    wait_until(lambda: counters(near).get("disk_stored") == 10, what="all are stored")
    near.close()
    node = start(disks=[disk], remote=redis.url)
    wait_until(lambda: [tier.state for tier in node.status().tiers] == ["ok", "ok"], what="both tiers are ready")
    here = engine(node)
    here.save({name: contents[name] for name in keys[:10]})
    assert here.look(keys) == list(contents.values())
    found = counters(node)
    assert (found["disk_loaded"], found["remote_loaded"]) == (10, 10)
    wait_until(lambda: node.status().tiers[0].chunks == 30, what="what came from afar is on the disk as well")
