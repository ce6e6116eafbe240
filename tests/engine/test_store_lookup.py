"""What the scheduler half asks its node, against a scripted one: who is asked, for what, and how long it waits."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from toy_engine import BLOCK, CHUNK, Request, decode_of, hasher, layout, prefill_of

from pdx.config import ConnectorConfig
from pdx.engine.params import parse_params
from pdx.engine.request import Step, TrackedRequest
from pdx.engine.store_lookup import ASK_S, IDLE_S, StoreLookup
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.memory.slot import Slot
from pdx.wire.messages import Admit, Admitted, Answer, Ask, Release

TRANSFER = "t" * 20
PREFILL = prefill_of(TRANSFER)
TO_TWO = {**PREFILL, "decode_node": "two"}
DECODE = decode_of(TRANSFER)
FROM_ONE = {**DECODE, "prefill_node": "one"}

Script = Callable[[Ask], Answer | None]


class ScriptedNode:
    """A connection whose node answers what the script says, at once; None: it has not answered yet."""

    def __init__(self, script: Script, epoch: int = 1) -> None:
        self.script, self.epoch = script, epoch
        self.asked: list[Any] = []
        self.told: list[Any] = []
        self.counted: Counter[str] = Counter()
        self.waited: list[float] = []
        self.silence = 0.0
        self.node_name = "here"

    def silent_s(self) -> float:
        return self.silence

    def ask(self, body: Ask) -> int:
        assert isinstance(body, Admit)
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

    @property
    def sources(self) -> list[str]:
        """Of its questions."""
        return [body.source for body in self.asked]


class Asking:
    """One request, the lookup of it, and the node that is asked; time goes on where a test says so."""

    def __init__(
        self,
        num_tokens: int,
        params: dict[str, Any] | None,
        script: Script,
        *,
        layouts: Sequence[KvLayout] = (layout(),),
        **settings: Any,
    ) -> None:
        self.now = 1000.0
        self.node: Any = ScriptedNode(script)
        self.request = Request("r", list(range(num_tokens)), params)
        groups = CacheGroups.of(layouts)
        self.tracked = TrackedRequest(self.request, groups, parse_params(params), groups.fingerprint())
        config = ConnectorConfig(node="ipc:///nowhere", chunk_tokens=CHUNK, **settings)
        self.lookup = StoreLookup(config, groups, hasher, lambda: self.now)

    def begin(self) -> None:
        self.lookup.begin(self.tracked, self.node)

    def advance(self, *, after_s: float = 0.0, script: Script | None = None) -> bool:
        """In a new step, whose node may answer otherwise by now."""
        self.now += after_s
        self.node.script = script or self.node.script
        self.lookup.new_step(is_busy=False)
        return self.lookup.advance(self.tracked, self.node)

    def advance_another(self) -> bool:
        """Another request in the same step."""
        return self.lookup.advance(another(), self.node)

    @property
    def state(self) -> Any:
        return self.tracked.node


def another() -> TrackedRequest:
    return TrackedRequest(
        Request("s", list(range(7, 2 * CHUNK + 7)), None),
        CacheGroups.of(layout()),
        parse_params(None),
        layout().fingerprint(),
    )


def slots(count: int) -> list[Slot]:
    return [Slot(4096 * number, layout().chunk_bytes, 2) for number in range(count)]


def answers(hits: int, *, waiting: bool = False) -> Script:
    """Finds the first `hits` chunks, here and now; grants everything else that is to be reserved."""

    def script(ask: Any) -> Answer:
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


def silent(ask: Ask) -> None:
    """The node has not answered yet."""


@pytest.mark.parametrize(
    ("params", "source", "push_to"),
    [
        (None, "", ""),
        (PREFILL, "", ""),
        (TO_TWO, "two", "two"),
        ({**TO_TWO, "prefill_node": "three"}, "two", "two"),
        (DECODE, "", ""),
        (FROM_ONE, "one", ""),
        ({**FROM_ONE, "decode_node": "three"}, "one", ""),
        ({"decode_node": "two", "prefill_node": "one"}, "", ""),
    ],
)
def test_who_is_asked_and_who_is_pushed_to(params: dict[str, Any] | None, source: str, push_to: str) -> None:
    asking = Asking(2 * CHUNK + 5, params, answers(1))
    assert asking.advance()
    assert [(body.source, body.push_to) for body in asking.node.asked] == [(source, push_to)]


@pytest.mark.parametrize("tail", [0, 5])
def test_a_prompt_that_is_all_here_is_pushed_all_the_same(tail: int) -> None:
    """Nothing is granted, or only the tail; the peer is still to get every key."""
    asking = Asking(2 * CHUNK + tail, TO_TWO, answers(2))
    assert asking.advance()
    (admit,) = asking.node.asked
    assert (len(admit.keys), admit.push_to, admit.writes) == (2 + bool(tail), "two", TRANSFER)
    assert bool(admit.tail_nbytes) == bool(tail)


def test_a_decoder_asks_the_peer_for_the_tail_too() -> None:
    asking = Asking(2 * CHUNK + 5, {**FROM_ONE, "prefill_tokens": 2 * CHUNK + 5}, answers(3))
    assert asking.advance()
    (admit,) = asking.node.asked
    assert (len(admit.keys), admit.source, admit.awaits) == (3, "one", TRANSFER)
    assert asking.state.hits.tokens == 2 * CHUNK + 5


def test_a_prefill_waits_for_the_peers_chunks_and_takes_them() -> None:
    asking = Asking(3 * CHUNK, TO_TWO, answers(1, waiting=True))
    for _ in range(20):
        assert not asking.advance()
        asking.now += 0.9  # each answer is a sign of life: lookup_s is about silence
    assert len(asking.node.asked) == 20
    assert not asking.state.grants
    assert not asking.advance(script=silent)
    assert asking.advance(script=answers(3))
    assert asking.state.hits.tokens == 3 * CHUNK
    assert not asking.node.counted


def test_a_prefill_does_not_wait_for_ever_and_keeps_what_is_here(caplog: pytest.LogCaptureFixture) -> None:
    """Should the node not end the waiting, the connector does, and asks again for what is here: leased this time."""

    def script(ask: Any) -> Answer | None:
        return answers(1, waiting=ask.source != "here")(ask)

    asking = Asking(3 * CHUNK, TO_TWO, script, transfer_wait_s=10.0)
    for after_s in (0.0, 9.9, 0.2):
        assert not asking.advance(after_s=after_s)
    assert asking.advance()
    assert (asking.state.hits.tokens, asking.state.hits.lease) == (CHUNK, 7)
    assert asking.node.sources == ["two", "two", "two", "here"]
    assert asking.node.counted == {"source_late": 1}
    assert "goes on without chunks of two" in caplog.text
    assert asking.advance(after_s=1000)
    assert asking.node.sources[4:] == ["here"], "its lease has ended long ago: asked again"
    assert asking.node.told.count(Release(7)) == 1, "the old one is given back"


@pytest.mark.parametrize(
    ("params", "counted", "words"),
    [
        (None, "source_late", "request r goes on without chunks of a lower tier"),
        (FROM_ONE, "transfer_late", f"transfer {TRANSFER} did not arrive within 10.0 s"),
    ],
)
def test_a_node_that_says_wait_is_not_waited_for_ever(
    params: Any, counted: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    asking = Asking(CHUNK, params, answers(0, waiting=True), transfer_wait_s=10.0)
    assert not asking.advance()
    assert asking.advance(after_s=10.1)
    assert asking.node.counted == {counted: 1}
    assert words in caplog.text


def test_the_peer_is_asked_once() -> None:
    """While a prefill waits for room, or after its preemption, it looks up again: on this node alone."""
    asking = Asking(3 * CHUNK, TO_TWO, full)
    assert not asking.advance()
    assert not asking.advance(after_s=1.1)
    assert asking.advance(after_s=1.1, script=answers(0))
    asking.tracked.step(Step.RUN)
    asking.tracked.step(Step.PREEMPT)
    assert asking.advance()
    assert asking.node.sources == ["two", "here", "here", "here"], "and its node asks nobody, either"
    room_for = [body.push_to for body in asking.node.asked if body.nbytes]
    assert room_for == ["two"] * 3, "the push is part of the reservation"


def test_the_next_node_is_asked_everything_anew() -> None:
    asking = Asking(3 * CHUNK, TO_TWO, full)
    assert not asking.advance()
    asking.node = ScriptedNode(answers(0), epoch=2)
    assert asking.advance()
    assert [(body.source, body.push_to) for body in asking.node.asked] == [("two", "two")]


@pytest.mark.parametrize("waits", [True, False])
def test_a_slow_step_does_not_make_a_new_question_late(waits: bool) -> None:
    """Steps of a CPU engine may be further apart than `lookup_s`: each question has a deadline of its own."""
    asking = Asking(4 * CHUNK, PREFILL, answers(0, waiting=True), lookup_s=1.0)
    assert not asking.advance()
    asking.node = ScriptedNode(silent)
    assert not asking.advance(after_s=5.0)
    assert len(asking.node.asked) == 1
    assert asking.advance(after_s=0.5 if waits else 1.0) is not waits
    assert asking.node.counted["request_without_pdx"] == (not waits)


@pytest.mark.parametrize(("params", "waits_s"), [(None, 0.9), (DECODE, 4.9), ({**DECODE, "is_early": True}, 4.9)])
def test_a_decode_leg_waits_longer_for_a_late_answer(params: Any, waits_s: float) -> None:
    """A busy node is late for many at once, and what a decode leg would compute is done already."""
    asking = Asking(2 * CHUNK + 5, params, silent, lookup_s=1.0, transfer_wait_s=30.0)
    assert not asking.advance()
    assert not asking.advance(after_s=waits_s)
    assert len(asking.node.asked) == 1
    assert not asking.node.counted
    assert asking.advance(after_s=0.2)
    assert asking.node.counted == {"request_without_pdx": 1}


def test_a_decode_leg_does_not_wait_for_ever_for_a_node_that_says_nothing_at_all() -> None:
    asking = Asking(2 * CHUNK + 5, DECODE, silent, lookup_s=1.0)
    for _ in range(5):
        assert not asking.advance()
        asking.now += 1.0
        asking.node.silence += 1.0
    assert asking.advance_another(), "what can be computed without keeping others waiting is"
    assert asking.node.counted == {"request_without_pdx": 1}
    assert asking.advance()
    assert asking.node.counted == {"request_without_pdx": 2}


# ---- how much is asked, and when ------------------------------------------------------------


@pytest.mark.parametrize(("params", "is_taken_back"), [(None, True), (DECODE, False), (PREFILL, False)])
def test_room_of_a_request_whose_turn_does_not_come_is_given_back(params: Any, is_taken_back: bool) -> None:
    """Others may fill it sooner. A leg keeps what it waits for: its transfer would be given up."""
    asking = Asking(2 * CHUNK, params, answers(1))
    asking.begin()
    for seconds, is_over in ((0.9, False), (0.2, is_taken_back)):
        asking.now += seconds
        asking.lookup.take_back(asking.node)
        assert [asking.state.asked is None, asking.node.asked[0] is None] == [is_over, is_over], "and so is its answer"
    assert asking.advance()
    assert len(asking.node.asked) == 1 + is_taken_back


def test_all_that_a_request_has_asked_for_is_forgotten_with_it() -> None:
    """What is granted after its end, also late, would be nobody's to give back."""
    asking = Asking(2 * CHUNK, None, silent)
    asking.begin()
    asking.lookup.reserve_again(asking.tracked, asking.node)
    assert len(asking.node.asked) == 2
    asking.lookup.forget_asked(asking.tracked, asking.node)
    assert (asking.node.asked, asking.state.asked, asking.state.late) == ([None, None], None, None)


def test_room_that_is_not_answered_in_time_is_forgotten() -> None:
    """A state is gone by then; what is granted late would be nobody's to give back."""
    state = msgspec.structs.replace(layout(), kind="state", layers=(9,))
    asking = Asking(2 * CHUNK, None, silent, layouts=[layout(), state], lookup_s=1.0)
    asking.lookup.reserve_again(asking.tracked, asking.node)
    asking.lookup.reserve_late(asking.tracked, asking.node, 0)
    assert asking.state.late is not None
    asking.now += 1.5
    asking.lookup.reserve_late(asking.tracked, asking.node, 0)
    assert (asking.node.asked, asking.state.late) == ([None], None)
    assert asking.node.counted == {"save_skipped": 1}


@pytest.mark.parametrize("params", [DECODE, TO_TWO, PREFILL, None])
def test_what_may_still_come_is_waited_for_by_the_node_which_is_asked_once(params: Any) -> None:
    asking = Asking(2 * CHUNK, params, silent, lookup_s=1.0)
    asking.begin()
    for _ in range(100):
        assert not asking.advance()
    (admit,) = asking.node.asked
    assert 0 < admit.wait_s < 1.0, "silence is still noticed"


def test_a_silent_node_is_asked_nothing_until_it_is_heard_again() -> None:
    """One request has waited for as long as a request waits; those behind it would each do the same."""
    asking = Asking(2 * CHUNK, None, silent, lookup_s=1.0)
    node = asking.node
    assert not asking.advance()
    node.silence = 1.0
    assert asking.advance(), "what it was asked is not waited for any longer"
    node.waited.clear()
    for _ in range(3):
        late = another()
        asking.lookup.begin(late, node)
        assert asking.lookup.advance(late, node)
    assert (len(node.asked), node.waited) == (1, [])
    assert node.counted == {"request_without_pdx": 4}
    early = another()
    asking.lookup.begin(early, node)
    node.silence, node.script = 0.0, answers(1)
    assert asking.lookup.advance(early, node)
    assert early.node.hits.tokens == CHUNK, "its turn came when the node was heard again"


@pytest.mark.parametrize(("step_s", "wait_s"), [(0.0, 0.0), (0.03, ASK_S), (0.01, 0.001), (0.0001, 0.00001)])
def test_a_busy_engine_waits_for_a_small_share_of_the_step_that_a_request_would_lose(
    step_s: float, wait_s: float
) -> None:
    """All waiting of a step together, also for others' answers: a burst does not wait for each of its requests."""
    asking = Asking(2 * CHUNK, None, silent)
    asking.lookup.new_step(is_busy=True, step_s=step_s)
    collect = asking.node.collect

    def taking_all(seq: int, timeout_s: float, *, or_another: bool = False) -> Answer | None:
        assert not or_another, "else another's answer would cost this one a step"
        time.sleep(timeout_s)
        return collect(seq, timeout_s)

    asking.node.collect = taking_all
    for _ in range(3):
        assert not asking.advance_another()
    assert asking.node.waited == [pytest.approx(wait_s), 0.0, 0.0]
    asking.node.script = answers(1)
    assert asking.lookup.advance(asking.tracked, asking.node), "what is there is taken"


@pytest.mark.parametrize("who", ["nobody", "a load", "one that is decided", "one that is not"])
def test_an_idle_engine_waits_longer_if_it_keeps_nobody_waiting(who: str) -> None:
    """Where an answer has come, whoever's it is, nobody waits for another one: its request comes later in the same
    step, or in the next one. Here a wait that ends before its time says so."""
    asking = Asking(2 * CHUNK, None, answers(1) if who == "one that is decided" else silent)
    asking.lookup.new_step(is_busy=False, is_loading=who == "a load")
    if who.startswith("one"):
        assert asking.lookup.advance(asking.tracked, asking.node) is (who == "one that is decided")
    asking.node.script = silent
    assert not asking.advance_another()
    wait_s = {"nobody": IDLE_S, "one that is not": 0.0}.get(who, ASK_S)
    assert asking.node.waited[-1] == pytest.approx(wait_s, rel=0.5)


@pytest.mark.parametrize("hits", [0, 1])
@pytest.mark.parametrize("is_old", [False, True])
def test_an_answer_is_used_only_while_it_is_young(hits: int, is_old: bool) -> None:
    asking = Asking(2 * CHUNK, None, answers(hits), lease_s=60.0)
    assert asking.advance()
    young_s = 29.9 if hits else 0.9
    assert asking.advance(after_s=young_s + 0.2 * is_old, script=answers(2))
    assert len(asking.node.asked) == 1 + is_old
    assert asking.state.hits.tokens == (2 if is_old else hits) * CHUNK
    assert asking.node.told == ([Release(7)] if is_old else []), "one lease at a time"


def test_an_answer_that_nobody_collected_in_time_is_asked_for_again() -> None:
    asking = Asking(2 * CHUNK, None, answers(0))
    asking.begin()
    for _ in range(5):
        asking.lookup.new_step(is_busy=True)
    assert not asking.advance(after_s=20.0)
    assert asking.advance(script=answers(2))
    assert (len(asking.node.asked), asking.state.hits.tokens) == (2, 2 * CHUNK)


@pytest.mark.parametrize("params", [None, PREFILL, DECODE])
@pytest.mark.parametrize("has_room", [False, True])
def test_slow_steps_of_a_busy_engine_keep_nobody_waiting_for_ever(params: Any, has_room: bool) -> None:
    """Answers are there a step after their questions, and older than any age then. Nothing is found, and what another
    request computes just now is not granted."""
    answered: list[Any] = []

    def script(ask: Any) -> Answer | None:
        if not any(ask is one for one in answered):
            return None
        if not has_room and not ask.partial:
            return full(ask)
        return Admitted(granted=[0], granted_slots=slots(1), full=not has_room)

    asking = Asking(3 * CHUNK, params, script)
    for _ in range(20):
        if asking.lookup.advance(asking.tracked, asking.node):
            return
        answered[:] = asking.node.asked
        asking.lookup.new_step(is_busy=True)
        asking.now += 2.0
    pytest.fail(f"{len(asking.node.asked)} questions")


def test_a_step_looks_at_the_room_that_it_fills_however_long_the_prompt() -> None:
    asking = Asking(8 * CHUNK, None, answers(0))
    assert asking.advance()
    tracked, grants = asking.tracked, asking.state.grants
    tracked.take_blocks([list(range(8 * grants[0].end_block))])
    untouched: list[Any] = [object() for _ in range(5)]
    grants[3:] = untouched
    for step in range(2):
        save, _ = tracked.plan_save(step * CHUNK, (step + 1) * CHUNK - (step == 1))
        assert save is not None
        assert [pages.completes for pages in save.pages] == [step == 0]
    assert grants[2:] == untouched


def test_room_that_comes_late_is_filled_in_its_turn() -> None:
    """That of chunks that could not be loaded lies before what the request has."""
    asking = Asking(4 * CHUNK, None, answers(2))
    assert asking.advance()
    asking.node.script = lambda ask: Admitted(granted=[1], granted_slots=slots(1))
    asking.lookup.reserve_again(asking.tracked, asking.node)
    asking.lookup.reserve_late(asking.tracked, asking.node, 0)
    asking.tracked.take_blocks([list(range(64))])
    save, _ = asking.tracked.plan_save(0, 2 * CHUNK)
    assert save is not None
    assert [pages.completes for pages in save.pages] == [True]
    assert len(asking.state.grants) == 2


def test_a_prefill_leg_asks_for_no_chunk_that_its_tail_has() -> None:
    """Room that it would give back before it is filled, and with that the transfer."""
    state = msgspec.structs.replace(layout(), kind="state", layers=(9,))
    asking = Asking(2 * CHUNK, prefill_of("transfer-of-a-state"), answers(0), layouts=[layout(), state])
    asking.advance()
    [question] = asking.node.asked
    assert len(question.keys) == 2 * 2, "a whole chunk and a tail of each group"
    assert all(group.tail_nbytes for group in question.groups)
    asking.lookup.reserve_late(asking.tracked, asking.node, 2 * CHUNK)
    assert asking.node.asked == [question]


@pytest.mark.parametrize("first", [BLOCK - 1, 2 * CHUNK], ids=["a short input", "a long input"])
def test_a_sessions_later_inputs_get_room_as_what_it_generates_does(first: int) -> None:
    """Its prompt grows. Nobody finds what is saved behind a gap."""
    asking = Asking(first, None, answers(0))
    assert asking.advance()
    for count in (3 * CHUNK, CHUNK):
        asking.request.all_token_ids += range(count)
        asking.request.num_prompt_tokens = asking.request.num_tokens
        for _ in range(2):  # ask, and take the answer
            asking.lookup.reserve_late(asking.tracked, asking.node, asking.request.num_tokens)
    whole = asking.tracked.keys.leading(first // CHUNK + 4)
    assert [key for question in asking.node.asked for key in question.keys] == whole
    assert [grant.first_token for grant in asking.state.grants] == list(range(0, len(whole) * CHUNK, CHUNK))
