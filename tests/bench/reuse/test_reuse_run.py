"""A whole run of the reuse bench on stand-ins: who is asked what, where tokens are found, and what is refused."""

import json

import pytest
from click.testing import CliRunner
from standin_engine import BLOCK, StandIn

from pdx.bench.reuse import records, report, run
from pdx.bench.reuse.records import BURST, DOCUMENTS, FIRST, KNOWN, SESSIONS
from pdx.bench.reuse.run import Plan
from pdx.bench.reuse.workload import Settings
from pdx.bench.systems.system import Bed
from pdx.cli.main import main

SMALL = {
    "workloads": (DOCUMENTS, SESSIONS),
    "documents": 6,
    "tokens": 8 * BLOCK,
    "question_tokens": 5,
    "rounds": 2,
    "sessions": 6,
    "turns": 3,
    "first_tokens": 6 * BLOCK,
    "message_tokens": BLOCK,
    "output_tokens": 4,
    "loads": (5.0,),
    "rates": (),
    "repeats": 2,
}
ROOM = 3 * 9  # blocks: three documents with their questions


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run, "SAVED_S", 0.0)
    monkeypatch.setattr(report, "draw", lambda result, path: None)


@pytest.fixture
def carry_out(model, tmp_path):
    """Runs these systems; the status and the result."""

    def carry_out(*chosen, max_engines=9, **settings):
        bed = Bed(model, "some-model", (), {}, tmp_path / "logs", 6000, "1GiB")
        out = tmp_path / "out"
        out.mkdir()
        plan = Plan(
            settings=Settings(**{**SMALL, **settings}),
            systems={system.name: system for system in chosen},
            not_run={},
            bed=bed,
            targets=(2.0, 4.0),
            max_engines=max_engines,
            out=out,
            facts={},
        )
        return run.run(plan), records.Result.load(out / report.RESULT)

    return carry_out


def recompute(**settings):
    return StandIn("recompute", **settings)


def test_each_systems_tokens_are_counted_by_where_they_were_found(carry_out, tmp_path):
    ours, own = StandIn("pdx-both", room=ROOM, keeps=True), StandIn("own-cache", room=100_000)
    status, result = carry_out(recompute(), own, ours, repeats=1)
    assert (status, result.is_complete, result.not_run) == (0, True, {})
    assert len(result.points) == 3 * (4 + 3)  # systems, loads of each workload
    for point in result.points:
        if point.load == FIRST or point.workload != DOCUMENTS:
            continue
        assert point.found.prompt == sum(each.prompt_tokens for each in point.asked)
        known = SMALL["documents"] * (1 if point.load == KNOWN else SMALL["rounds"]) * SMALL["tokens"]
        found = {
            "recompute": (0, 0),
            "own-cache": (known, 0),
            "pdx-both": (known - point.found.external, known - point.found.local),
        }[point.system]
        assert (point.found.local, point.found.external) == found
        if point.system == "pdx-both":
            assert point.found.external > 0
    figures = {
        each["name"]: each["value"] for each in json.loads((tmp_path / "out" / "reuse.json").read_text())["figures"]
    }
    assert figures["answers that are those of the reference"] == 1.0
    assert figures["loads whose tokens were found where they should be"] == 1.0
    assert figures["documents, one at a time, known: TTFT p50, recompute / pdx-both"] > 0


@pytest.mark.long
def test_a_store_for_all_hosts_is_filled_by_the_other_engine(carry_out):
    central = StandIn("pdx-central", room=ROOM, keeps=True, engines=2)
    status, result = carry_out(recompute(), central, workloads=(DOCUMENTS,), repeats=1)
    assert status == 0
    first, asked = central.started[0].engines
    to_first = [prompt for _, url, prompt in central.journal if url == first.url]
    assert len(to_first) == 2 + SMALL["documents"]  # warm-ups, and once each document
    burst = next(point for point in result.points if (point.system, point.load) == ("pdx-central", BURST))
    assert burst.found.local + burst.found.external == len(burst.asked) * SMALL["tokens"]
    assert asked.num_asked == 2 + SMALL["documents"] + len(burst.asked) * 2


@pytest.mark.long
def test_a_wrong_answer_is_an_error(carry_out):
    status, result = carry_out(StandIn("own-cache", room=100_000, is_wrong=True), recompute(), repeats=1)
    assert status == 1
    checked = [each.is_same for point in result.points if point.system == "own-cache" for each in point.asked]
    assert checked
    assert not any(checked)


@pytest.mark.long
def test_what_stops_answering_keeps_what_was_measured(carry_out):
    fails = StandIn("own-cache", room=100_000, fails=lambda number: number == 27)
    status, result = carry_out(fails, recompute(), repeats=1)
    assert status == 0
    assert result.not_run["own-cache"].startswith("stopped answering (own-cache, documents, load 5")
    assert {point.load for point in result.points if point.system == "own-cache"} == {FIRST, KNOWN, BURST}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--systems", "pdx-both,lmcash"], "unknown system 'lmcash' (known: recompute, "),
        (["--workloads", "poems"], "'poems' is none; there are documents, sessions"),
        (["--documents", "4"], "more --documents, or nothing need come from elsewhere"),
    ],
)
def test_what_is_refused(options, says, tmp_path, model, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    command = ["bench", "reuse", "--model", str(model), "--out", str(tmp_path / "refused"), *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code != 0
    assert says in " ".join((result.output + str(result.exception)).replace("│", " ").split())
