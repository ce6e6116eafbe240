"""Whatever happens to a push in whatever state, it ends once, in order, and leaves nothing behind."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from push_stage import MIB, FakePeerTier, SendingStage

from pdx.errors import TransferAborted, WriteRefused
from pdx.wire.messages import Release

TRANSFER = "transfer-0123456789"


@pytest.fixture
def stage(tmp_path):
    made = SendingStage(tmp_path)
    yield made
    made.close()


class Case:
    """One push of two chunks of four layers, brought into a state."""

    def __init__(self, stage):
        self.stage = stage
        self.slots = stage.reserve([0, 1], 4 * MIB, layers=4)

    def start(self):
        self.stage.start([0, 1], transfer=TRANSFER)

    @property
    def push(self):
        return next(iter(self.stage.copies.of(self.stage.way)), None)

    # states

    def unoffered(self):
        self.stage.way.is_usable = False
        self.start()

    def offered(self):
        self.start()

    def running(self):
        self.start()
        self.stage.grant(self.stage.way.offers[0])

    def writing(self):
        self.running()
        self.stage.fill(self.slots, 0)

    def all_sent(self):
        self.running()
        self.stage.fill(self.slots, 0, 4, seal=True)

    def cancelled_while_writing(self):
        self.writing()
        self.stage.copies.cancel(TRANSFER)

    def stopped_while_writing(self):
        self.writing()
        self.stage.copies.stopped(self.stage.way, 1, "")

    def lost_while_writing(self):
        self.writing()
        self.lost()

    # events

    def granted(self):
        if self.stage.way.offers:
            self.stage.grant(self.stage.way.offers[0])

    def stop(self):
        self.stage.copies.stopped(self.stage.way, 1, "no more room")

    def cancel(self):
        self.stage.copies.cancel(TRANSFER)

    def lost(self):
        self.stage.way.is_usable = False
        self.stage.copies.lost(self.stage.way)

    def late(self):
        self.stage.copies.tick(self.stage.now + 1000)

    def source_dies(self):
        self.stage.lose(self.slots)

    def filled(self):
        self.stage.fill(self.slots, 0, 4, seal=True)

    def write_ends(self):
        if self.stage.way.jobs:
            self.stage.finish()

    def write_fails(self):
        if self.stage.way.jobs:
            self.stage.finish(error=WriteRefused("not granted"))


STATES = [
    "unoffered",
    "offered",
    "running",
    "writing",
    "all_sent",
    "cancelled_while_writing",
    "stopped_while_writing",
    "lost_while_writing",
]
EVENTS = ["granted", "stop", "cancel", "lost", "late", "source_dies", "filled", "write_ends", "write_fails"]
IMPOSSIBLE = {("running", "granted"), ("writing", "granted"), ("all_sent", "filled")}  # the first is malformed


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_every_event_in_every_state(stage, state, event):
    if (state, event) in IMPOSSIBLE:
        return
    case = Case(stage)
    getattr(case, state)()
    getattr(case, event)()
    in_between(stage)
    if case.push is not None and case.push.state != "draining":
        case.cancel()
    in_between(stage)
    while stage.way.jobs:
        in_between(stage)
        stage.finish(error=TransferAborted("") if stage.way.aborted else None)
    after(stage)


def in_between(stage):
    """What always holds."""
    for push in stage.copies.of(stage.way):
        mine = [job for job in stage.way.jobs if job.push == push.number]
        assert push.under_way == len(mine)
    alive = {push.number for push in stage.copies.of(stage.way)}
    assert {job.push for job in stage.way.jobs} <= alive, "a push ended while a write still reads its memory"
    said = [body.lease for body in stage.way.farewells]
    assert len(set(said)) == len(said)
    assert not alive & set(said), "it said that it writes nothing more, and it does"


def after(stage):
    """What holds in the end."""
    assert len(stage.over) == 1
    offered = [offer.push for offer in stage.way.offers]
    is_lost = not stage.way.is_usable
    assert [body.lease for body in stage.way.farewells] == offered or is_lost
    for number, is_complete in stage.over:
        assert Release(number, not is_complete) not in stage.way.farewells
    stage.assert_idle()


EVENT = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 5), st.integers(1, 3)),
    st.tuples(st.just("grant"), st.integers(0, 9), st.integers(0, 7)),
    st.tuples(st.just("fill"), st.integers(0, 5), st.integers(0, 2)),
    st.tuples(st.just("lose"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("stop"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("tick"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("lost"), st.just(0), st.just(0)),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENT, max_size=60), group=st.integers(1, 4))
def test_any_order_of_events_leaves_nothing_behind(tmp_path_factory, events, group):
    stage = SendingStage(tmp_path_factory.mktemp("stage"), granules=64, group_bytes=group * 4096, window_bytes=3 * 4096)
    stage.way = JudgingWay()
    stage.way.stage = stage
    try:
        slots = dict(enumerate(stage.reserve(list(range(6)), 3 * 4096, layers=3)))
        for event in events:
            do(stage, slots, *event)
            check(stage, slots)
        stage.copies.tick(stage.now + 1000)
        stage.finish_all(TransferAborted(""))
        check(stage, slots)
        stage.assert_idle()
        assert sorted(number for number, _ in stage.over) == list(range(1, len(stage.over) + 1))
        stage.store.let_go(stage.store.unfinished(slots.values()))
        stage.free_what_is_sealed()
    finally:
        stage.close()


def do(stage, slots, verb, one, two):
    """One event; those that make no sense now do nothing."""
    pushes = stage.copies.of(stage.way)
    match verb:
        case "start":
            stage.start(list(range(one, min(6, one + two))), transfer=f"{TRANSFER}-{one % 4}")
        case "grant" if pushes:
            push = pushes[one % len(pushes)]
            if push.state == "queued":
                (offer,) = (offer for offer in stage.way.offers if offer.push == push.number)
                stage.grant(offer, [n for n in range(len(offer.keys)) if two >> n & 1])
        case "fill" | "lose" if one in slots:
            (chunk,) = stage.store.unfinished([slots[one]]) or (None,)
            if verb == "lose":
                stage.lose([slots.pop(one)] if chunk else [])
            elif chunk is not None:
                whole = (chunk.filled | 1 << two) == 7
                stage.fill([slots[one]], two, seal=whole)
        case "finish" if stage.way.jobs:
            job = stage.way.jobs[one % len(stage.way.jobs)]
            stage.finish(job, WriteRefused("") if two else None)
        case "stop" if pushes:
            stage.copies.stopped(stage.way, pushes[one % len(pushes)].number, "")
        case "cancel":
            stage.copies.cancel(f"{TRANSFER}-{one}")
        case "tick":
            stage.now += one
            stage.copies.tick(stage.now)
        case "lost":
            stage.copies.lost(stage.way)


def check(stage, slots):
    """The memory that a write reads is as it was, and the window is respected."""
    in_between(stage)
    assert sum(job.nbytes for job in stage.way.jobs) < 4 * 3 * 4096 + 3 * 6 * 4096
    assert stage.copies.in_flight(stage.way) == sum(job.nbytes for job in stage.way.jobs)
    pushes = {push.number: push for push in stage.copies.of(stage.way)}
    for job in stage.way.jobs:
        chunks = {item.remote.offset: item.chunk for item in pushes[job.push].items}
        for one in job.slices:
            chunk = chunks[one.offset]
            assert stage.store.at(chunk.slot) is chunk, "given away while it is read"
    for push in pushes.values():
        assert push.unfilled_bytes == unfilled_bytes(push) or push.state != "running"
    assert not any(is_due(stage, push) for push in pushes.values()) or not stage.has_room, "filled, and never sent"


def unfilled_bytes(push):
    """Counted anew, as `Copy` counted it slice by slice."""
    return sum(
        item.remote.nbytes
        // item.chunk.reservation.layers
        * (item.chunk.reservation.layers - item.chunk.filled.bit_count())
        for item in push.items
    )


def is_due(stage, push):
    """Whether a push has a write to make, by looking at all of it."""
    ready = [
        item.remote.nbytes // item.chunk.reservation.layers * (item.chunk.filled & ~item.sent).bit_count()
        for item in push.items
    ]
    is_worth_it = sum(ready) >= stage.group_bytes or not unfilled_bytes(push)
    return push.state == "running" and any(ready) and is_worth_it


class JudgingWay(FakePeerTier):
    """Compares each choice with what looking at all pushes would choose."""

    stage = None

    def store(self, job):
        super().store(job)
        pushes = {push.number: push for push in self.stage.copies.of(self)}
        chosen = pushes.pop(job.number)
        waiting = [push for push in pushes.values() if is_due(self.stage, push)]
        ranks = [(unfilled_bytes(push), push.number) for push in waiting]
        assert (unfilled_bytes(chosen), chosen.number) <= min(ranks, default=(1 << 60, 0))
