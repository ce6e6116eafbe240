"""What the scheduler half asks about peers, against a scripted node: who is asked, and how long it waits."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from toy_engine import CHUNK, Request, hasher, layout

from pdx.config import ConnectorConfig
from pdx.engine.request import Step, TrackedRequest, parse_params
from pdx.engine.store_lookup import ASK_S, IDLE_S, StoreLookup
from pdx.memory.slot import Slot
from pdx.wire.messages import Admit, Admitted, Answer, Ask, Release

TRANSFER = "t" * 20
PREFILL = {"do_remote_decode": True, "transfer_id": TRANSFER}
DECODE = {"do_remote_prefill": True, "transfer_id": TRANSFER}


class ScriptedNode:
    """A connection whose node answers what the script says, at once; None: it has not answered yet."""

    def __init__(self, script: Callable[[Ask], Answer | None], epoch: int = 1) -> None:
        self.script = script
        self.epoch = epoch
        self.asked: list[Any] = []
        self.told: list[Any] = []
        self.counted: Counter[str] = Counter()
        self.waited: list[float] = []
        self.silence = 0.0

    def silent_s(self) -> float:
        return self.silence

    def ask(self, body: Ask) -> int:
        self.asked.append(body)
        return len(self.asked)

    def collect(self, seq: int, timeout_s: float, *, or_another: bool = False) -> Answer | None:
        self.waited.append(timeout_s)
        return self.script(self.asked[seq - 1])

    def forget(self, seq: int) -> None:
        self.asked[seq - 1] = None

    def tell(self, body: Ask) -> None:
        self.told.append(body)

    def count(self, reason: str, text: str, *args: object) -> None:
        self.counted[reason] += 1
        logging.getLogger("pdx").warning(text, *args)

    def all_of(self, kind: type) -> list[Any]:
        return [body for body in self.asked if isinstance(body, kind)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Asking:
    """One request and the lookup of it."""

    def __init__(self, num_tokens: int, params: dict[str, Any] | None, **settings: Any) -> None:
        self.clock = Clock()
        self.request = Request("r", list(range(num_tokens)), params)
        self.tracked = TrackedRequest(self.request, layout(), parse_params(params), layout().fingerprint())
        config = ConnectorConfig(node="ipc:///nowhere", chunk_tokens=CHUNK, **settings)
        self.lookup = StoreLookup(config, layout(), hasher, self.clock)

    def advance(self, node: Any) -> bool:
        self.lookup.new_step(is_busy=False)
        return self.lookup.advance(self.tracked, node)


def slots(count: int) -> list[Slot]:
    return [Slot(4096 * number, layout().chunk_bytes, 2) for number in range(count)]


def answers(hits: int, *, waiting: bool = False) -> Callable[[Ask], Answer]:
    """Finds the first `hits` chunks, here and now; grants everything else that is to be reserved."""

    def script(ask: Ask) -> Answer:
        assert isinstance(ask, Admit)
        if waiting:
            return Admitted(hits, waiting=True)
        found = min(hits, len(ask.keys))
        granted = list(range(found, len(ask.keys))) if ask.nbytes else []
        lease, lease_s = 7 if ask.lease_s else 0, ask.lease_s
        return Admitted(found, slots(found), lease, False, granted, slots(len(granted)), lease_s=lease_s)

    return script


def full(ask: Ask) -> Answer:
    """Nothing is there, and there is no room."""
    return Admitted(full=True)


@pytest.mark.parametrize(
    ("params", "source", "push_to"),
    [
        (None, "", ""),
        (PREFILL, "", ""),
        ({**PREFILL, "decode_node": "two"}, "two", "two"),
        ({**PREFILL, "decode_node": "two", "prefill_node": "three"}, "two", "two"),
        (DECODE, "", ""),
        ({**DECODE, "prefill_node": "one"}, "one", ""),
        ({**DECODE, "prefill_node": "one", "decode_node": "three"}, "one", ""),
        ({"decode_node": "two", "prefill_node": "one"}, "", ""),
    ],
)
def test_who_is_asked_and_who_is_pushed_to(params: dict[str, Any] | None, source: str, push_to: str) -> None:
    asking, node = Asking(2 * CHUNK + 5, params), ScriptedNode(answers(1))
    assert asking.advance(node)
    assert [(body.source, body.push_to) for body in node.all_of(Admit)] == [(source, push_to)]


@pytest.mark.parametrize("tail", [0, 5])
def test_a_prompt_that_is_all_here_is_pushed_all_the_same(tail: int) -> None:
    """Nothing is granted, or only the tail; the peer is still to get every key."""
    asking, node = Asking(2 * CHUNK + tail, {**PREFILL, "decode_node": "two"}), ScriptedNode(answers(2))
    assert asking.advance(node)
    (admit,) = node.all_of(Admit)
    assert (len(admit.keys), admit.push_to, admit.writes) == (2 + bool(tail), "two", TRANSFER)
    assert bool(admit.tail_nbytes) == bool(tail)


def test_a_decoder_asks_the_peer_for_the_tail_too() -> None:
    asking = Asking(2 * CHUNK + 5, {**DECODE, "prefill_node": "one", "prefill_tokens": 2 * CHUNK + 5})
    node = ScriptedNode(answers(3))
    assert asking.advance(node)
    (admit,) = node.all_of(Admit)
    assert (len(admit.keys), admit.source, admit.awaits) == (3, "one", TRANSFER)
    assert asking.tracked.node.hit_tokens == 2 * CHUNK + 5


def test_a_prefill_waits_for_the_peers_chunks_and_takes_them() -> None:
    asking, node = Asking(3 * CHUNK, {**PREFILL, "decode_node": "two"}), ScriptedNode(answers(1, waiting=True))
    for _ in range(20):
        assert not asking.advance(node)
        asking.clock.now += 0.9  # each answer is a sign of life: lookup_s is about silence
    assert len(node.all_of(Admit)) == 20
    assert not asking.tracked.node.grants
    node.script = lambda ask: None
    assert not asking.advance(node)
    node.script = answers(3)
    assert asking.advance(node)
    assert asking.tracked.node.hit_tokens == 3 * CHUNK
    assert not node.counted


def test_a_prefill_does_not_wait_for_ever_and_keeps_what_is_here(caplog: pytest.LogCaptureFixture) -> None:
    """Should the node not end the waiting, the connector does, and asks again for what is here: leased this time."""
    asking = Asking(3 * CHUNK, {**PREFILL, "decode_node": "two"}, transfer_wait_s=10.0)

    def script(ask: Ask) -> Answer:
        return answers(1, waiting=isinstance(ask, Admit) and bool(ask.source))(ask)

    node = ScriptedNode(script)
    assert not asking.advance(node)
    asking.clock.now += 9.9
    assert not asking.advance(node)
    asking.clock.now += 0.2
    assert not asking.advance(node)
    assert asking.advance(node)
    assert (asking.tracked.node.hit_tokens, asking.tracked.node.lease) == (CHUNK, 7)
    assert [body.source for body in node.all_of(Admit)] == ["two", "two", "two", ""]
    assert node.counted == {"source_late": 1}
    assert "goes on without chunks of two" in caplog.text
    asking.clock.now += 1000
    assert asking.advance(node)
    assert [body.source for body in node.all_of(Admit)[4:]] == [""], "its lease has ended long ago: asked again"
    assert node.told.count(Release(7)) == 1, "the old one is given back"


def test_a_node_that_says_wait_to_a_question_about_no_peer_is_not_waited_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asking, node = Asking(CHUNK, None, transfer_wait_s=10.0), ScriptedNode(answers(0, waiting=True))
    assert not asking.advance(node)
    asking.clock.now += 10.1
    assert asking.advance(node)
    assert node.counted == {"source_late": 1}, "it is in no transfer"
    assert "request r goes on without chunks of a lower tier" in caplog.text


def test_a_decoders_wait_for_its_transfer_has_its_deadline_with_a_peer_too() -> None:
    asking = Asking(CHUNK, {**DECODE, "prefill_node": "one"}, transfer_wait_s=10.0)
    node = ScriptedNode(answers(0, waiting=True))
    assert not asking.advance(node)
    asking.clock.now += 10.1
    assert asking.advance(node)
    assert node.counted == {"transfer_late": 1}


def test_the_peer_is_asked_once() -> None:
    """While a prefill waits for room, or after its preemption, it looks up again: on this node alone."""
    asking = Asking(3 * CHUNK, {**PREFILL, "decode_node": "two"})
    room = False

    def script(ask: Ask) -> Answer:
        return answers(0)(ask) if room else full(ask)

    node = ScriptedNode(script)
    assert not asking.advance(node)
    for is_there in (False, True):
        asking.clock.now += 1.1
        room = is_there
        assert asking.advance(node) is room
    asking.tracked.step(Step.RUN)
    asking.tracked.step(Step.PREEMPT)
    assert asking.advance(node)
    assert [body.source for body in node.all_of(Admit)] == ["two", "", "", ""]
    room_for = [body.push_to for body in node.all_of(Admit) if body.nbytes]
    assert room_for == ["two"] * 3, "the push is part of the reservation"


def test_the_next_node_is_asked_everything_anew() -> None:
    asking = Asking(3 * CHUNK, {**PREFILL, "decode_node": "two"})
    assert not asking.advance(ScriptedNode(full))
    following = ScriptedNode(answers(0), epoch=2)
    assert asking.advance(following)
    assert [(body.source, body.push_to) for body in following.all_of(Admit)] == [("two", "two")]


@pytest.mark.parametrize("waits", [True, False])
def test_a_slow_step_does_not_make_a_new_question_late(waits):
    """Steps of a CPU engine may be further apart than `lookup_s`: each question has a deadline of its own."""
    asking = Asking(4 * CHUNK, DECODE, lookup_s=1.0)
    assert not asking.advance(ScriptedNode(answers(0, waiting=True)))
    asking.clock.now += 5.0
    silent = ScriptedNode(lambda ask: None)
    assert not asking.advance(silent)
    assert len(silent.all_of(Admit)) == 1
    asking.clock.now += 0.5 if waits else 1.0
    assert asking.advance(silent) is not waits
    assert silent.counted["request_without_pdx"] == (not waits)


# ---- how much is asked, and when ------------------------------------------------------------


def silent(ask: Ask) -> None:
    """The node has not answered yet."""


def test_what_a_turn_needs_is_asked_ahead_of_it() -> None:
    asking, node = Asking(2 * CHUNK, None), ScriptedNode(answers(1))
    asking.lookup.begin(asking.tracked, node)  # type: ignore[arg-type]
    assert ([bool(body.nbytes) for body in node.asked], node.waited) == ([True], [])
    assert asking.advance(node)
    assert (len(node.asked), asking.tracked.node.hit_tokens, len(asking.tracked.node.grants)) == (1, CHUNK, 1)


@pytest.mark.parametrize("params", [DECODE, {**PREFILL, "decode_node": "two"}, PREFILL, None])
def test_what_may_still_come_is_waited_for_by_the_node(params: dict[str, Any]) -> None:
    asking, node = Asking(2 * CHUNK, params), ScriptedNode(silent)
    asking.lookup.begin(asking.tracked, node)  # type: ignore[arg-type]
    assert [(type(body), bool(body.wait_s)) for body in node.asked] == [(Admit, True)]


def test_a_node_that_keeps_its_answer_back_is_asked_once() -> None:
    asking, node = Asking(2 * CHUNK, DECODE), ScriptedNode(silent)
    for _ in range(100):
        assert not asking.advance(node)
    assert len(node.asked) == 1
    assert 0 < node.asked[0].wait_s < asking.lookup._config.lookup_s, "silence is still noticed"


def test_a_silent_node_is_asked_nothing_until_it_is_heard_again() -> None:
    """One request has waited for as long as a request waits; those behind it would each do the same."""
    asking, node = Asking(2 * CHUNK, None, lookup_s=1.0), ScriptedNode(silent)
    assert not asking.advance(node)
    node.silence = 1.0
    assert asking.advance(node), "what it was asked is not waited for any longer"
    node.waited.clear()
    for _ in range(3):
        late = another(asking)
        asking.lookup.begin(late, node)  # type: ignore[arg-type]
        assert asking.lookup.advance(late, node)  # type: ignore[arg-type]
    assert (len(node.asked), node.waited) == (1, [])
    assert node.counted == {"request_without_pdx": 4}
    early = another(asking)
    asking.lookup.begin(early, node)  # type: ignore[arg-type]
    node.silence, node.script = 0.0, answers(1)
    assert asking.lookup.advance(early, node)  # type: ignore[arg-type]
    assert early.node.hit_tokens == CHUNK, "its turn came when the node was heard again"


@pytest.mark.parametrize(("step_s", "wait_s"), [(0.0, 0.0), (0.03, ASK_S), (0.01, 0.001), (0.0001, 0.00001)])
def test_a_busy_engine_waits_for_a_small_share_of_the_step_that_a_request_would_lose(
    step_s: float, wait_s: float
) -> None:
    """All waiting of a step together, also for others' answers: a burst does not wait for each of its requests."""
    asking, node = Asking(2 * CHUNK, None), ScriptedNode(silent)
    asking.lookup.new_step(is_busy=True, step_s=step_s)
    collect = node.collect

    def taking_all(seq: int, timeout_s: float, *, or_another: bool = False) -> Answer | None:
        assert not or_another, "else another's answer would cost this one a step"
        time.sleep(timeout_s)
        return collect(seq, timeout_s)

    node.collect = taking_all  # type: ignore[method-assign,assignment]
    for _ in range(3):
        assert not asking.lookup.advance(another(asking), node)  # type: ignore[arg-type]
    assert node.waited == [pytest.approx(wait_s), 0.0, 0.0]
    node.script = answers(1)
    assert asking.lookup.advance(asking.tracked, node), "what is there is taken"  # type: ignore[arg-type]


def another(asking: Asking) -> TrackedRequest:
    return TrackedRequest(Request("s", list(range(7, 2 * CHUNK + 7)), None), layout(), None, layout().fingerprint())


@pytest.mark.parametrize("who", ["nobody", "a load", "one that is decided"])
def test_an_idle_engine_waits_longer_if_it_keeps_nobody_waiting(who: str) -> None:
    asking, node = Asking(2 * CHUNK, None), ScriptedNode(answers(1))
    asking.lookup.new_step(is_busy=False, is_loading=who == "a load")
    if who == "one that is decided":
        assert asking.lookup.advance(asking.tracked, node)  # type: ignore[arg-type]
    node.script = silent
    assert not asking.lookup.advance(another(asking), node)  # type: ignore[arg-type]
    assert node.waited[-1] == pytest.approx(IDLE_S if who == "nobody" else ASK_S, rel=0.5)


def test_where_an_answer_has_come_nobody_waits_for_another_one() -> None:
    """The request that it is for comes later in the same step, or in the next one."""
    asking, node = Asking(2 * CHUNK, None), ScriptedNode(silent)  # a wait that ends before its time says so
    asking.lookup.new_step(is_busy=False)
    assert not asking.lookup.advance(asking.tracked, node)  # type: ignore[arg-type]
    assert not asking.lookup.advance(another(asking), node)  # type: ignore[arg-type]
    assert node.waited[-1] == 0.0


@pytest.mark.parametrize("hits", [0, 1])
@pytest.mark.parametrize("is_old", [False, True])
def test_an_answer_is_used_only_while_it_is_young(hits: int, is_old: bool) -> None:
    asking, node = Asking(2 * CHUNK, None, lease_s=60.0), ScriptedNode(answers(hits))
    assert asking.advance(node)
    asking.clock.now += (30.1 if hits else 1.1) if is_old else (29.9 if hits else 0.9)
    node.script = answers(2)
    assert asking.advance(node)
    assert len(node.all_of(Admit)) == 1 + is_old
    assert asking.tracked.node.hit_tokens == (2 if is_old else hits) * CHUNK
    assert node.told == ([Release(7)] if is_old else []), "one lease at a time"


def test_an_answer_that_nobody_collected_in_time_is_asked_for_again() -> None:
    asking, node = Asking(2 * CHUNK, None), ScriptedNode(answers(0))
    asking.lookup.begin(asking.tracked, node)  # type: ignore[arg-type]
    for _ in range(5):
        asking.lookup.new_step(is_busy=True)
    asking.clock.now += 20.0
    assert not asking.advance(node)
    node.script = answers(2)
    assert asking.advance(node)
    assert (len(node.all_of(Admit)), asking.tracked.node.hit_tokens) == (2, 2 * CHUNK)


class SlowNode(ScriptedNode):
    """A node whose answers are there a step after their questions."""

    def __init__(self, script: Callable[[Ask], Answer | None]) -> None:
        super().__init__(script)
        self.num_answered = 0

    def next_step(self) -> None:
        self.num_answered = len(self.asked)

    def collect(self, seq: int, timeout_s: float, *, or_another: bool = False) -> Answer | None:
        return super().collect(seq, timeout_s) if seq <= self.num_answered else None


@pytest.mark.parametrize("params", [None, PREFILL, DECODE])
@pytest.mark.parametrize("has_room", [False, True])
def test_slow_steps_of_a_busy_engine_keep_nobody_waiting_for_ever(
    params: dict[str, Any] | None, has_room: bool
) -> None:
    """Each answer is older than any age when it is there. Nothing is found, and what another request computes just now
    is not granted."""

    def script(ask: Ask) -> Answer:
        assert isinstance(ask, Admit)
        if not has_room and not ask.partial:
            return full(ask)
        return Admitted(granted=[0], granted_slots=slots(1), full=not has_room)

    asking, node = Asking(3 * CHUNK, params), SlowNode(script)
    steps = 0
    while not asking.lookup.advance(asking.tracked, node):  # type: ignore[arg-type]
        assert steps < 20, f"{len(node.asked)} questions"
        steps += 1
        node.next_step()
        asking.lookup.new_step(is_busy=True)
        asking.clock.now += 2.0


def test_a_step_looks_at_the_room_that_it_fills_however_long_the_prompt() -> None:
    asking, node = Asking(8 * CHUNK, None), ScriptedNode(answers(0))
    assert asking.advance(node)
    tracked = asking.tracked
    tracked.take_blocks([list(range(8 * tracked.node.grants[0].end_block))])
    untouched: list[Any] = [object() for _ in range(5)]
    tracked.node.grants[3:] = untouched
    for step in range(2):
        save = tracked.plan_save(step * CHUNK, (step + 1) * CHUNK - (step == 1))
        assert save is not None
        assert [pages.completes for pages in save.pages] == [step == 0]
    assert tracked.node.grants[2:] == untouched


def test_room_that_comes_late_is_filled_in_its_turn() -> None:
    """That of chunks that could not be loaded lies before what the request has."""
    asking, node = Asking(4 * CHUNK, None), ScriptedNode(answers(2))
    assert asking.advance(node)
    node.script = lambda ask: Admitted(granted=[1], granted_slots=slots(1))
    asking.lookup.reserve_again(asking.tracked, node)  # type: ignore[arg-type]
    asking.lookup.reserve_late(asking.tracked, node, 0)  # type: ignore[arg-type]
    asking.tracked.take_blocks([list(range(64))])
    save = asking.tracked.plan_save(0, 2 * CHUNK)
    assert save is not None
    assert [pages.completes for pages in save.pages] == [True]
    assert len(asking.tracked.node.grants) == 2
