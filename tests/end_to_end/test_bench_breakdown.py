"""`pdx bench breakdown` on real engines: every request divided into parts, answers compared, pictures drawn."""

import json
import sys

import pytest
from cli_process import status_of
from tiny import make_tiny

from pdx.bench.breakdown import records

MARKS = ("received", "prefill_end", "runnable", "decode_first")
pytestmark = [pytest.mark.engine, pytest.mark.long]

TOKENS, TOGETHER, OUTPUT = 600, 2, 8
LAYERS, KV_BYTES = 4, 4 * 2 * 4 * 64 * 4
BLOCK = 128
PARTS = ("queue", "prefill", "gather", "wire", "scatter", "first_decode", "rest")
END_S = 60  # to end its engines
LIMIT_S = 400  # two engines, then one, on a machine that does other things, too


@pytest.mark.timeout(LIMIT_S + END_S + 30)
def test_breakdown_of_real_requests(tmp_path):
    model = make_tiny(tmp_path / "model", seed=3)
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "bench", "breakdown", "--model", str(model)]
    command += ["--tokens", str(TOKENS), "--concurrency", f"1,{TOGETHER}", "--output-tokens", str(OUTPUT)]
    command += ["--systems", "pdx,plain", "--max-engines", "2", "--rounds", "1", "--warmups", "1"]
    command += ["--out", str(out), "--", "--dtype", "float32"]
    status, said = status_of(command, LIMIT_S, END_S)
    assert status == 0, said
    result = records.Result.load(out / "result.json")
    assert result.is_complete
    assert result.not_run == {}
    assert (result.model["kv_bytes_per_token"], result.model["layers"]) == (KV_BYTES, LAYERS)

    requests = [each for each in result.requests if each.system == "pdx"]
    assert [each.concurrency for each in requests] == [1, TOGETHER, TOGETHER]
    assert all(each.is_same for each in requests)
    for request in requests:
        _check_parts(request)
    alone = requests[0]
    assert alone.engines.computed_tokens <= 1  # vLLM counts 0 where all was loaded, though it computes the last again
    assert alone.output_tokens == OUTPUT
    assert 1 <= len(alone.itl_ms) < OUTPUT  # a server that is late sends several tokens in one event

    [trace] = result.traces
    gathered = [span for span in trace.spans if span.lane == "gather"]
    assert {span.first_layer for span in gathered} == set(range(LAYERS))
    assert sum(span.nbytes for span in gathered) == alone.moved_bytes == -(-TOKENS // BLOCK) * BLOCK * KV_BYTES
    received, prefill_end, runnable, decode_first = (trace.marks[name] for name in MARKS)
    assert received < prefill_end
    assert received < runnable < decode_first, "it may be ready before prefill's step ends"
    assert trace.marks["first_token"] <= decode_first, "of whichever engine has it first"

    plain = [each for each in result.requests if each.system == "plain"]
    assert all(each.parts.prefill.exposed_ms > 0 and each.decode_first_ms is None for each in plain)
    figures = {each["name"]: each["value"] for each in json.loads((out / "breakdown.json").read_text())["figures"]}
    assert figures["answers equal to plain vLLM's"] == 1.0
    assert figures[f"{TOKENS} tokens: pdx: prefill's end until the decoder may run, by its timeline"] < 10_000
    for name in ("breakdown.png", "ttft-cdf.png", "itl-cdf.png", "concurrency.png", f"timeline-pdx-{TOKENS}.png"):
        assert (out / name).stat().st_size > 10_000


def _check_parts(request):
    parts = {name: getattr(request.parts, name) for name in PARTS}
    for name, part in parts.items():
        assert 0 <= part.exposed_ms <= part.total_ms, name
    for name in ("prefill", "gather", "rest"):
        assert parts[name].exposed_ms > 0, name
    for name in ("scatter", "first_decode"):  # which may have run while prefill ended
        assert parts[name].total_ms > 0, name
    assert parts["wire"].total_ms == 0  # there is one node
    whole_ms = sum(part.exposed_ms for part in parts.values())
    assert whole_ms <= request.decode_first_ms  # from the client's sending, a moment earlier
    assert whole_ms >= request.decode_first_ms * 0.5
    assert request.hidden_share > 0.5
