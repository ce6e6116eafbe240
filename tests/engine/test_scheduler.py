"""The scheduler half with a real node: the cache is reset, answers age, nodes follow each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from node_harness import attached
from toy_engine import BLOCK, CHUNK, Engines, Request, ToyEngine, decode_of, prefill_of, tokens

from pdx.engine.step import StepRecord, StepRequest
from pdx.errors import LayoutError
from pdx.testing.waiting import wait_until
from pdx.vllm.step import step_record
from pdx.wire.messages import Delete

TRANSFER = "reset-" + "r" * 20


def run(engine: ToyEngine, engines: Engines, prompt: list[int]) -> int:
    """A request that computes what is not found of this prompt, all of which is in the store afterwards; the rest."""
    found = engine.run(prompt)
    engines.node.wait_at_rest()
    return found


# ---- the cache is reset ---------------------------------------------------------------------


MOMENTS = {"asked", "decided", "allocated", "loading", "loaded", "computing", "computed", "generating"}


def bring(engine: ToyEngine, request: Request, moment: str) -> None:
    """The request to this moment of its life; one whole chunk of it is in the store."""
    if moment == "asked":
        engine.scheduler.arrived(request)
        return
    external = engine.match(request)
    assert external == CHUNK
    if moment == "decided":
        return
    engine.allocate(request, external)
    if moment == "allocated":
        return
    if moment == "loading":
        engine.workers[0].begin(engine.planned())
        engine.workers[0].end_forward()
        return
    assert engine.finish_load(request) == set()
    request.num_computed = external
    if moment == "computing":
        engine.step((request, CHUNK + 3))
    elif moment in ("computed", "generating"):
        engine.step((request, request.num_tokens - request.num_computed))
    if moment == "generating":
        for token in tokens(42, CHUNK - 4):
            request.all_token_ids.append(token)
            engine.step((request, 1))


@pytest.mark.parametrize("moment", sorted(MOMENTS))
def test_a_reset_at_any_moment_leaves_nothing_of_the_old_weights_behind(engines: Engines, moment: str) -> None:
    engine = engines()
    cases = [("goes on", False), ("goes on", True), ("preempted", True), ("finished", False)]
    for number, (then, is_prefill) in enumerate(cases):
        prompt = tokens(60 + number, 3 * CHUNK + 2)
        run(engine, engines, prompt[: CHUNK + 1])
        request = Request("r", prompt, prefill_of(f"reset-{number}-{'r' * 20}") if is_prefill else None)
        bring(engine, request, moment)
        engine.scheduler.reset()
        engine.weights = f"after {number + 1} resets"
        settle(engine, request, moment)
        if then == "preempted" and request.block_ids:
            engine.preempt(request)
        if then != "finished":
            go_on(engine, engines, request)
        engine.finish(request)
        engines.node.wait_at_rest()
        run(engine, engines, prompt)  # what leads up to what the request may have saved
        assert engine.load(request.all_token_ids) >= 3 * CHUNK
        engines.node.wait_at_rest()


def test_a_reset_may_come_between_a_promise_and_the_blocks_for_it(engines: Engines) -> None:
    """As with vLLM 0.33, which may give them some steps later: what the request has from before is not saved."""
    engine, prompt = engines(), tokens(59, 3 * CHUNK + 2)
    run(engine, engines, prompt[: CHUNK + 1])
    request = Request("r", prompt)
    bring(engine, request, "decided")
    engine.scheduler.reset()
    engine.weights = "new"
    engine.allocate(request, CHUNK)
    assert len(engine.finish_load(request)) == CHUNK // BLOCK, "what was promised is not loaded any more"
    go_on(engine, engines, request)
    engine.finish(request)
    engines.node.wait_at_rest()
    assert engine.load(prompt) == 0


def settle(engine: ToyEngine, request: Request, moment: str) -> None:
    """The load that was planned before the reset is over."""
    if moment == "allocated":
        assert len(engine.finish_load(request)) == CHUNK // BLOCK, "what was planned before is not loaded any more"
    elif moment == "loading":
        finished: set[str] = set()
        while request.request_id not in finished:
            finished |= engine.run_worker(0, engine.planned(), {})[0]
        engine.scheduler.loaded(request.request_id)


def go_on(engine: ToyEngine, engines: Engines, request: Request) -> None:
    """The request computes what it has not yet, and generates a chunk."""
    if not request.block_ids:
        engine.admit(request)
        assert request.num_computed == 0
    while request.num_computed < request.num_tokens:
        engine.step((request, 1))
    for token in tokens(43, CHUNK):
        request.all_token_ids.append(token)
        engine.step((request, 1))
        engines.node.status()  # by then the node has answered what it was asked


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["before", "halfway"])
def test_when_one_engine_of_a_pair_is_reset_the_decoder_computes(engines: Engines, who: str, moment: str) -> None:
    """It waits for no transfer that it cannot read, and loads nothing that the other weights have made."""
    first, second = engines(), engines()
    prompt = tokens(44, 2 * CHUNK + 5)

    def reset() -> None:
        engine = first if who == "prefill" else second
        engine.scheduler.reset()
        engine.weights = "new"

    if moment == "before":
        reset()
    request = Request("p", prompt, prefill_of(TRANSFER))
    first.admit(request)
    first.step((request, CHUNK + 3))
    if moment == "halfway":
        reset()
    first.step((request, CHUNK + 2))
    first.finish(request)
    # Of a prefill engine that was reset later, a decoder that was not may take what the old weights made, as its own.
    found = second.load([*prompt, 7], decode_of(TRANSFER, prefill_tokens=len(prompt)))
    assert found == 0 or (who, moment) == ("prefill", "halfway")
    engines.node.wait_at_rest()


# ---- answers age ----------------------------------------------------------------------------


def pass_by(engine: ToyEngine) -> None:
    """The engine has steps for others."""
    for _ in range(3):
        engine.idle()


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize(
    ("engines", "lease_s"), [({}, 1.0), ({"max_lease_s": 1.0}, 60.0)], indirect=["engines"], ids=["asked", "capped"]
)
def test_chunks_that_went_while_a_request_waited_are_not_promised(
    engines: Engines, lease_s: float, collected: bool
) -> None:
    engine, prompt = engines(lease_s=lease_s), tokens(46, 2 * CHUNK + 1)
    run(engine, engines, prompt)
    waiting = Request("w", prompt)
    engine.scheduler.arrived(waiting)
    if collected:
        assert engine.match(waiting) == 2 * CHUNK
    wait_until(lambda: not engines.node.status().leases, what="the lease has ended")
    engines.node.forget()
    pass_by(engine)
    assert engine.match(waiting) == 0
    engine.allocate(waiting, 0)
    engine.step((waiting, len(prompt)))
    engine.finish(waiting)
    engines.node.wait_sealed(2)


def test_chunks_of_a_prefill_leg_that_went_while_it_waited_are_saved_again(engines: Engines) -> None:
    """Without them, the decoder would compute everything behind the hole."""
    first, second = engines(lease_s=1.0), engines()
    prompt = tokens(47, 3 * CHUNK + 5)
    run(first, engines, prompt[: 2 * CHUNK + 1])
    request = Request("p", prompt, prefill_of(TRANSFER))
    assert first.match(request) == 2 * CHUNK
    wait_until(lambda: not engines.node.status().leases, what="the lease has ended")
    with attached(engines.node.address) as wire:
        assert wire.ask(Delete(first.scheduler.track(request).keys.leading(2)[1:])).count == 1
    pass_by(first)
    first.admit(request)
    first.step((request, len(prompt) - request.num_computed))
    first.finish(request)
    assert second.load(prompt, decode_of(TRANSFER, prefill_tokens=len(prompt))) == len(prompt)
    engines.node.wait_at_rest()


def test_a_request_that_ends_during_its_load_holds_its_chunks_until_that_is_over(engines: Engines) -> None:
    engine, prompt = engines(), tokens(49, 2 * CHUNK + 1)
    run(engine, engines, prompt)
    request = Request("over", prompt)
    engine.allocate(request, engine.match(request))
    engine.scheduler_guard.finished(request)
    assert engines.node.status().leases == 1
    assert engine.finish_load(request) == set()
    engines.node.wait_at_rest()


def test_a_preempted_decoder_does_not_wait_for_what_it_was_to_fill_itself(engines: Engines) -> None:
    """Its second chunk is still reserved for it, and nobody else fills that."""
    engine = engines()
    prompt = tokens(54, 3 * CHUNK + 2)
    request = Request("d", prompt, decode_of(TRANSFER))
    engine.admit(request)
    engine.step((request, CHUNK + 3))
    wait_until(lambda: engines.node.status().chunks == {"sealed": 1, "filling": 2}, what="one chunk is saved")
    engine.preempt(request)
    assert engine.match(request) == CHUNK
    engine.allocate(request, CHUNK)
    assert engine.finish_load(request) == set()
    request.num_computed = CHUNK
    engine.step((request, len(prompt) - CHUNK))
    engine.check_cache(request, len(prompt))
    engine.finish(request)
    wait_until(lambda: engines.node.status().chunks == {"sealed": 3}, what="all is saved")


def test_keys_follow_the_tokens_of_a_session_that_goes_on(engines: Engines) -> None:
    """The last sampled token, which was never computed, makes way for what the client sends next."""
    engine = engines()
    tracked = engine.scheduler.track(request := Request("s", tokens(51, 2 * CHUNK)))
    first, second = tracked.keys.leading(2)
    request.all_token_ids[-1] += 1
    assert tracked.keys.leading(2)[0] == first
    assert tracked.keys.leading(2)[1] != second
    del request.all_token_ids[CHUNK:]
    assert tracked.keys.leading(1) == [first]
    engine.scheduler.finished(request)


# ---- the node's epochs ----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["load", "abort"])
def test_what_was_planned_with_a_node_that_is_gone_touches_nothing_in_the_next(
    engines_of_killed: Engines, start_node: Any, what: str
) -> None:
    """The same offsets and generations may be somebody else's chunks there."""
    engine, prompt = engines_of_killed(), tokens(52, 2 * CHUNK)
    request = Request("a", prompt)
    if what == "load":
        run(engine, engines_of_killed, prompt)
        engine.allocate(request, engine.match(request))
    else:
        engine.admit(request)
        engine.scheduler.finished(request)
    engines_of_killed.node.kill()
    engines_of_killed.node = start_node()
    wait_until(lambda: engine.is_attached, what="attached to the next node")
    run(engines_of_killed(), engines_of_killed, tokens(53, 2 * CHUNK))
    plan = engine.planned()
    assert plan.aborts == []
    if what == "load":
        failed: set[int] = set()
        finished: set[str] = set()
        while not finished:
            finished, blocks = engine.run_worker(0, plan, {})
            failed |= blocks
            plan = engine.planned()
        assert failed == set(request.block_ids[: 2 * CHUNK // BLOCK])
        engine.scheduler.loaded(request.request_id)
        engine.finish(request)
    engines_of_killed.node.wait_at_rest()


# ---- what a step looks at -------------------------------------------------------------------


class Counted(Request):
    """Counts how often it is looked at."""

    looks = 0

    @property
    def num_tokens(self) -> int:
        Counted.looks += 1
        return len(self.all_token_ids)


def running(engine: ToyEngine, requests: list[Request], new_blocks: dict[int, list[int]]) -> Any:
    """A step of vLLM that computes one token of each of these, in the form for requests that run already."""
    cached = SimpleNamespace(
        req_ids=[request.request_id for request in requests],
        new_block_ids=[(new_blocks[index],) if index in new_blocks else None for index in range(len(requests))],
        resumed_req_ids=set(),
        num_computed_tokens=[len(request.all_token_ids) - 1 for request in requests],
    )
    counts = {request.request_id: 1 for request in requests}
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=len(requests),
    )
    return step_record(output, engine.scheduler)


def test_a_step_looks_at_the_requests_that_have_something_to_save(engines: Engines) -> None:
    engine = engines()
    requests: list[Request] = [Counted(f"r{index}", tokens(200 + index, CHUNK - 4)) for index in range(100)]
    for request in requests:
        assert engine.match(request) == 0
        engine.scheduler.allocated(request, [list(range(3))], 0)
    engine.scheduler.plan_step(running(engine, requests, dict.fromkeys(range(100), [3])))
    for request in requests[1:]:
        engine.scheduler.track(request).block_ids.pop()
    engine.scheduler.plan_step(running(engine, requests, dict.fromkeys(range(1, 100), [])))
    Counted.looks = 0
    for _ in range(3):
        engine.scheduler.plan_step(running(engine, requests, {}))
    assert Counted.looks <= 3, "one of them is about to fill a chunk"
    requests[0].all_token_ids += tokens(43, 4)
    engine.scheduler.plan_step(running(engine, requests, {}))
    wait_until(lambda: engines.node.status().chunks == {"filling": 101}, what="it has room, and the prompts' ends have")
    wait_until(lambda: engine.scheduler.plan_step(running(engine, requests, {})).saves, what="it is saved")
    assert engine.scheduler.plan_step(running(engine, requests, {7: [9]})).saves == []
    assert engine.scheduler.track(requests[7]).block_ids[-1] == 9
    for request in requests:
        engine.scheduler.finished(request)


def test_blocks_of_several_cache_groups_are_refused_and_not_mixed_up(engines: Engines) -> None:
    engine = engines()
    request = Request("g", tokens(56, CHUNK))
    assert engine.match(request) == 0
    with pytest.raises(LayoutError, match="request g: blocks of 2 cache groups"):
        engine.scheduler.allocated(request, [[1, 2], [3, 4]], 0)
    engine.scheduler.allocated(request, [[1, 2]], 0)
    two = [StepRequest("g", 0, 1, CHUNK, [[3], [4]], has_all_blocks=False)]
    with pytest.raises(LayoutError, match="2 cache groups"):
        engine.scheduler.plan_step(StepRecord(two, num_tokens=1))
    one = [StepRequest("g", 0, 1, CHUNK, [[3]], has_all_blocks=False)]
    engine.scheduler.plan_step(StepRecord(one, num_tokens=1))
    assert engine.scheduler.track(request).block_ids == [1, 2, 3]
    engine.scheduler.finished(request)
