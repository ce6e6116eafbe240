"""What newer releases of vLLM do and older ones do not, each token against the oracle: the second runner's order, loads
that begin later than they were promised, hits of which less is taken, and failures told by request."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connector_storm import REQUESTS, Event, Storm, storm_bed
from exact_engine import Engine, KVConnectorOutput, connector
from exact_hooks import SecondRunner
from exact_kinds import EVERY_DAY, by_schedulers, with_pdx
from exact_model import answer
from exact_releases import CAPS, DEFERS, Cap, keep_routes
from oracle_bed import CHUNK, HISTORY, OracleBed, both, found, of, read_by_another, reader_of, written

from pdx.vllm.releases import moves_groups, trims_session_hashes

each_kind = pytest.mark.parametrize("kind", with_pdx(*EVERY_DAY, "windows"))
defers = pytest.mark.skipif(not DEFERS, reason="loads begin at once before vLLM 0.33")
caps = pytest.mark.skipif(not CAPS, reason="what is promised is taken before vLLM 0.33")
tells_requests = pytest.mark.skipif(
    not hasattr(KVConnectorOutput(), "failed_recving"), reason="vLLM is told of blocks alone before 0.30"
)


# ---- the second runner ------------------------------------------------------------------------

SECOND = {"runner": 2}
HOOKS = ("bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
HOOKS += ("get_finished", "get_block_ids_with_load_errors", "build_connector_worker_meta", "clear_connector_metadata")


def calls_of_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the runner calls of the worker side in the engine's next step."""
    calls, worker = list[str](), engine.worker_pdx

    def noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **settings: (calls.append(name), own(*args, **settings))[1]

    with monkeypatch.context() as patch:
        for name in HOOKS:
            patch.setattr(worker, name, noted(name, getattr(worker, name)))
        engine.step()
    return calls


def test_vllms_own_second_runner_calls_the_connector(bed: OracleBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's layer is gathered, too, though the results of the step were asked for before it ran."""
    engine = bed.engine("engine", **SECOND, draft_layers=1)
    engine.add("a", bed.tokens(600), 2)
    while not engine.requests["a"].num_computed_tokens:
        calls = calls_of_a_step(engine, monkeypatch)
    layer = ["wait_for_layer_load", "save_kv_layer"]
    told = ["get_finished", "get_block_ids_with_load_errors", "build_connector_worker_meta"]
    begin = ["bind_connector_metadata", *(["start_load_kv"] if "start_load_kv" in calls[:2] else [])]
    late = [] if len(begin) == 2 else ["start_load_kv"]
    end = ["wait_for_save", "clear_connector_metadata"]
    if SecondRunner.ends_late:
        assert calls == [*begin, *layer * 2, *late, *told, *layer, *end]
    else:
        assert calls == [*begin, *layer * 3, *late, end[0], *told, end[1]]
    engine.run()
    read_by_another(bed, bed.tokens(600), draft_layers=1, **SECOND)


@by_schedulers(*EVERY_DAY, "windows")
def test_the_second_runner_finds_what_the_first_has_saved_and_the_other_way_round(
    bed: OracleBed, asynchronous: bool, kind: str
) -> None:
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **SECOND, **of(kind))
    reader.faults.lose(lambda chunk: chunk > 0 or kind == "windows")
    reader.ask("loses", history + bed.tokens(30, "loses"), 12)
    assert reader.faults.lost
    reader.scheduler.reset_prefix_cache()
    bed.settled()
    assert found(reader, "a", history + bed.tokens(300, "a"), 12) == HISTORY
    reader.runner.skips_hooks = lambda num_tokens: True
    own = bed.tokens(600, "own")
    reader.ask("own", own, 300)
    read_by_another(bed, own, history + bed.tokens(300, "a"), **of(kind))


@pytest.mark.parametrize(("asynchronous", "draft_layers"), [(False, 1), (True, 0)], ids=["sync", "async"])
def test_requests_that_the_second_runner_has_lost_come_back_as_new_ones(
    bed: OracleBed, asynchronous: bool, draft_layers: int
) -> None:
    history = written(bed, draft_layers=draft_layers)
    shape = {"asynchronous": asynchronous, "draft_layers": draft_layers, **SECOND}
    reader = bed.engine("reader", blocks=130, **shape)
    prompts = {str(number): history[: 256 + 100 * number] + bed.tokens(80, number) for number in range(5)}
    for name, prompt in prompts.items():
        reader.add(name, prompt, 100)
    reader.run()
    reader.check()
    assert reader.preemptions
    read_by_another(bed, *prompts.values(), draft_layers=draft_layers)


# ---- loads that begin later than they were promised -----------------------------------------------

LATE: dict[str, Any] = {"asynchronous": True, "defers": True}


def deferred(bed: OracleBed, engine: Engine, *requests: tuple[str, list[int]], then: Callable[[], Any] = bool) -> None:
    """Add these beside one that runs, and do `then` when the loads of all were promised and waited for the step under
    way, as that of the last one still does."""
    engine.add("beside", bed.tokens(70, "beside"), 200)
    while len(engine.outputs["beside"]) < 3:
        engine.step()
    for name, prompt in requests:
        engine.add(name, prompt, 12)
    waiting = {name for name, _ in requests}

    def meanwhile() -> None:
        if waiting and not waiting.difference(engine.scheduler.deferred_loads):
            waiting.clear()
            then()
        waiting.difference_update(engine.scheduler.deferred_loads)

    engine.meanwhile = meanwhile
    engine.run()
    assert not waiting, "no load was deferred"
    engine.meanwhile = bool


@defers
@each_kind
def test_a_load_that_begins_late_is_whole(bed: OracleBed, kind: str) -> None:
    history = written(bed, **of(kind))
    reader = reader_of(bed, **of(kind, **LATE))
    prompt, before = history + bed.tokens(300, "a"), reader.runner.computed
    deferred(bed, reader, ("a", prompt), ("b", history + bed.tokens(200, "b")))
    reader.check()
    assert reader.faults.loads == 2
    assert reader.runner.computed - before == 70 + 199 + 300 + 200 + 2 * 11
    read_by_another(bed, prompt, **of(kind))


@defers
@each_kind
def test_a_request_may_be_aborted_before_its_load_begins(bed: OracleBed, kind: str) -> None:
    """Nobody says then that it has its blocks, nor that they are loaded."""
    history = written(bed, **of(kind))
    reader = reader_of(bed, **of(kind, **LATE))
    deferred(bed, reader, ("a", history + bed.tokens(300, "a")), then=lambda: reader.abort("a"))
    reader.check("beside")
    assert not reader.faults.loads
    assert found(reader, "b", history + bed.tokens(300, "b"), 12) == HISTORY


@defers
@each_kind
def test_a_reset_may_come_before_a_load_begins(bed: OracleBed, kind: str) -> None:
    """What was promised is not loaded any more, and what the request has from before is not saved by new keys."""
    history, beginning = written(bed, **of(kind)), 512
    reader = reader_of(bed, **of(kind, **LATE))
    reader.ask("beginning", history[:beginning] + bed.tokens(40, "beginning"), 2)
    prompt = history + bed.tokens(300, "a")
    deferred(bed, reader, ("a", prompt), then=lambda: reader.scheduler.reset_prefix_cache(reset_connector=True))
    reader.check()
    bed.settled()
    reader.scheduler.reset_prefix_cache()
    assert found(reader, "b", prompt, 12) == 0


@defers
@each_kind
def test_pdx_may_be_switched_off_before_a_load_begins(bed: OracleBed, kind: str) -> None:
    """Each load that was promised has failed then, in the blocks of its own request."""
    history, other = written(bed, **of(kind)), bed.tokens(500, "other")
    bed.engine("another", **of(kind)).ask("other", other, 2)
    bed.settled()
    reader = reader_of(bed, **of(kind, **LATE))
    reader.ask("beginning", history[:512] + bed.tokens(40, "beginning"), 2)
    requests, loads = [("a", history + bed.tokens(300, "a")), ("b", other + bed.tokens(300, "b"))], reader.faults.loads
    deferred(bed, reader, *requests, then=lambda: reader.pdx.scheduler.switch_off("of a test"))
    reader.check()
    assert reader.faults.loads <= loads + 1
    bed.engines.remove(reader)  # it is off, which is what was wanted
    reader.close()


# ---- hits of which less is taken ----------------------------------------------------------------


@caps
@each_kind
@pytest.mark.parametrize("taken", [0, 512, 500, HISTORY])
def test_the_engine_may_take_less_than_it_was_promised(
    bed: OracleBed, kind: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = written(bed, **of(kind))
    reader = reader_of(bed, **of(kind, asynchronous=taken % 256 == 0, caps=True))
    monkeypatch.setattr(Cap, "take", lambda self, local, promised: min(promised, taken // 64 * 64))
    least = taken // 64 * 64 if kind == "full" or taken == HISTORY else 0
    assert found(reader, "a", history + bed.tokens(300, "a"), 12) >= least
    read_by_another(bed, history + bed.tokens(300, "a"), **of(kind))


@caps
@each_kind
@pytest.mark.parametrize("taken", [0, 256])
def test_a_decode_leg_may_take_less_than_it_was_promised(
    bed: OracleBed, kind: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = bed.engine("prefill", **of(kind))
    decode = reader_of(bed, **of(kind, asynchronous=taken % 256 == 0, caps=True))
    monkeypatch.setattr(Cap, "take", lambda self, local, promised: min(promised, taken))
    prompt, transfer = bed.tokens(700, "p"), f"transfer-of-{kind}-{taken}"
    prefill.ask("p", prompt, 1, params={"do_remote_decode": True, "transfer_id": transfer})
    params = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": 700}
    decode.ask("d", prompt + prefill.outputs["p"], 40, params=params)


@caps
@both
def test_vllm_takes_what_it_can_answer_for(bed: OracleBed, asynchronous: bool) -> None:
    """With outputs beside tokens: nothing that another engine has computed, all that it has computed itself."""
    history = written(bed)
    reader = bed.engine("reader", asynchronous=asynchronous, budget=256, blocks=120)
    reader.scheduler.aux_output_connector = keep_routes(reader.scheduler)
    assert found(reader, "a", history + bed.tokens(60, "a"), 12) == 0
    bed.settled()
    reader.ask("others", bed.tokens(1500, "others"), 12)
    assert found(reader, "b", history + bed.tokens(60, "b"), 12) == HISTORY
    assert reader.faults.loads == 1


# ---- failures told by request -----------------------------------------------------------------


@pytest.fixture
def told_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "reports_blocks", lambda: False)


@tells_requests
@pytest.mark.parametrize(("asynchronous", "steps"), [(False, 0), (True, 1), (False, 2), (True, 4)])
def test_a_request_may_be_aborted_while_its_failure_is_told(
    bed: OracleBed, asynchronous: bool, steps: int, told_by_request: None
) -> None:
    history = written(bed)
    reader = reader_of(bed, asynchronous=asynchronous)
    reader.faults.lose(times=2)
    for name in "ab":
        reader.add(name, history + bed.tokens(300, name), 12)
    while not reader.faults.lost:
        reader.step()
    for _ in range(steps):
        reader.step()
    reader.abort("a")
    reader.run()
    reader.check("b")
    assert found(reader, "c", history + bed.tokens(300, "c"), 12) >= HISTORY - CHUNK


@tells_requests
@pytest.mark.skipif(not moves_groups(), reason="PDX has stages since vLLM 0.32")
def test_a_failure_that_one_stage_tells_is_that_of_the_request(bed: OracleBed, told_by_request: None) -> None:
    """vLLM puts together what ranks tell; this one has loaded its part, and tells so a step before the other one."""
    extra = {"chunk_tokens": CHUNK, "stages": "1,2"}
    history = written(bed, budget=256, extra=extra)
    reader = reader_of(bed, stages=(1, 2), budget=256, extra=extra)
    reader.faults.loses = lambda load: (lambda chunk: chunk > 0) if load == 2 else (lambda chunk: False)
    reader.ask("a", history + bed.tokens(300, "a"), 12)
    assert reader.faults.lost
    read_by_another(bed, history + bed.tokens(300, "a"), budget=256, extra=extra)


@tells_requests
def test_every_token_of_a_storm_with_failures_told_by_request_is_right(tmp_path: Path, told_by_request: None) -> None:
    rng, kinds = random.Random(11), [*REQUESTS, "lose", "lose", "abort", "reset"]
    with storm_bed("mixed", tmp_path) as (engines, node):
        storm = Storm("told", engines, node)
        storm.play([Event.drawn(rng, kinds, 5) for _ in range(150)])
        storm.settle()
        assert sum(engine.faults.lost for engine in engines)


# ---- streaming sessions -----------------------------------------------------------------------


@both
@pytest.mark.skipif(not trims_session_hashes(), reason="streaming sessions are left out before vLLM 0.32")
@pytest.mark.parametrize("first", [100, 300], ids=["a short input", "a long input"])
def test_a_streaming_session_is_found_by_its_conversation_sent_anew(
    bed: OracleBed, asynchronous: bool, first: int
) -> None:
    """Its inputs and its answers, but for the last token of each: that one makes way for the next input."""
    writer, known = bed.engine("writer", asynchronous=asynchronous), list[int]()
    for number, length in enumerate((first, 700, 10)):
        prompt = bed.tokens(length, number)
        writer.ask("session", prompt, 300, session=known)
        known = [*known, *prompt, *writer.outputs["session"][:-1]]
    writer.abort("session")
    writer.run()
    bed.settled()
    fresh = bed.engine("fresh", asynchronous=asynchronous)
    assert found(fresh, "again", known + bed.tokens(30, "again"), 12) >= HISTORY


@both
def test_drafts_behind_the_end_of_an_answer_are_not_taken_for_the_next_input(
    bed: OracleBed, asynchronous: bool
) -> None:
    """Without async scheduling vLLM's session goes on behind them, and their KV would be shared."""
    writer = bed.engine("writer", asynchronous=asynchronous, drafts=True, extra={"chunk_tokens": CHUNK})
    known = []
    for name in map(str, range(6)):
        writer.ask(name, bed.tokens(CHUNK - 10, name), 2, session=[])
        writer.add(name, bed.tokens(CHUNK, f"{name} more"), 2, session=[])
        writer.run(name)
        known.append(list(writer.scheduler.requests[name].all_token_ids))
        writer.abort(name)
    writer.run()
    bed.settled()
    read_by_another(bed, *known, asynchronous=asynchronous, extra={"chunk_tokens": CHUNK})


@pytest.mark.parametrize("kind", with_pdx("mixed"))
def test_states_that_the_last_token_of_an_answer_has_advanced_are_not_shared(bed: OracleBed, kind: str) -> None:
    """With async scheduling a step has computed it before vLLM knows it for the last and discards it."""
    writer, known = bed.engine("writer", asynchronous=True, **of(kind)), []
    for name in "abc":
        prompt = bed.tokens(CHUNK - 10, name)
        writer.add(name, prompt, 300, session=[])
        writer.requests[name].sampling_params.stop_token_ids = answer(prompt, 4, writer.mixers)[-1:]
        writer.run(name)
        writer.add(name, bed.tokens(CHUNK, f"{name} more"), 140, session=[])
        writer.run(name)
        known.append(list(writer.scheduler.requests[name].all_token_ids))
        writer.abort(name)
    writer.run()
    bed.settled()
    read_by_another(bed, *known, asynchronous=True, **of(kind))
