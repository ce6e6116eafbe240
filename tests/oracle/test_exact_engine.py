"""What vLLM's schedulers make of loads that fail, of promises that are not kept, and of ends at any moment: each token
against the oracle, on the engine that it happened to, on others, and on one that finds everything in the store.

For each kind of cache groups that PDX moves, where nothing is about one group alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connector_storm import WEIGHTS, read_adapter
from exact_engine import KVConnectorOutput, LoRARequest, WorkerLoRAManager, connector, run_together
from exact_kinds import MOVED_KINDS, by_schedulers
from exact_model import Beside, answer
from node_harness import NodeProcess
from oracle_bed import CHUNK, HISTORY, OracleBed, both, found, of, read_by_another, reader_of, written

from pdx.engine.cpu_copier import CpuCopier
from pdx.testing.waiting import wait_until

each_kind = by_schedulers(*MOVED_KINDS)


def write_adapter(lora: Any, weights: str) -> None:
    """It has these in its folder from now on."""
    folder = Path(lora.lora_path)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / WEIGHTS).write_text(weights)


@each_kind
@pytest.mark.parametrize("length", [256, 767, HISTORY])
def test_as_much_of_a_prompt_is_found_as_was_saved(bed: OracleBed, asynchronous: bool, kind: str, length: int) -> None:
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **of(kind))
    assert found(reader, "a", history[:length] + bed.tokens(300, "a"), 12) in range(length // 256 * 256, length + 1)
    assert reader.faults.loads == 1


@each_kind
def test_the_rest_is_loaded_of_a_prompt_that_vllm_has_the_beginning_of(
    bed: OracleBed, asynchronous: bool, kind: str
) -> None:
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **of(kind))
    reader.ask("beginning", history[:512] + bed.tokens(40, "beginning"), 2)
    assert found(reader, "a", history + bed.tokens(300, "a"), 12) == HISTORY
    assert reader.faults.loads == 2


@each_kind
@pytest.mark.parametrize("length", [1, 256, 1000])
def test_a_decode_leg_computes_a_token_or_two(bed: OracleBed, asynchronous: bool, kind: str, length: int) -> None:
    prefill, decode = bed.engine("prefill", **of(kind)), reader_of(bed, asynchronous=asynchronous, **of(kind))
    prompt, transfer = bed.tokens(length, "p"), f"transfer-of-{kind}-{asynchronous:d}-{length}"
    prefill.ask("p", prompt, 1, params={"do_remote_decode": True, "transfer_id": transfer})
    params = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_tokens": length}
    assert found(decode, "d", prompt + prefill.outputs["p"], 40, params=params) >= length - 1


@each_kind
@pytest.mark.parametrize("answers", [1, 3])
def test_both_legs_may_come_at_once(bed: OracleBed, asynchronous: bool, kind: str, answers: int) -> None:
    """For `n` answers to a prompt an engine has as many requests, all with the parameters of the one."""
    prefill, decode = bed.engine("prefill", **of(kind)), reader_of(bed, asynchronous=asynchronous, **of(kind))
    prompt, transfer = bed.tokens(1000, "p"), f"transfer-of-both-{kind}-{asynchronous:d}-{answers}"
    prefill.add("p", prompt, 1, {"do_remote_decode": True, "transfer_id": transfer})
    names, before = [f"{number}_d" for number in range(answers)], decode.runner.computed
    for name in names:
        decode.add(name, prompt, 12, {"do_remote_prefill": True, "transfer_id": transfer, "is_early": True})
    run_together(prefill, decode)
    decode.check(*names)
    most = 12  # the prompt's last token, and all of the answer but its last
    assert decode.runner.computed - before <= answers * most


@each_kind
def test_several_prompts_are_one_transfer(bed: OracleBed, asynchronous: bool, kind: str) -> None:
    """A request for answers to them all; the decode leg is sent when the prefill leg is over."""
    prefill, decode = bed.engine("prefill", **of(kind)), reader_of(bed, asynchronous=asynchronous, **of(kind))
    transfer, before = f"transfer-of-prompts-{kind}-{asynchronous:d}", decode.runner.computed
    prompts = {f"{length}": bed.tokens(length, length) for length in (1000, 300, 700)}
    for name, prompt in prompts.items():
        prefill.add(name, prompt, 1, {"do_remote_decode": True, "transfer_id": transfer})
    prefill.run()
    for name, prompt in prompts.items():
        decode.add(name, prompt, 12, {"do_remote_prefill": True, "transfer_id": transfer})
    decode.run()
    decode.check(*prompts)
    if kind not in ("state", "mixed"):  # of which steps that several prompts share leave few
        assert decode.runner.computed - before < len(prompts) * (CHUNK + 12)


@each_kind
def test_the_next_turn_finds_what_was_generated(bed: OracleBed, asynchronous: bool, kind: str) -> None:
    writer, prompt = reader_of(bed, asynchronous=asynchronous, **of(kind)), bed.tokens(200, "turn")
    writer.ask("turn", prompt, 300)
    bed.settled()
    fresh = bed.engine("fresh", **of(kind))
    # A state is there for one step, and steps of the toy are shorter than a question: it may be that of the prompt.
    # Of the windows, vLLM has given back the block that a prompt ending with the chunk needs when an answer's is saved.
    least = 192 if kind in ("state", "mixed", "units", "windows") else 201
    assert found(fresh, "next", prompt + writer.outputs["turn"] + bed.tokens(50, "next"), 12) >= least


@both
@pytest.mark.parametrize("together", [False, True], ids=["later", "meanwhile"])
def test_an_adapter_that_was_dropped_and_loaded_again_from_other_files_gives_nothing_to_a_copy_of_the_old_ones(
    bed: OracleBed, asynchronous: bool, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is hashed by what was loaded when it came."""
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", read_adapter)
    reader = bed.engine("reader", content=True, asynchronous=asynchronous, budget=512)
    sql, copy = (LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate(["sql", "copy"], 1))
    for lora in (sql, copy):
        write_adapter(lora, "1")
        reader.ask(f"first of {lora.lora_name}", bed.tokens(300, lora.lora_name), 2, lora=lora)
    write_adapter(sql, "2")
    del reader.runner.adapters[sql.lora_int_id]  # vLLM keeps so many
    prompt = bed.tokens(HISTORY)
    reader.add("new", prompt + bed.tokens(50, "new"), 40 if together else 2, lora=sql)
    while not reader.outputs["new"]:
        reader.step()
    if not together:
        reader.run()
    reader.ask("old", prompt + bed.tokens(50, "old"), 8, lora=copy)
    reader.run()
    reader.check("new")
    fresh = bed.engine("fresh", content=True)
    fresh.ask("first", bed.tokens(300, "copy"), 2, lora=copy)
    fresh.ask("again", prompt + bed.tokens(30, "again"), 8, lora=copy)


# ---- loads that fail --------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("first_lost", [0, 3])
def test_a_request_whose_load_fails_is_right_and_so_is_its_next_turn(
    bed: OracleBed, asynchronous: bool, kind: str, first_lost: int
) -> None:
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **of(kind))
    reader.faults.lose(lambda chunk: chunk >= first_lost or kind == "windows")  # which needs one chunk alone
    prompt = history + bed.tokens(300, "a")
    reader.ask("a", prompt, 12)
    assert reader.faults.lost
    reader.ask("b", prompt + bed.tokens(50, "b"), 12)
    read_by_another(bed, prompt, **of(kind))


@both
def test_a_release_that_is_told_of_requests_and_not_of_blocks_computes_them(
    bed: OracleBed, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract that is to replace that of blocks. From 0.30 on vLLM knows both."""
    if not hasattr(KVConnectorOutput(), "failed_recving"):
        pytest.skip("vLLM is told of blocks alone before 0.30")
    monkeypatch.setattr(connector, "reports_blocks", lambda: False)
    history = written(bed)
    reader = reader_of(bed, asynchronous=asynchronous)
    reader.faults.lose(times=2)
    prompt = history + bed.tokens(300, "a")
    for name in "ab":
        reader.add(name, prompt + bed.tokens(5, name), 12)
    reader.run()
    reader.check()
    reader.ask("c", prompt, 12)
    assert reader.faults.lost
    read_by_another(bed, prompt)


@each_kind
@pytest.mark.parametrize("aborted", [False, True], ids=["it goes on", "it is aborted"])
def test_another_request_with_the_same_beginning_is_right_while_the_failed_part_is_computed(
    bed: OracleBed, asynchronous: bool, kind: str, aborted: bool
) -> None:
    """In pieces of 64 tokens, so that the other one comes between them."""
    history = written(bed, **of(kind))
    reader = reader_of(bed, **of(kind, asynchronous=asynchronous, budget=128, threshold=64))
    reader.faults.lose(lambda chunk: chunk > 0 or kind == "windows")
    first, second = history + bed.tokens(300, "a"), history + bed.tokens(100, "c")
    reader.add("a", first, 12)
    while not reader.faults.lost:
        reader.step()
    for _ in range(3):
        reader.step()
    reader.add("c", second, 12)
    for _ in range(2):
        reader.step()
    if aborted:
        reader.abort("a")
    reader.run()
    reader.check(*(["c"] if aborted else ["a", "c"]))
    reader.ask("d", history + bed.tokens(120, "d"), 12)
    read_by_another(bed, first, second, history + bed.tokens(120, "d"), **of(kind))


@each_kind
def test_steps_that_call_no_hooks_load_and_save_as_others(bed: OracleBed, asynchronous: bool, kind: str) -> None:
    """As a full graph does: of small batches, here."""
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **of(kind))
    reader.runner.skips_hooks = lambda num_tokens: num_tokens <= 512
    prompts = [history + bed.tokens(200, n) for n in range(2)]
    for number, prompt in enumerate(prompts):
        reader.ask(str(number), prompt, 100)
    read_by_another(bed, *prompts, **of(kind))


@both
def test_layers_of_a_draft_model_run_after_transfers_were_asked_for(bed: OracleBed, asynchronous: bool) -> None:
    """As with EAGLE or MTP on vLLM's first runner. The cache's last layer is the draft's."""
    history = written(bed, draft_layers=1)
    reader = reader_of(bed, draft_layers=1, asynchronous=asynchronous)
    for name, count in (("first", 200), ("second", 300)):
        reader.ask(name, history + bed.tokens(count, name), 8)


# ---- ends, and other turns --------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("steps", [1, 4])
def test_a_request_may_be_aborted_at_any_step_of_its_load(
    bed: OracleBed, asynchronous: bool, kind: str, steps: int
) -> None:
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **of(kind))
    for name in "ab":
        reader.add(name, history + bed.tokens(300, name), 12)
    for _ in range(steps):
        reader.step()
    reader.abort("a")
    reader.run()
    reader.check("b")
    reader.ask("c", history + bed.tokens(300, "a"), 12)


@each_kind
def test_requests_that_are_preempted_find_what_they_have_saved(bed: OracleBed, asynchronous: bool, kind: str) -> None:
    history = written(bed, **of(kind))
    reader = bed.engine("reader", asynchronous=asynchronous, blocks=130, **of(kind))
    prompts = {str(number): history[: 256 + 100 * number] + bed.tokens(80, number) for number in range(5)}
    for name, prompt in prompts.items():
        reader.add(name, prompt, 300)
    reader.run()
    reader.check()
    assert reader.preemptions or kind != "full", "others need less room"
    read_by_another(bed, *prompts.values(), **of(kind))


def test_nobody_finds_what_a_step_was_to_compute_of_a_request_that_it_has_preempted(bed: OracleBed) -> None:
    """One of higher priority takes its place in the step that it has a place in already: vLLM leaves the blocks that
    it would have filled in its cache, where the request finds them when it goes on, and saves them."""
    engine = bed.engine("e", priorities=True, blocks=40, budget=512, seqs=4, threshold=64)
    for length in range(105, 112):  # in one of these it ends a block when there is none left
        low, high, other = (f"{name} {length}" for name in ("low", "high", "other"))
        engine.add(low, bed.tokens(510, low), 20, priority=5)
        engine.add(other, bed.tokens(5, other), 1, priority=9)  # limits how much of the first one is in a step
        while not engine.requests[low].num_computed_tokens:
            engine.step()
        engine.add(high, bed.tokens(length, high), 40)
        engine.run()
        engine.check(low, high)
    assert engine.preemptions


def test_drafts_that_are_rejected_are_not_saved(bed: OracleBed) -> None:
    history = written(bed)
    reader = bed.engine("reader", drafts=True)
    prompts = {name: history + bed.tokens(40, name) for name in "ab"}
    for name, prompt in prompts.items():
        reader.add(name, prompt, 400)
    reader.run()
    reader.check()
    assert 120 < reader.runner.steps < 380, "some drafts were taken, and some were not"
    read_by_another(bed, *(prompt + answer(prompt, 400) for prompt in prompts.values()))


@each_kind
def test_a_reset_may_come_while_requests_run_and_load(bed: OracleBed, asynchronous: bool, kind: str) -> None:
    """vLLM refuses one that preempts while a load is under way: it has preempted by then, and goes on."""
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **of(kind))
    reader.add("a", bed.tokens(300, "a"), 60)
    for _ in range(4):
        reader.step()
    reader.add("b", history + bed.tokens(300, "b"), 60)
    refused = 0
    while "b" in reader.requests:
        reader.step()
        is_loading = any(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in reader.requests.values())
        if is_loading or not refused:
            with contextlib.suppress(RuntimeError):
                reader.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            refused += 1
    reader.run()
    reader.check()
    read_by_another(bed, bed.tokens(300, "a"), history + bed.tokens(300, "b"), **of(kind))


@each_kind
@pytest.mark.parametrize("weights", [0, 1], ids=["the same weights", "other weights"])
def test_an_engine_that_wakes_up_finds_nothing_of_before_and_what_it_saves_then_is_right(
    bed: OracleBed, asynchronous: bool, kind: str, weights: int
) -> None:
    """It cannot know whether its weights are those of before. Requests were running and loading."""
    history = written(bed, **of(kind))
    reader = reader_of(bed, asynchronous=asynchronous, **of(kind))
    reader.add("running", bed.tokens(300, "a"), 60)
    for _ in range(4):
        reader.step()
    reader.add("loading", history + bed.tokens(300, "b"), 60)
    while not any(request.status.name == "WAITING_FOR_REMOTE_KVS" for request in reader.requests.values()):
        reader.step()
    reader.sleep()
    reader.wake_up(weights)
    prompt = history + bed.tokens(100, "c")
    assert found(reader, "c", prompt, 30) == 0
    bed.settled()
    reader.scheduler.reset_prefix_cache()
    assert found(reader, "d", prompt, 30) >= HISTORY - 256, "it finds what it has saved itself since"
    if not weights:
        read_by_another(bed, prompt, **of(kind))


@both
def test_requests_that_are_kept_while_an_engine_sleeps_are_computed_by_the_weights_that_it_wakes_up_with(
    bed: OracleBed, asynchronous: bool
) -> None:
    """But for the tokens that it has answered with."""
    reader = reader_of(bed, asynchronous=asynchronous)
    reader.add("a", bed.tokens(600, "a"), 60)
    while len(reader.outputs["a"]) < 20:
        reader.step()
    reader.sleep(keeps=True)
    reader.wake_up(1)
    reader.run()
    prompt, kept = bed.tokens(600, "a"), reader.outputs["a"]
    done = next(at for at in range(20, 60) if answer(prompt + kept[:at], 60 - at, beside=Beside(1)) == kept[at:])
    assert kept[:done] == answer(prompt, done)
    assert found(reader, "b", prompt + kept[:done] + bed.tokens(20, "b"), 12) >= 512
    read_by_another(bed, prompt)


@each_kind
def test_a_load_of_a_node_that_dies_is_computed(
    own_bed: OracleBed, start_node: Callable[..., NodeProcess], asynchronous: bool, kind: str
) -> None:
    history = written(own_bed, **of(kind))
    reader = reader_of(own_bed, asynchronous=asynchronous, **of(kind))
    reader.add("a", history + own_bed.tokens(300, "a"), 12)
    while reader.requests["a"].status.name == "WAITING":
        reader.step()
    own_bed.node.kill()
    reader.run()
    reader.check("a")
    own_bed.node = start_node()
    wait_until(
        lambda: reader.half.link.is_attached and reader.worker_half.link.is_attached, what="the reader is attached"
    )
    reader.ask("b", history + own_bed.tokens(300, "b"), 12)


@both
def test_a_worker_that_maps_the_arena_of_a_new_node_late_loads_nothing_until_then(
    own_bed: OracleBed,
    start_node: Callable[..., NodeProcess],
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    """The scheduler half is attached before it."""
    known, is_late, mapped = list[CpuCopier](), threading.Event(), threading.Event()
    use = CpuCopier.use

    def use_late(self: CpuCopier, arena: Any) -> None:
        if is_late.is_set() and self in known and arena is not None:
            assert mapped.wait(60)
        known.append(self)
        use(self, arena)

    monkeypatch.setattr(CpuCopier, "use", use_late)
    reader = reader_of(own_bed, asynchronous=asynchronous)
    is_late.set()
    own_bed.node.kill()
    own_bed.node = start_node()
    own_bed.forget_counts()
    wait_until(lambda: reader.half.link.is_attached, what="the reader's scheduler half is attached")
    try:
        history = written(own_bed)
        reader.ask("a", history + own_bed.tokens(300, "a"), 12)
    finally:
        mapped.set()
    wait_until(lambda: reader.worker_half.link.is_attached, what="its worker half is")
    reader.ask("b", history + own_bed.tokens(300, "b"), 12)
