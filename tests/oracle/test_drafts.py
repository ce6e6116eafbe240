"""Draft models: what they propose is as good behind a load as behind computing, and where their chunks are not there
only that is worse; who has another one, or none, shares the model's own chunks. Every token is right in any case.

The toy's draft model proposes nothing right unless every byte of its pages is. So a page of it that is missing, stale
or saved under a wrong key is seen in what is accepted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exact_engine import BLOCK, DRAFTS, run_together, tokens
from exact_model import answer
from node_harness import MIB, NodeThread
from oracle_bed import OracleBed

from pdx.engine import drafts
from pdx.engine.request import TrackedRequest
from pdx.engine.store_lookup import StoreLookup
from pdx.testing.waiting import wait_until

HISTORY = 1024  # tokens: four chunks
NUM_CHUNKS = 4

# vLLM has the draft model's layers in the group of the model's own where they look alike.
each_place = pytest.mark.parametrize("kind", ["full", "apart"], ids=["in one group", "in a group of their own"])


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other things an answer may take long."""
    monkeypatch.setattr(drafts, "WAIT_S", float("inf"))


def drafting(kind: str = "full", **shape: Any) -> dict[str, Any]:
    return {"kind": kind, "drafts": True, "draft_layers": 1, **shape}


NONE = {"kind": "undrafted"}


def on_node(node: NodeThread, model: Path) -> contextlib.closing[OracleBed]:
    return contextlib.closing(OracleBed(model, node, "drafts"))


def rate(engine: Any, name: str, prompt: list[int], count: int = 200, **settings: Any) -> float:
    """Which share of what is drafted for this request is accepted. Its answer is right."""
    runner = engine.runner
    drafted, accepted = runner.drafted, runner.accepted
    engine.ask(name, prompt, count, **settings)
    return float((runner.accepted - accepted) / (runner.drafted - drafted))


def found(engine: Any, name: str, prompt: list[int], **settings: Any) -> int:
    """How many tokens of the prompt were not computed."""
    before = engine.runner.computed
    engine.ask(name, prompt, 1, **settings)
    return len(prompt) - int(engine.runner.computed - before)


def alone(bed: OracleBed, prompt: list[int], **shape: Any) -> float:
    """The rate of an engine that has no connector."""
    return rate(bed.engine("alone", connector=None, **shape), "a", prompt)


def written(bed: OracleBed, **shape: Any) -> list[int]:
    history = bed.tokens(HISTORY)
    bed.engine("writer", **shape).ask("w", history + bed.tokens(50, "w"), 2)
    bed.settled()
    return history


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@each_place
def test_drafts_behind_a_load_are_as_good_as_those_behind_computing(
    bed: OracleBed, kind: str, asynchronous: bool
) -> None:
    """Also where a step is planned before it is known which drafts of the one before were right."""
    shape = drafting(kind, asynchronous=asynchronous)
    history = written(bed, **shape)
    assert bed.counted("sealed") == 2 * NUM_CHUNKS + 1, "parts of chunks are the model's own alone"
    reader = bed.engine("reader", **shape)
    prompt = history + bed.tokens(60, "a")
    with_pdx, without = rate(reader, "a", prompt), alone(bed, prompt, **shape)
    assert reader.faults.loads == 1
    assert not bed.counted("degraded_drafts_missing")
    assert with_pdx == pytest.approx(without, abs=0.02)
    assert without > 0.2, "most of what it proposes is wrong for the toy's own reasons"


@pytest.mark.parametrize(
    ("kind", "length"),
    [("full", 640), ("full", 1000), *(("apart", 40 * BLOCK + over) for over in (-DRAFTS, -1, 1, DRAFTS))],
)
def test_drafts_behind_a_handoff_are_as_good(bed: OracleBed, kind: str, length: int) -> None:
    """The tail of the prompt goes with it, and no more than that, as in vllm#46694, where slots for drafts were among
    those that a transfer was to fill: the decoder had a block more than the prefill engine, or drafts in the last one,
    of which a part was valid."""
    prefill = bed.engine("prefill", **drafting(kind))
    decode = bed.engine("decode", **drafting(kind))
    prompt, transfer = bed.tokens(length, "p"), f"transfer-of-drafts-{kind}-{length}"
    prefill.ask("p", prompt, 1, params={"do_remote_decode": True, "transfer_id": transfer})
    params = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": length}
    with_pdx = rate(decode, "d", prompt + prefill.outputs["p"], params=params)
    assert decode.faults.loads == 1
    without = alone(bed, prompt + prefill.outputs["p"], **drafting(kind))
    assert with_pdx == pytest.approx(without, abs=0.02)


def test_drafts_behind_a_handoff_of_both_legs_at_once_are_as_good(bed: OracleBed) -> None:
    prefill = bed.engine("prefill", budget=256, **drafting())
    decode = bed.engine("decode", **drafting())
    prompt, transfer = bed.tokens(1000, "p"), "transfer-of-both-and-drafts"
    prefill.add("p", prompt, 1, {"do_remote_decode": True, "transfer_id": transfer})
    decode.add("d", prompt, 200, {"do_remote_prefill": True, "transfer_id": transfer, "is_early": True})
    run_together(prefill, decode)
    decode.check("d")
    assert decode.faults.loads == 1
    with_pdx = decode.runner.accepted / decode.runner.drafted
    assert with_pdx == pytest.approx(alone(bed, prompt, **drafting()), abs=0.02)


OTHERS = {"no draft model": NONE, "another draft model": drafting(drafter="another one")}


@pytest.mark.parametrize(("kind", "is_writer"), [("full", False), ("apart", True)], ids=["reads", "writes"])
@pytest.mark.parametrize("other", OTHERS)
def test_who_has_another_draft_model_or_none_shares_the_models_own_chunks(
    bed: OracleBed, kind: str, other: str, is_writer: bool
) -> None:
    """What is missing of the draft model's is no miss, and nobody is given another's."""
    shapes = [OTHERS[other], drafting(kind)]
    writer, reader = shapes if is_writer else shapes[::-1]
    history = written(bed, **writer)
    engine = bed.engine("reader", **reader)
    assert found(engine, "a", history + bed.tokens(60, "a")) == HISTORY
    wait_until(lambda: bed.counted("degraded_drafts_missing") == bool(reader.get("drafts")), what="it is counted")
    if reader.get("drafts"):
        assert rate(engine, "b", history + bed.tokens(61, "b")) == 0, "its drafts' pages hold another's KV, or none"
        other_prompt = bed.tokens(900, "other")
        assert rate(engine, "c", other_prompt) == pytest.approx(alone(bed, other_prompt, **reader), abs=0.02)


@pytest.mark.parametrize("is_early", [False, True], ids=["one after the other", "at once"])
def test_a_handoff_from_an_engine_without_a_draft_model_computes_no_more_than_others(
    bed: OracleBed, is_early: bool
) -> None:
    prefill, decode = bed.engine("prefill", **NONE), bed.engine("decode", **drafting())
    prompt, transfer = bed.tokens(1000, "p"), f"transfer-without-drafts-{is_early:d}"
    prefill.add("p", prompt, 1, {"do_remote_decode": True, "transfer_id": transfer})
    if not is_early:
        prefill.run()
    early = {"is_early": True} if is_early else {"prefill_tokens": 1000}
    decode.add("d", prompt, 40, {"do_remote_prefill": True, "transfer_id": transfer, **early})
    run_together(prefill, decode)
    decode.check("d")
    assert decode.runner.computed - decode.runner.drafted <= 1 + 40


def test_a_request_waits_for_its_drafts_so_long_and_no_longer(bed: OracleBed, monkeypatch: pytest.MonkeyPatch) -> None:
    history = written(bed, **drafting())
    reader = bed.engine("reader", **drafting())
    advance = StoreLookup.advance

    def no_drafts(self: StoreLookup, tracked: TrackedRequest, *args: Any, **settings: Any) -> bool:
        return tracked.drafts is not None and advance(self, tracked, *args, **settings)

    monkeypatch.setattr(StoreLookup, "advance", no_drafts)
    reader.add("a", history + bed.tokens(60, "a"), 8)
    tracked = reader.half.track(reader.requests["a"])
    while tracked.drafts.needed_since is None:
        reader.step()
    for _ in range(3):
        reader.step()
    assert (reader.runner.computed, reader.faults.loads) == (0, 0)
    monkeypatch.setattr(drafts, "WAIT_S", 0.0)
    reader.run()
    reader.check("a")
    assert reader.faults.loads == 1


def test_what_rests_on_drafts_that_are_not_there_is_not_saved(bed: OracleBed) -> None:
    """Neither pages that nobody has filled, nor by a request that finds them in the engine's own cache."""
    history = written(bed, **NONE)
    reader = bed.engine("reader", **drafting())
    before = bed.counted("sealed")
    for name in "ab":
        reader.ask(name, history + bed.tokens(300, "same"), 300)
    bed.settled()
    of_each = (HISTORY + 300 + 300 - 1) // 256 - NUM_CHUNKS
    assert bed.counted("sealed") - before <= 2 * of_each + 1
    fresh, missing = bed.engine("fresh", **drafting()), bed.counted("degraded_drafts_missing")
    fresh.ask("a", history + bed.tokens(300, "same") + answer(history + bed.tokens(300, "same"), 300, fresh.mixers), 8)
    fresh.runner.pages.torn = 0
    wait_until(lambda: bed.counted("degraded_drafts_missing") > missing, what="the beginning has none")


def test_what_is_generated_with_drafts_is_found_on_a_disk(
    model: Path, place: Path, start_here: Callable[..., NodeThread]
) -> None:
    """As in vllm#55503, where keys and blocks of an MTP model were not as many, which ended the engine."""
    prompt, count, kind = tokens(300, "on a disk"), 700, "apart"
    chunks = (len(prompt) + count - 1) // 256
    settings = {"arena_bytes": 64 * MIB, "disks": [str(place / "disk")], "disk_reserve_bytes": 0}
    node = start_here(**settings)
    with on_node(node, model) as bed:
        writer = bed.engine("writer", **drafting(kind))
        writer.ask("w", prompt, count)
        assert 0 < writer.runner.accepted < writer.runner.drafted
        bed.settled()
        wait_until(lambda: bed.counted("disk_stored") >= 2 * chunks, what="its chunks are on the disk")
    node.close()
    known = prompt + writer.outputs["w"]
    with on_node(start_here(**settings), model) as bed:
        reader = bed.engine("reader", **drafting(kind))
        with_pdx = rate(reader, "r", known + bed.tokens(30))
        assert bed.counted("disk_loaded") == 2 * chunks
        assert not bed.counted("degraded_drafts_missing")
        assert with_pdx == pytest.approx(alone(bed, known + bed.tokens(30), **drafting(kind)), abs=0.02)


def test_a_reset_leaves_no_drafts_of_before(bed: OracleBed) -> None:
    history = written(bed, **drafting())
    reader = bed.engine("reader", **drafting())
    reader.ask("a", history + bed.tokens(300, "a"), 30)
    assert reader.scheduler.reset_prefix_cache(reset_connector=True)
    prompt = history + bed.tokens(301, "b")
    assert found(reader, "b", prompt) == 0
    bed.settled()
    reader.scheduler.reset_prefix_cache()
    assert rate(reader, "c", prompt + bed.tokens(20, "c")) == pytest.approx(
        alone(bed, prompt + bed.tokens(20, "c"), **drafting()), abs=0.02
    )
    assert reader.faults.loads == 2
