"""Places: the oracle's engines have stages, of which the later ones are a step behind the first, and in each of them
ranks, which have the heads among them."""

from __future__ import annotations

from typing import Any

import pytest
from exact_engine import run_together
from oracle_bed import CHUNK, HISTORY, OracleBed, found

EXTRA = {"chunk_tokens": CHUNK}
CUT = {"full": (1, 2), "window": (2, 2), "mixed": (2, 2)}
each_kind = pytest.mark.parametrize("kind", CUT)


def of(kind: str, *, has_stages: bool, **shape: Any) -> dict[str, Any]:
    """The shape of an engine whose chunks are cut into two parts, whether it has a pipeline or not. Its steps end
    where chunks end, since states are there alone."""
    extra = {**EXTRA, "stages": ",".join(map(str, CUT[kind]))}
    return {"kind": kind, "budget": 256, "stages": CUT[kind] if has_stages else (), "extra": extra, **shape}


# Whether the first engine of two has a pipeline, or the second one.
each_way = pytest.mark.parametrize(("kind", "is_first"), [("full", True), ("window", False), ("mixed", True)])


@each_way
def test_what_a_pipeline_has_saved_is_found_by_an_engine_without_one(bed: OracleBed, kind: str, is_first: bool) -> None:
    history = bed.tokens(HISTORY)
    writer = bed.engine("writer", **of(kind, has_stages=is_first))
    for name in "abc":
        writer.add(name, history + bed.tokens(50, name), 12)
    writer.run()
    writer.check()
    bed.settled()
    reader = bed.engine("reader", **of(kind, has_stages=not is_first))
    reader.ask("warm", bed.tokens(300, "warm"), 2)
    assert found(reader, "a", history + bed.tokens(300, "a"), 12) == HISTORY


PLACES: dict[str, dict[str, Any]] = {
    "1": {}, "2": {"ranks": 2}, "4": {"ranks": 4}, "2 in 2 stages": {"ranks": 2, "stages": (2, 2)}
}  # fmt: skip


@pytest.mark.parametrize(("wrote", "reads"), [("1", "4"), ("4", "2"), ("2 in 2 stages", "1"), ("1", "2 in 2 stages")])
def test_what_some_ranks_have_saved_is_found_by_others(bed: OracleBed, wrote: str, reads: str) -> None:
    """And what is not there of one of them is computed."""
    shape = {"kind": "heads", "budget": 256, "extra": {**EXTRA, "shards": 4, "stages": "2,2"}}
    history = bed.tokens(HISTORY)
    bed.engine("writer", **shape, **PLACES[wrote]).ask("w", history + bed.tokens(50, "w"), 12)
    bed.settled()
    reader = bed.engine("reader", **shape, **PLACES[reads])
    reader.ask("warm", bed.tokens(300, "warm"), 2)
    num_workers = len(reader.runner.stages) * len(reader.runner.stages[0].ranks)
    assert found(reader, "a", history + bed.tokens(300, "a"), 12) == HISTORY
    assert reader.faults.loads == num_workers
    reader.scheduler.reset_prefix_cache()
    reader.faults.loses = lambda load: (lambda chunk: chunk > 0) if load == num_workers + 1 else (lambda chunk: False)
    reader.ask("b", history + bed.tokens(300, "b"), 12)
    assert reader.faults.lost


@each_way
def test_a_prompt_is_handed_over_while_stages_are_behind(bed: OracleBed, kind: str, is_first: bool) -> None:
    prefill, decode = (bed.engine(str(each), **of(kind, has_stages=each)) for each in (is_first, not is_first))
    decode.ask("warm", bed.tokens(300, "warm"), 2)
    prompt, transfer = bed.tokens(1000, "p"), f"transfer-of-{kind}-{is_first:d}"
    prefill.add("p", prompt, 1, {"do_remote_decode": True, "transfer_id": transfer})
    decode.add("d", prompt, 40, {"do_remote_prefill": True, "transfer_id": transfer, "is_early": True})
    before = decode.runner.computed
    run_together(prefill, decode)
    decode.check("d")
    assert decode.runner.computed - before <= 40


@each_kind
def test_what_a_stage_did_not_load_is_computed(bed: OracleBed, kind: str) -> None:
    history = bed.tokens(HISTORY)
    bed.engine("writer", **of(kind, has_stages=False)).ask("w", history + bed.tokens(50, "w"), 2)
    bed.settled()
    reader = bed.engine("reader", **of(kind, has_stages=True))
    reader.ask("warm", bed.tokens(300, "warm"), 2)
    reader.faults.loses = lambda load: (lambda chunk: chunk > 0) if load == 2 else (lambda chunk: False)
    reader.ask("a", history + bed.tokens(300, "a"), 12)
    assert reader.faults.loads == 2, "a load of each stage"
    assert reader.faults.lost
    bed.settled()
    assert found(reader, "b", history + bed.tokens(300, "b"), 12) == HISTORY


@each_kind
def test_a_request_that_ends_while_a_stage_is_behind_leaves_no_wrong_chunk(bed: OracleBed, kind: str) -> None:
    """Its blocks are another's in the next step, which its last stage computes after that."""
    writer = bed.engine("writer", **of(kind, has_stages=True, blocks=160))
    prompts = {f"r{number}": bed.tokens(600, number) for number in range(12)}
    for number, (name, prompt) in enumerate(prompts.items()):
        writer.add(name, prompt, 20)
        for _ in range(number % 4):
            writer.step()
        if number % 2:
            writer.abort(name)
    writer.run()
    writer.check(*(name for number, name in enumerate(prompts) if not number % 2))
    bed.settled()
    reader = bed.engine("reader", **of(kind, has_stages=False))
    for name, prompt in prompts.items():
        reader.ask(name, prompt + bed.tokens(30, "again"), 8)
