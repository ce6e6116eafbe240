"""Whose turn is near, whatever way a request comes to it."""

from __future__ import annotations

from typing import Any

import pytest
from toy_engine import Request, layout

from pdx.engine.request import Asked, Step, TrackedRequest, parse_params
from pdx.engine.step import StepLimits
from pdx.engine.turns import Turns

DECODE = {"do_remote_prefill": True, "transfer_id": "t" * 20}
PREFILL = {"do_remote_decode": True, "transfer_id": "t" * 20}
LIMITS = StepLimits(tokens=100, requests=8)


def tracked(name: str, num_tokens: int, params: dict[str, Any] | None = None) -> TrackedRequest:
    request = Request(name, list(range(num_tokens)), params)
    return TrackedRequest(request, layout(), parse_params(params), layout().fingerprint())


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
    waiting[0].node.hit_tokens = 140
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
