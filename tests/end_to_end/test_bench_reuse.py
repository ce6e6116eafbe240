"""`pdx bench reuse` on a real engine and its node: documents come back from the node, and its own counters say so."""

import json
import sys

import pytest
from cli_process import status_of

from pdx.bench.harness.tiny_llama import make_model
from pdx.bench.reuse import records
from pdx.bench.reuse.records import BURST, FIRST

pytestmark = [pytest.mark.engine, pytest.mark.long]

# Tokens of a document, those of them that are in whole blocks, and documents. A step of this model takes as long with
# 300 tokens as with one, and what costs nothing to compute need not be loaded.
TOKENS, KNOWN, DOCUMENTS = 1500, 1408, 6
END_S = 60  # to end its engine
LIMIT_S = 300  # under a minute where nothing else runs


@pytest.mark.timeout(LIMIT_S + END_S + 30)
def test_documents_come_back_from_the_node(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    model = make_model(tmp_path / "small", layers=2, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128)
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "bench", "reuse", "--model", str(model), "--out", str(out)]
    command += ["--systems", "pdx-both", "--workloads", "documents", "--documents", str(DOCUMENTS), "--repeats", "1"]
    command += ["--tokens", str(TOKENS), "--question-tokens", "8", "--rounds", "1", "--output-tokens", "4"]
    command += ["--rates", "inf", "--max-engines", "1", "--", "--dtype", "float32"]
    status, said = status_of(command, LIMIT_S, END_S)
    assert status == 0, said
    result = records.Result.load(out / "result.json")
    assert (result.is_complete, result.not_run) == (True, {})
    points = {point.load: point for point in result.points}
    assert points.keys() == {FIRST, records.KNOWN, BURST}
    assert (points[FIRST].found.local, points[FIRST].found.external) == (0, 0)  # nobody has seen them
    found = points[BURST].found
    assert (found.local + found.external, found.prompt) == (DOCUMENTS * KNOWN, DOCUMENTS * (TOKENS + 8))
    assert found.external > 0
    assert all(len(each.token_ids) == 4 for point in result.points for each in point.asked)
    assert points[BURST].cpu_s["engine"] > 0
    figures = {each["name"]: each["value"] for each in json.loads((out / "reuse.json").read_text())["figures"]}
    assert figures["loads whose tokens were found where they should be"] == 1.0
    assert (out / "reuse.png").stat().st_size > 10_000
