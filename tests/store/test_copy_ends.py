"""Whatever happens to a push in whatever state, it ends once, in order, and leaves nothing behind."""

from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from push_stage import FakePeerTier, SendingStage

from pdx.errors import TransferAborted, WriteRefused
from pdx.wire.messages import Release

TRANSFER = "transfer-0123456789"


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


CHUNKS = 4
NUMBER = st.integers(0, CHUNKS - 1)
EVENT = st.one_of(
    st.tuples(st.just("start"), NUMBER, st.integers(1, 3)),
    st.tuples(st.just("grant"), NUMBER, st.sampled_from([7, 7, 7, 5, 0])),
    st.tuples(st.just("fill"), NUMBER, st.integers(0, 2)),
    st.tuples(st.just("fill"), NUMBER, st.integers(0, 2)),
    st.tuples(st.just("lose"), NUMBER, st.just(0)),
    st.tuples(st.just("finish"), NUMBER, st.booleans()),
    st.tuples(st.just("stop"), NUMBER, st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("tick"), st.integers(0, 40), st.just(0)),
    st.tuples(st.just("lost"), st.just(0), st.just(0)),
    st.tuples(st.just("usable"), st.booleans(), st.just(0)),
)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENT, min_size=20, max_size=60), group=st.integers(1, 4))
def test_any_order_of_events_leaves_nothing_behind(tmp_path_factory, events, group):
    stage = SendingStage(tmp_path_factory.mktemp("stage"), granules=64, group_bytes=group * 4096, window_bytes=3 * 4096)
    stage.way = JudgingWay(stage)
    try:
        slots = dict(enumerate(stage.reserve(list(range(CHUNKS)), 3 * 4096, layers=3)))
        for event in events:
            do(stage, slots, *event)
            check(stage, slots)
        stage.copies.tick(stage.now + 1000)
        stage.finish_all(TransferAborted(""))
        check(stage, slots)
        stage.assert_idle()
        assert sorted(number for number, _ in stage.over) == list(range(1, len(stage.over) + 1))
        said = {body.lease: body for body in stage.way.farewells}
        assert said.keys() == {offer.push for offer in stage.way.offers} - stage.way.lost, "whoever was asked is told"
        for number, is_complete in stage.over:
            assert said.get(number) != Release(number, not is_complete)
        stage.store.let_go(stage.store.unfinished(slots.values()))
        stage.free_what_is_sealed()
    finally:
        stage.close()


def do(stage, slots, verb, one, two):
    """One event; those that make no sense now do nothing."""
    pushes = stage.copies.of(stage.way)
    match verb:
        case "start":
            stage.start(list(range(one, min(CHUNKS, one + two))), transfer=f"{TRANSFER}-{one % 2}")
        case "grant" if pushes:
            push = pushes[one % len(pushes)]
            for offer in stage.way.offers:
                if offer.push == push.number and push.state == "queued":
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
            stage.way.lost |= {push.number for push in pushes}
            stage.copies.lost(stage.way)
        case "usable":
            stage.way.is_usable = one
            if one:
                stage.copies.ready(stage.way)
                stage.copies.pump()


def check(stage, slots):
    """The memory that a write reads is as it was, and the window is respected."""
    in_between(stage)
    assert sum(job.nbytes for job in stage.way.jobs) < 4 * 3 * 4096 + 3 * 6 * 4096
    assert stage.copies.queue(stage.way).in_flight == sum(job.nbytes for job in stage.way.jobs)
    pushes = {push.number: push for push in stage.copies.of(stage.way)}
    for job in stage.way.jobs:
        chunks = {item.remote.offset: item.chunk for item in pushes[job.push].items}
        for one in job.slices:
            chunk = chunks[one.offset]
            assert stage.store.at(chunk.slot) is chunk, "given away while it is read"
    for push in pushes.values():
        assert push.unfilled_bytes == unfilled_bytes(push) or push.state != "running"
    has_room = stage.has_room and stage.way.is_usable
    assert not any(is_due(stage, push) for push in pushes.values()) or not has_room, "filled, and never sent"


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

    def __init__(self, stage):
        super().__init__(over=stage.way.told_over)
        self.stage, self.max_inflight_bytes = stage, stage.window_bytes
        self.lost = set()  # pushes under way when it was gone: there was nobody to tell

    def store(self, job):
        super().store(job)
        pushes = {push.number: push for push in self.stage.copies.of(self)}
        chosen = pushes.pop(job.number)
        waiting = [push for push in pushes.values() if is_due(self.stage, push)]
        ranks = [(unfilled_bytes(push), push.number) for push in waiting]
        assert (unfilled_bytes(chosen), chosen.number) <= min(ranks, default=(1 << 60, 0))
