"""Real nodes with disks and a real remote store: what they count of each tier and tell of it, and serve from there."""

import contextlib
import os

import pytest
from click.testing import CliRunner
from node_harness import MIB, attached
from raw_engine import CHUNK_BYTES, LAYERS, Engine, key
from remote_bed import made
from scraping import address_in, scrape

from pdx.cli.main import main
from pdx.telemetry.names import COPIES
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Fill, Release

COUNTED = ("hits", "misses", "loads", "stores", "loaded_bytes", "stored_bytes", "dropped", "errors")
COUNTED += ("read_bytes", "written_bytes")


@pytest.fixture
def redis(tmp_path):
    server = made("redis", tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture
def node(start_node, place, redis):
    disks = [str(place / name) for name in "ab"]
    node = start_node(arena_bytes=MIB, disks=disks, remote=redis.url, remote_lookup_s=20.0, metrics="127.0.0.1:0")
    wait_until(lambda: all(tier.state == "ok" for tier in node.status().tiers), what="all tiers are ready")
    return node


@pytest.fixture
def ask(node):
    """Asks for chunks, and saves those that are missing and do not come in time; how many were there."""
    with (
        attached(node.address, kind="scheduler", engine="e") as scheduler,
        attached(node.address, kind="worker", engine="e") as worker,
    ):

        def ask_it(numbers):
            fields = {"lease_s": 20.0, "wait_s": 20.0, "partial": True}
            answer = scheduler.ask(Admit([key(number) for number in numbers], CHUNK_BYTES, LAYERS, **fields))
            if answer.granted_slots:
                worker.ask(Fill(answer.granted_slots, 0, LAYERS, seal=True))
            if answer.lease:
                scheduler.ask(Release(answer.lease))
            return answer.hits

        yield ask_it


def counted(node):
    """By tier: its chunks that were found, missed, loaded and stored, those left out, and errors."""
    return {
        tier.name.split("/")[-1]: (tier.hits, tier.misses, tier.loads, tier.stores, tier.dropped, tier.errors)
        for tier in node.status().tiers
    }


def stored(node, chunks):
    wait_until(lambda: [tier.stores for tier in node.status().tiers] == chunks, what="all are stored")


def test_each_tier_is_counted_for_itself_and_told_everywhere(node, ask, place, redis):
    assert ask(range(8)) == 0
    stored(node, [4, 4, 8])
    assert counted(node) == {"a": (0, 1, 0, 4, 0, 0), "b": (0, 0, 0, 4, 0, 0), "remote": (0, 1, 0, 8, 0, 0)}
    assert ask(range(100, 116)) == 0, "all of memory is for these"
    stored(node, [12, 12, 24])
    [damaged] = place.glob(f"b/*/{key(1).hex()}*")
    with open(damaged, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    assert ask(range(8)) == 8
    stored(node, [12, 13, 24])  # chunk 1 has come from the store that others share, and goes to its disk again
    assert counted(node) == {"a": (4, 2, 4, 12, 0, 0), "b": (3, 1, 3, 13, 0, 1), "remote": (1, 2, 1, 24, 0, 0)}
    found, names = scrape(address_in(node.log)), {tier.name: tier for tier in node.status().tiers}
    took = [found["pdx_node_copy_seconds_count", way, kind] > 0 for kind, way in COPIES]
    assert took == [kind in ("disk", "remote") for kind, _ in COPIES]
    assert len(names) == 3
    for name, tier in names.items():
        assert {each: found[f"pdx_node_tier_{each}_total", name] for each in COUNTED} == {
            each: getattr(tier, each) for each in COUNTED
        }
        assert tier.loaded_bytes == tier.loads * CHUNK_BYTES
        assert tier.stored_bytes == tier.stores * CHUNK_BYTES
        for gauge in ("chunks", "used_bytes", "limit_bytes", "copies"):
            assert found[f"pdx_node_tier_{gauge}", name] == getattr(tier, gauge)
        assert found["pdx_node_tier_load_bytes_per_second", name] == pytest.approx(tier.load_gb_s * 1e9)
        assert found["pdx_node_tier_store_bytes_per_second", name] == pytest.approx(tier.store_gb_s * 1e9)
        assert found["pdx_node_tier_up", name] == 1
    page = CliRunner().invoke(main, ["node", "--status", "--node", node.address], env={"COLUMNS": "300"}).output
    for said in ("4 hits, 2 misses\n", "loaded 4, 256.0 KiB; stored 12, 768.0 KiB", "3 hits, 1 misses; 1 errors\n"):
        assert said in page


def test_what_one_node_has_stored_another_serves_from_arena_disk_and_remote_in_one_answer(start_here, place, redis):
    contents = {key(number): os.urandom(CHUNK_BYTES) for number in range(30)}
    keys, disk = list(contents), {"disks": [str(place / "disk")]}

    def save(some, counter, **tier):
        """By a node that is gone then."""
        node = start_here(address=f"ipc://{place}/{counter}.sock", **tier)
        wait_until(lambda: node.status().tiers[0].state == "ok", what="its tier is ready")
        with contextlib.closing(Engine(node.address)) as engine:
            engine.save({name: contents[name] for name in some})
        wait_until(lambda: node.counter(counter) == len(some), what="all are stored")
        node.close()

    save(keys[20:], "remote_stored", remote=redis.url)
    save(keys[10:20], "disk_stored", **disk)
    node = start_here(remote=redis.url, remote_lookup_s=20.0, **disk)
    wait_until(lambda: [tier.state for tier in node.status().tiers] == ["ok", "ok"], what="both tiers are ready")
    with contextlib.closing(Engine(node.address)) as engine:
        engine.save({name: contents[name] for name in keys[:10]})
        assert engine.look([*keys, key(999)]) == list(contents.values())
    assert (node.counter("disk_loaded"), node.counter("remote_loaded")) == (10, 10)
    wait_until(lambda: node.status().tiers[0].chunks == 30, what="what came from afar is on the disk as well")
