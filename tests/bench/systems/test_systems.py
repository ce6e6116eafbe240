"""The systems without engines: what they say of themselves, and how servers are started, watched and ended."""

import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from installed import packages

from pdx.bench.systems import baselines, fleet, system
from pdx.bench.systems import pdx as pdx_systems
from pdx.bench.systems.names import SYSTEMS, CannotRun, Running

ORDER = [
    *("pdx", "pdx-tcp", "pdx-shm", "pdx-nixl", "pdx-ucx"),
    *("pdx-gpu", "pdx-cuda_ipc"),
    *("pdx-both", "pdx-both-128"),
    *("nixl", "nixl-yield"),
    *("lmcache", "lmcache-128", "plain"),
]
PAIRS = ["nixl", "nixl-yield"]
WITH_STORE = ["pdx-both", "pdx-both-128", "lmcache", "lmcache-128"]  # a process beside the engine
# Argument: port, then what to do instead of serving. Serves /health and whatever else with its own port.
SERVER = """
import http.server, json, sys
port, what = int(sys.argv[1]), sys.argv[2]
if what == "fail":
    print("(Worker pid=3) ERROR 11-21 21:06:44 [core.py:1510] ValueError: the cause", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(3)
if what == "hang":
    failed = "(EngineCore pid=3) ERROR 11-21 21:06:44 [core.py:1510] EngineCore failed to start."
    cause = "RuntimeError: Worker failed with error 'no accelerator', please check the stack trace"
    print(failed, cause, sep="\\n", flush=True)  # in one piece, whoever reads meanwhile
    sys.stdin.read()
    import time; time.sleep(600)
if what == "slow":
    print("loading", flush=True)
    import time; time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status = 404 if self.path.endswith("gone") else 200
        answers = {"/moments/r": {"received": 1.5}, "/pdx/requests/t": {"moments": [{"event": "done", "at_ns": 7}]}}
        body = json.dumps(answers.get(self.path, {})).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.parametrize("name", ORDER)
def test_nothing_raises_with_whatever_is_installed(name, monkeypatch):
    if name in ("pdx-nixl", "pdx-ucx"):  # each loads a UCX of its own, and one process does not bear both for long
        monkeypatch.setattr(pdx_systems, "find", lambda scheme: _region(_No("no library", "")))
    assert isinstance(SYSTEMS[name].why_not(), str)
    assert all(SYSTEMS[name].versions().values())
    packages(monkeypatch)
    assert "vLLM is not installed: pip install vllm" in SYSTEMS[name].why_not()
    assert SYSTEMS[name].versions() == {}


def test_a_channel_that_does_not_work_is_why_not(monkeypatch):
    packages(monkeypatch, vllm="0.32.0")

    monkeypatch.setattr(pdx_systems, "find", lambda scheme: _region(_No("no link", "plug it in")))
    assert SYSTEMS["pdx-tcp"].why_not() == "no link; plug it in"
    assert SYSTEMS["pdx-cuda_ipc"].why_not() == "no link; plug it in"
    assert SYSTEMS["pdx"].why_not() == SYSTEMS["pdx-gpu"].why_not() == ""


def _region(found):
    return type("Region", (), {"availability": lambda: found})


class _No:
    is_ok = False

    def __init__(self, why, fix):
        self.why, self.fix = why, fix


@pytest.mark.parametrize("name", ORDER)
def test_commands_can_be_typed_and_name_no_place_of_this_machine(name, bed, two_cores):
    lines = SYSTEMS[name].commands(bed)
    remarks = [line for line in lines if line.startswith("# ")]
    several = {**dict.fromkeys(WITH_STORE, 2), **dict.fromkeys(PAIRS, 3)}
    assert len(lines) - len(remarks) == several.get(name, 1)
    for line in lines:
        assert str(bed.model) not in line
        assert sys.executable not in line
        assert "/" not in line.replace("http://", "").replace("tcp://", "")
        assert shlex.split(line)


@pytest.mark.parametrize("name", ORDER)
def test_all_engines_get_the_same_flags_memory_and_cores(name, bed, two_cores):
    lines = [line for line in SYSTEMS[name].commands(bed) if "MODEL" in line]
    for line in lines:
        assert "--served-model-name tiny --max-model-len 6000 --enforce-eager" in line
        assert line.startswith("VLLM_CPU_KVCACHE_SPACE=1 ")
    if not SYSTEMS[name].is_pdx:  # `pdx up` places its own engines, in the same way
        words = [word for line in lines for word in shlex.split(line)]
        bound = [word.partition("=")[2] for word in words if word.startswith("VLLM_CPU_OMP_THREADS_BIND=")]
        assert bound == ["0", "1"][: len(lines)]


def test_pdx_is_started_with_its_channel(bed, two_cores):
    told = "--admin 127.0.0.1:8001 --debug-headers"
    assert f"pdx up MODEL --port 8000 {told} --arena 1GiB -- --served" in SYSTEMS["pdx"].commands(bed)[0]
    assert "--arena 1GiB --channel tcp -- --served" in SYSTEMS["pdx-tcp"].commands(bed)[0]
    assert "--gpu-arena 1GiB --gpu 0 -- --served" in SYSTEMS["pdx-gpu"].commands(bed)[0]
    assert "--channel cuda_ipc --gpu 0,1 -- --served" in SYSTEMS["pdx-cuda_ipc"].commands(bed)[0]


def command(name, port, what="serve"):
    program = (sys.executable, "-c", SERVER)
    return system.Command(name, program, "server", (str(port), what), f"http://127.0.0.1:{port}")


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_servers_start_serve_and_end(tmp_path):
    ports = baselines.Ports.free()
    both = [command("prefill", ports.prefill), command("decode", ports.decode)]
    servers = system.Servers(tmp_path)
    try:
        servers.start(both)
        pids = servers.pids("prefill") + servers.pids("decode")
        running = Running(servers, both, command("proxy", ports.prefill))
        assert (running.prefill_url, running.decode_url) == (both[0].url, both[1].url)
        assert running.moments("r") == {"received": 1.5}
        assert running.moments("gone") is None
        assert (running.timeline("t"), running.died()) == (None, "")
        assert Running(servers, both[:1]).moments("r") is None
        pdx = pdx_systems.PdxRunning(servers, ports.prefill, ports.prefill, is_one_node=True)
        assert [moment.at_ns for moment in pdx.timeline("t")] == [7]
        assert (pdx.timeline("gone"), pdx.moments("r")) == (None, None)
        os.kill(servers.pids("decode")[0], 9)
        while not running.died():
            pass
        assert running.died().startswith("decode ended with status 137")
    finally:
        servers.close()
    servers.close()
    assert len(pids) >= 2
    assert alive(pids) == []


@pytest.mark.parametrize(("what", "words"), [("fail", "status 3: ValueError: the cause"), ("hang", "no accelerator")])
def test_the_decisive_line_says_why_a_server_cannot_run(what, words, tmp_path):
    ports = baselines.Ports.free()
    servers = system.Servers(tmp_path)
    try:
        with pytest.raises(CannotRun, match=words):
            servers.start([command("prefill", ports.prefill), command("decode", ports.decode, what)])
        pids = servers.pids("prefill")
        assert pids
    finally:
        servers.close()
    assert alive(pids) == []


def states(pids):
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


@pytest.mark.long
def test_paused_servers_stand_still_and_can_be_ended(tmp_path):
    ports = baselines.Ports.free()
    servers = system.Servers(tmp_path)
    try:
        engine = command("prefill", ports.prefill)
        servers.start([engine])
        pids = servers.pids("prefill")
        running = Running(servers, [engine])
        running.pause()
        while states(pids) != {"T"}:
            pass
        running.resume()
        while "T" in states(pids):
            pass
        assert running.died() == ""
        running.pause()
    finally:
        servers.close()
    assert alive(pids) == []


def test_who_polls_stands_still_while_another_is_used(monkeypatch):
    monkeypatch.setattr(fleet, "AWAKE_S", 0.0)
    journal = []

    def made(name, *, polls_idle):
        told = {verb: lambda verb=verb: journal.append((name, verb)) for verb in ("pause", "resume", "close")}
        running = SimpleNamespace(died=lambda: "", **told)
        facts = {"name": name, "engines": 1, "is_pdx": False, "polls_idle": polls_idle}
        return SimpleNamespace(start=lambda bed, trace: running, **facts)

    with fleet.Fleet(None, [made("nixl", polls_idle=True), made("plain", polls_idle=False)], 2) as running:
        for name in ("nixl", "plain", "nixl"):
            running.get(name)
    assert journal == [("nixl", "pause"), ("nixl", "resume"), ("nixl", "close"), ("plain", "close")]


@pytest.mark.parametrize("name", ["plain", "nixl", "pdx"])
def test_a_start_that_fails_leaves_nothing(name, bed, two_cores, monkeypatch):
    """No engine can start without a model."""
    before = psutil.Process().children(recursive=True)
    broken = (sys.executable, "-c", SERVER, "1", "fail")
    monkeypatch.setattr(system, "SERVER", broken)
    monkeypatch.setattr(pdx_systems, "UP", broken)
    with pytest.raises(CannotRun, match="ValueError: the cause"):
        SYSTEMS[name].start(bed)
    assert set(psutil.Process().children(recursive=True)) <= set(before)
