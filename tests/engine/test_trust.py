"""What rests on blocks that were not loaded. The rest of `Trust` is proven by the oracle, with vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdx.engine.step import StepRequest
from pdx.engine.trust import NEVER, Trust

BLOCK = 16  # tokens


class Tracked(SimpleNamespace):
    """A request that holds these blocks."""

    def __init__(self, number: int, block_ids: list[int]) -> None:
        super().__init__(request=SimpleNamespace(request_id=str(number)), block_ids=block_ids, doubt=0, vouched=0)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("one request is compared with another: with many, that is most of a step")


def test_all_that_share_what_was_computed_from_failed_blocks_are_spoiled_each_looked_at_by_itself() -> None:
    requests: list[Any] = [Tracked(number, [10 * number, 10 * number + 1]) for number in range(40)]
    chain = [Tracked(40 + at, [390 - at, 389 - at]) for at in range(3)]  # each is found when the one before it was
    failed, blocks = Trust(BLOCK).failed({0, 100, 390}, [*reversed(chain), *requests])
    assert {each.request.request_id for each in failed} == {"0", "10", "39", "40", "41", "42"}
    assert blocks == {0, 1, 100, 101, 387, 388, 389, 390, 391}
    assert all(each.doubt == NEVER for each in failed)


def steps(trust: Trust, tracked: Any, number: int, *, computed: int, found: int) -> int:
    """It computes the rest of its blocks in one step, behind so many of them of which it found `found` in the engine's
    own cache: its doubt."""
    tracked.vouched = found * BLOCK
    scheduled = (len(tracked.block_ids) - computed) * BLOCK
    step = StepRequest("", computed * BLOCK, scheduled, 1 << 20, [tracked.block_ids])
    trust.scheduled(tracked, step, number)
    return tracked.doubt  # type: ignore[no-any-return]


def test_what_is_computed_from_promised_blocks_is_doubted_until_the_outcome_is_known() -> None:
    trust = Trust(BLOCK)
    assert steps(trust, Tracked(0, [0, 1, 2]), 1, computed=1, found=0) == 1
    assert steps(trust, Tracked(1, [0, 1, 2, 3]), 2, computed=3, found=3) == 1, "found, and only as good as its writer"
    assert steps(trust, Tracked(2, [7]), 2, computed=0, found=0) == 0
    assert steps(trust, Tracked(3, [7, 1, 4]), 2, computed=2, found=2) == 1, "what the writer has computed itself, too"
    assert trust.is_waiting
    assert sorted(trust.heard(1)) == ["0", "1", "3"]
    assert not trust.is_waiting
    assert steps(trust, Tracked(4, [0, 1, 2, 5]), 2, computed=3, found=3) == 0


def test_a_block_that_failed_is_as_good_as_any_once_it_is_written_anew() -> None:
    trust = Trust(BLOCK)
    trust.failed({0}, [Tracked(0, [0, 1])])  # type: ignore[list-item]
    trust.heard(5)
    assert steps(trust, Tracked(1, [0, 1, 2]), 6, computed=2, found=2) == NEVER
    assert steps(trust, Tracked(2, [0, 1]), 6, computed=0, found=0) == 0
    assert steps(trust, Tracked(3, [0, 1, 3]), 7, computed=2, found=2) == 0


def test_of_a_request_that_is_over_nothing_is_heard() -> None:
    trust, tracked = Trust(BLOCK), Tracked(0, [0, 1])
    assert steps(trust, tracked, 1, computed=1, found=0) == 1
    trust.forget(tracked)  # type: ignore[arg-type]
    assert trust.heard(1) == []
