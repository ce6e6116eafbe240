"""What PDX costs requests that it does not help, beside others that run: counted in steps, questions and room.

Nothing is clocked. A step that waits for its answer waits here until it is there, and how long a step takes is said.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from exact_engine import BLOCK
from node_harness import is_stopped
from oracle_bed import OracleBed

from pdx.engine import pace, store_lookup
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit

PLAIN = {False: 1, True: 2}  # steps of an engine without a connector until a prompt has its first token
both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def step_takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Says how long a step of a busy engine takes, as far as the scheduler half sees; answers come within it."""
    monkeypatch.setattr(store_lookup, "ASK_S", 20.0)
    monkeypatch.setattr(store_lookup, "MISS_S", 60.0)  # nothing is asked twice because a core was taken away
    monkeypatch.setattr(store_lookup, "BUSY_SHARE", 1e12)

    def say(seconds: float) -> None:
        monkeypatch.setattr(pace.StepTimes, "step_s", seconds)

    say(1.0)
    return say


def busy(bed: OracleBed, **shape: Any) -> Any:
    """An engine in which two requests run, and go on to run."""
    engine = bed.engine("busy", **shape)
    for number in range(2):
        engine.add(f"runs {number}", bed.tokens(40, number), 2000)
    for _ in range(10):
        engine.step()
    return engine


def steps_until_token(engine: Any, name: str, prompt: list[int]) -> int:
    """Steps from its arrival to its first token."""
    engine.add(name, prompt, 2)
    for number in range(1, 100):
        engine.step()
        if engine.outputs[name]:
            return number
    raise AssertionError(f"{name} has no token")


def finish(engine: Any) -> None:
    """Its answers up to now are right, and what runs is over."""
    for name in list(engine.requests):
        if name.startswith("runs"):
            engine.abort(name)
            del engine.outputs[name]
    engine.run()
    engine.check()


class Questions:
    """What an engine asks its node."""

    def __init__(self, engine: Any) -> None:
        connection = engine.half.link.connection
        self.asked: list[Admit] = []
        self._ask = connection.ask
        connection.ask = self._note

    def _note(self, body: Any) -> int:
        if isinstance(body, Admit):
            self.asked.append(body)
        return int(self._ask(body))


@both
def test_a_new_prompt_beside_others_has_its_token_in_the_step_that_it_has_it_in_without_pdx(
    bed: OracleBed, step_takes: Callable[[float], None], asynchronous: bool
) -> None:
    engine = busy(bed, asynchronous=asynchronous)
    steps = [steps_until_token(engine, f"new {number}", bed.tokens(200, f"new {number}")) for number in range(5)]
    assert steps == [PLAIN[asynchronous]] * 5
    finish(engine)


@pytest.mark.parametrize(("asynchronous", "more"), [(False, 512), (True, BLOCK)], ids=["sync", "async"])
def test_a_hit_that_costs_more_steps_than_computing_is_not_loaded(
    bed: OracleBed, step_takes: Callable[[float], None], asynchronous: bool, more: int
) -> None:
    """vLLM has all of the document but `more` tokens, which the store has."""
    document = bed.tokens(1024)
    writer = bed.engine("writer")
    writer.ask("w", [*document, *bed.tokens(5, "w")], 1)
    bed.stored(4)
    engine = busy(bed, asynchronous=asynchronous, extra={"load": "auto"})
    engine.ask("beginning", document[: 1024 - more + 1], 1)
    engine.ask("warm", bed.tokens(300, "warm"), 1)
    loads = engine.faults.loads
    step_takes(1000.0)
    assert steps_until_token(engine, "whole", [*document, *bed.tokens(1, "end")]) == PLAIN[asynchronous]
    assert engine.faults.loads == loads
    finish(engine)


@pytest.mark.parametrize(("asynchronous", "answers"), [(False, False), (True, True)], ids=["sync", "async"])
def test_a_burst_asks_and_takes_room_for_those_that_run_next(
    own_bed: OracleBed, step_takes: Callable[[float], None], asynchronous: bool, answers: bool
) -> None:
    """And vLLM does not go through its queue, unless the node answers too late for a step."""
    engine = busy(own_bed, asynchronous=asynchronous, seqs=4, budget=512)
    half, calls, most = engine.half, 0, 0
    if not answers:
        step_takes(0.0)
    matched_tokens = engine.pdx.scheduler.matched_tokens

    def counting(*args: Any) -> int | None:
        nonlocal calls
        calls += 1
        return matched_tokens(*args)

    engine.pdx.scheduler.matched_tokens = counting
    prompts = {f"q{number}": own_bed.tokens(640, number) for number in range(40)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 4)
    questions = Questions(engine)
    while set(prompts) & set(engine.requests):
        calls = 0
        engine.step()
        waiting = [each for each in half._requests.values() if each.is_queued]
        holding = [each for each in waiting if each.node.asked is not None or each.node.grants]
        most = max(most, len(holding))
        assert not answers or calls <= 3
    assert 0 < most <= 2, "of four places two are free"
    assert len(questions.asked) <= len(prompts)
    finish(engine)


def test_a_silent_node_keeps_one_request_waiting_and_no_other(own_bed: OracleBed) -> None:
    engine = own_bed.engine("e", extra={"lookup_s": 0.3})
    engine.ask("before", own_bed.tokens(300, "before"), 2)
    node, questions = own_bed.node, Questions(engine)
    node.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(node.pid))
        for number in range(6):
            engine.ask(f"silent {number}", own_bed.tokens(300, number), 2)
        assert len(questions.asked) == 1
    finally:
        node.signal(signal.SIGCONT)
    connection = engine.half.link.connection
    wait_until(lambda: connection.silent_s() == 0.0, what="its heartbeat is answered")
    engine.ask("after", own_bed.tokens(300, "after"), 2)
    assert len(questions.asked) == 2
    # And those before and after where the node has not its core for so long.
    wait_until(lambda: own_bed.counted("degraded_request_without_pdx") >= 6, what="each is counted")
