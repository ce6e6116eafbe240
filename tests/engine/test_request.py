"""Parts of the scheduler half by themselves: states and keys of a request, plans, whose turn is near, trust."""

from __future__ import annotations

import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from toy_engine import BLOCK, CHUNK, Request, decode_of, layout, prefill_of

from pdx.engine.drafts import Drafts
from pdx.engine.params import parse_params
from pdx.engine.plan import NO_EPOCH, LoadPlan, PagesPlan, SavePlan
from pdx.engine.request import LOADING, TRANSITIONS, Asked, Hits, SlotGrant, State, Step, TrackedRequest
from pdx.engine.request_keys import RequestKeys
from pdx.engine.step import StepLimits, StepRequest
from pdx.engine.trust import NEVER, Trust
from pdx.engine.turns import Turns
from pdx.memory.layout import CacheGroups
from pdx.memory.share import Share
from pdx.memory.slot import Slot

QUEUED = {State.WAITING, State.DECIDED}


@pytest.mark.parametrize("state", State)
def test_every_life_can_go_on(state: State) -> None:
    after = {step: TRANSITIONS[state, step] for step in Step if (state, step) in TRANSITIONS}
    assert after, "it leads somewhere"
    if state is State.LEFT_OUT:
        assert set(after.values()) == {state}
        return
    assert (Step.LOADED in after) == (state in LOADING), "a load that was begun ends once"
    assert (Step.PREEMPT in after) == (state not in (*QUEUED, *LOADING)), "blocks are not taken from a load"
    assert after[Step.VOID] in (State.WAITING, State.VOID, State.LOADING_VOID), "nothing old is saved"
    assert after[Step.VOID] in QUEUED or TRANSITIONS.get((after[Step.VOID], Step.RUN)) in (State.VOID, None)


def test_a_step_that_is_not_in_the_table_is_refused_and_requests_are_counted_by_state() -> None:
    counts = Counter[State]()
    request, other = (
        TrackedRequest(Request(name, [1]), CacheGroups.of(layout()), parse_params(None), b"", counts=counts)
        for name in ("first", "second")
    )
    for step in (Step.DECIDE, Step.LOAD, Step.VOID, Step.LOADED):
        request.step(step)
    assert +counts == {State.VOID: 1, State.WAITING: 1}
    with pytest.raises(KeyError):
        request.step(Step.LOADED)
    request.step(Step.PREEMPT)
    for each in (request, other):
        each.end()
    assert not +counts


def test_a_blocks_name_is_the_end_of_its_hash() -> None:
    """So that others who read vLLM's events know them."""
    request = cast(Any, SimpleNamespace(block_hashes=[bytes(range(32)), b"short"]))
    names = RequestKeys(request, CacheGroups.of(layout()), b"").block_names(0, 2)
    assert (names[:16], names[16:]) == (bytes(range(16, 32)), b"\0" * 11 + b"short")
    assert int.from_bytes(names[8:16], "big") == int.from_bytes(bytes(range(32)), "big") & (1 << 64) - 1


# ---- what the workers are told: whole on the other side, and few objects ------------------------


def plan(num_shards: int, num_chunks: int) -> list[PagesPlan]:
    return [
        PagesPlan(
            [Slot(4096 * (chunk * num_shards + shard), 4096 + chunk, (1 << 62) + shard) for shard in range(num_shards)],
            num_blocks=16,
            first=chunk % 3,
            block_ids=list(range(100 * chunk, 100 * chunk + 16 - chunk % 3)),
        )
        for chunk in range(num_chunks)
    ]


def test_each_shard_reads_its_part_of_a_load() -> None:
    pages = plan(num_shards=3, num_chunks=5)
    load = pickle.loads(pickle.dumps(LoadPlan.of("r", "transfer", pages, 7)))
    assert (load.request_id, load.transfer, load.num_chunks, load.epoch) == ("r", "transfer", 5, 7)
    assert load.block_ids == [block for each in pages for block in each.block_ids]
    for share in (*(Share(shard, 1) for shard in range(3)), Share(0, 3), Share(1, 2)):
        own = load.pages_of(share)
        assert [each.slots for each in own] == [each.slots[share.first :][: share.count] for each in pages]
        assert [each.slots_of(share) for each in own] == [each.slots_of(share) for each in pages]
        assert [(each.num_blocks, each.first, each.block_ids, each.completes) for each in own] == [
            (each.num_blocks, each.first, each.block_ids, each.completes) for each in pages
        ]


def test_a_load_of_no_chunk_is_empty() -> None:
    load = LoadPlan.of("r", None, [])
    assert (load.num_chunks, load.block_ids, load.pages_of(Share(1, 2))) == (0, [], [])


@pytest.mark.parametrize(("kind", "found"), [("full", 0), ("full", 3 * BLOCK), ("window", 5 * BLOCK)])
def test_a_load_of_what_is_not_there_fails_in_each_of_its_blocks(kind: str, found: int) -> None:
    """Of a model with windows, chunks that were found for more tokens are not those that fewer need."""
    shape = msgspec.structs.replace(layout(), kind=kind, window=BLOCK if kind == "window" else 0)
    request = TrackedRequest(Request("r", list(range(99))), CacheGroups.of(shape), parse_params(None), b"")
    request.take_blocks([[0, 2, 3, 4, 5, 6]])
    request.local_tokens, request.node.hits, request.node.epoch = BLOCK, Hits(tokens=found), 7
    load = request.plan_load(3 * BLOCK)
    assert (load.epoch, load.block_ids) == (NO_EPOCH, [2, 3, 4])


# ---- whose turn is near, whatever way a request comes to it -----------------------------------

DECODE, PREFILL = decode_of("t" * 20), prefill_of("t" * 20)
LIMITS = StepLimits(tokens=100, requests=8)


def tracked(name: str, num_tokens: int, params: dict[str, Any] | None = None) -> TrackedRequest:
    request = Request(name, list(range(num_tokens)), params)
    return TrackedRequest(request, CacheGroups.of(layout()), parse_params(params), layout().fingerprint())


def queue(*sizes: int, params: dict[str, Any] | None = None) -> list[TrackedRequest]:
    return [tracked(f"{number}", size, params) for number, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "num_running", "limits", "near"),
    [
        ([60] * 9, 0, LIMITS, 4),  # 180 tokens are less than two steps have
        ([100] * 9, 0, LIMITS, 2),  # and 200 are all of them
        ([10] * 20, 0, LIMITS, 8),  # places
        ([10] * 20, 5, LIMITS, 3),
        ([10] * 20, 8, LIMITS, 1),  # the next one, whenever that is
        ([1000] * 3, 0, LIMITS, 1),
        ([1000] * 9, 0, StepLimits(100, 8, request_tokens=40), 3),  # of each, 80 tokens in two steps
    ],
)
def test_as_many_are_near_as_two_steps_take(sizes: list[int], num_running: int, limits: StepLimits, near: int) -> None:
    """When they arrive, when the engine comes to them, and when those before them have gone."""
    turns, waiting = Turns(limits), queue(*sizes)
    assert [turns.add(each, num_running) for each in waiting] == [number < near for number in range(len(sizes))]
    for _ in range(2):
        turns.new_walk()
        reached = []
        for each in waiting:
            reached.append(turns.is_near(each, num_running))
            turns.pass_by(each)
        assert reached == [number < near for number in range(len(sizes))]
    assert list(turns.next_ones(num_running)) == [], "nothing has moved"
    turns.remove(waiting[0])
    assert list(turns.next_ones(num_running)) == waiting[1 : near + 1]
    assert list(turns.next_ones(num_running)) == []


def test_what_has_asked_or_is_decided_is_not_asked_ahead_again() -> None:
    turns, waiting = Turns(LIMITS), queue(*[10] * 5)
    for each in waiting:
        turns.add(each, 0)
    waiting[1].node.asked = Asked(1, 0.0, 0)
    waiting[2].step(Step.DECIDE)
    turns.remove(waiting[0])
    turns.remove(waiting[0])
    assert list(turns.next_ones(0)) == waiting[3:]
    assert len(turns) == 4


def test_who_has_what_it_needs_takes_only_what_is_left_to_compute() -> None:
    turns, waiting = Turns(LIMITS), queue(150, 150, 150)
    waiting[0].step(Step.DECIDE)
    waiting[0].node.hits = Hits(tokens=140)
    near = []
    for each in waiting:
        near.append(turns.is_near(each, 0))
        turns.pass_by(each)
    assert near == [True, True, True]
    assert not turns.is_near(tracked("last", 1), 0)


@pytest.mark.parametrize("kept", ["a transfer", "room", "a peer"])
def test_nobody_stands_behind_those_that_wait_for_something_else_than_their_turn(kept: str) -> None:
    """A hundred decode legs wait for their prefill, a hundred prefill legs for room: neither holds any."""
    turns = Turns(LIMITS)
    waiting = queue(*[500] * 100, params=DECODE if kept == "a transfer" else PREFILL)
    for each in waiting:
        turns.add(each, 0)
        each.wait_until = 1.0 if kept == "a peer" else None
        each.room_until = 1.0 if kept == "room" else None
    turns.new_walk()
    for each in waiting:
        assert turns.is_near(each, 0)
        turns.pass_by(each)
    last = tracked("last", 500)
    assert turns.is_near(last, 0)
    turns.add(last, 0)
    turns.remove(waiting[0])
    assert list(turns.next_ones(0)) == [last]


def test_those_that_wait_for_something_else_stand_behind_nobody() -> None:
    turns, [leg] = Turns(LIMITS), queue(500, params=DECODE)
    for each in queue(*[100] * 9):
        turns.pass_by(each)
    assert turns.is_near(leg, 0)
    leg.step(Step.DECIDE)
    assert not turns.is_near(leg, 0), "it waits for its turn now"


def test_those_that_arrive_stand_behind_those_that_are_there_and_wait_for_their_turn() -> None:
    turns = Turns(LIMITS)
    for each in queue(*[500] * 4, params=DECODE):
        turns.add(each, 0)
    first, second = queue(500, 500)
    assert turns.add(first, 0), "decode legs take nothing of its steps"
    assert not turns.add(second, 0)
    turns.remove(first)
    turns.remove(second)
    assert turns.add(tracked("c", 500), 0)


def test_decode_legs_ask_when_they_arrive_as_many_as_the_engine_has_places_for() -> None:
    """Their nodes then hear of them before the transfer is over, and the load may begin."""
    turns = Turns(LIMITS)
    assert [turns.add(each, 8) for each in queue(*[500] * 20, params=DECODE)] == [number < 8 for number in range(20)]


@pytest.mark.parametrize(("num_layers", "num_lost"), [(1, 3), (2, 8)])
def test_room_for_doubted_drafts_is_given_up_and_no_grant_is_compared_with_others(
    num_layers: int, num_lost: int
) -> None:
    """Of one layer, what follows is right. A prompt has thousands of grants, and the scheduler waits."""
    compared = []

    class Grant(SlotGrant):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

    groups = CacheGroups.of(layout(num_layers=num_layers, drafter="d"))
    drafts = Drafts(groups, cast(Any, None))
    drafts.track(request := tracked("r", 8 * CHUNK), b"")
    request.take_blocks([list(range(8 * CHUNK // BLOCK))])
    assert request.drafts is not None
    grants = [
        Grant(0, [Slot(4096 * at, 4096, 2)], 4 * at, 4 * at + 4, CHUNK * at, CHUNK * at + CHUNK) for at in range(8)
    ]
    request.drafts.node.grants = list(grants)
    _, lost = drafts.allocated(request, 3 * CHUNK, None)
    assert lost == grants[:num_lost]
    assert request.drafts.node.grants == grants[num_lost:]
    assert compared == []


# ---- what rests on blocks that were not loaded; the rest is proven by the oracle ---------------

TRUST_BLOCK = 16  # tokens


class Holder(SimpleNamespace):
    """A request that holds these blocks."""

    def __init__(self, number: int, block_ids: list[int]) -> None:
        super().__init__(request=SimpleNamespace(request_id=str(number)), block_ids=block_ids, vouched=0)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("one request is compared with another: with many, that is most of a step")


def test_all_that_share_what_was_computed_from_failed_blocks_are_spoiled_each_looked_at_by_itself() -> None:
    requests: list[Any] = [Holder(number, [10 * number, 10 * number + 1]) for number in range(40)]
    chain = [Holder(40 + at, [390 - at, 389 - at]) for at in range(3)]  # each is found when the one before it was
    failed, blocks = Trust(TRUST_BLOCK).failed({0, 100, 390}, [*reversed(chain), *requests])
    assert {each.request.request_id for each in failed} == {"0", "10", "39", "40", "41", "42"}
    assert blocks == {0, 1, 100, 101, 387, 388, 389, 390, 391}


def steps(trust: Trust, tracked: Any, number: int, *, computed: int, found: int) -> int:
    """It computes the rest of its blocks in one step, behind so many of them of which it found `found` in the engine's
    own cache: its doubt."""
    tracked.vouched = found * TRUST_BLOCK
    scheduled = (len(tracked.block_ids) - computed) * TRUST_BLOCK
    step = StepRequest("", computed * TRUST_BLOCK, scheduled, 1 << 20, [tracked.block_ids])
    return trust.scheduled(tracked, step, number)


def test_what_is_computed_from_promised_blocks_is_doubted_until_the_outcome_is_known() -> None:
    trust = Trust(TRUST_BLOCK)
    assert steps(trust, Holder(0, [0, 1, 2]), 1, computed=1, found=0) == 1
    assert steps(trust, Holder(1, [0, 1, 2, 3]), 2, computed=3, found=3) == 1, "found, and only as good as its writer"
    assert steps(trust, Holder(2, [7]), 2, computed=0, found=0) == 0
    assert steps(trust, Holder(3, [7, 1, 4]), 2, computed=2, found=2) == 1, "what the writer has computed itself, too"
    assert trust.is_waiting
    assert sorted(trust.heard(1)) == ["0", "1", "3"]
    assert not trust.is_waiting
    assert steps(trust, Holder(4, [0, 1, 2, 5]), 2, computed=3, found=3) == 0


def test_a_block_that_failed_is_as_good_as_any_once_it_is_written_anew() -> None:
    trust = Trust(TRUST_BLOCK)
    trust.failed({0}, [Holder(0, [0, 1])])  # type: ignore[list-item]
    trust.heard(5)
    assert steps(trust, Holder(1, [0, 1, 2]), 6, computed=2, found=2) == NEVER
    assert steps(trust, Holder(2, [0, 1]), 6, computed=0, found=0) == 0
    assert steps(trust, Holder(3, [0, 1, 3]), 7, computed=2, found=2) == 0


def test_of_a_request_that_is_over_nothing_is_heard() -> None:
    trust, tracked = Trust(TRUST_BLOCK), Holder(0, [0, 1])
    assert steps(trust, tracked, 1, computed=1, found=0) == 1
    trust.forget(tracked)  # type: ignore[arg-type]
    assert trust.heard(1) == []


# ---- states: a block has one of them, which the next step in that block replaces -----------------


def keeping(num_tokens: int, end_token: int, params: dict[str, Any] | None = None) -> TrackedRequest:
    """A request of a model with states, which has room for that after `end_token` tokens."""
    full = layout()
    state = msgspec.structs.replace(full, kind="state", layers=(9,))
    request = Request("r", list(range(num_tokens)), params)
    made = TrackedRequest(request, CacheGroups.of([full, state]), parse_params(params), b"")
    made.take_blocks([list(range(1, 90)), list(range(101, 190))])
    block = full.num_blocks(end_token) - 1
    made.node.grants.append(SlotGrant(1, [Slot(0, 64, 1)], block, block + 1, block * full.block_tokens, end_token))
    return made


def saved(step: tuple[SavePlan | None, list[SlotGrant]]) -> tuple[int, int]:
    """Pages that are saved, and grants that are given up."""
    save, lost = step
    return len(save.pages) if save is not None else 0, len(lost)


def test_a_step_with_drafts_leaves_no_state_where_the_known_tokens_end() -> None:
    """It ran on behind them: what is in that block is from before the step."""
    chunk = layout().chunk_tokens
    request = keeping(chunk - 8, chunk)
    assert saved(request.plan_save(chunk - 1, chunk, step_end=chunk + 3)) == (0, 1)


def test_the_state_of_a_prompts_end_is_there_in_the_step_that_ends_it_alone() -> None:
    tokens = layout().chunk_tokens + 5
    params = prefill_of("t" * 32)
    assert saved(keeping(tokens, tokens, params).plan_save(0, tokens, step_end=tokens)) == (1, 0)
    assert saved(keeping(tokens, tokens, params).plan_save(tokens, tokens + 1, step_end=tokens + 1)) == (0, 1)
    assert saved(keeping(tokens, tokens, params).plan_save(tokens, tokens, step_end=tokens + 1)) == (0, 1)
