"""What rests on blocks that were not loaded. The rest of `Trust` is proven by the oracle, with vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdx.engine.trust import NEVER, Trust


class Tracked(SimpleNamespace):
    """A request that holds these blocks."""

    def __init__(self, number: int, block_ids: list[int]) -> None:
        super().__init__(request=SimpleNamespace(request_id=str(number)), block_ids=block_ids, doubt=0)

    def __eq__(self, other: object) -> bool:
        raise AssertionError("one request is compared with another: with many, that is most of a step")


def test_all_that_share_what_was_computed_from_failed_blocks_are_spoiled_each_looked_at_by_itself() -> None:
    requests: list[Any] = [Tracked(number, [10 * number, 10 * number + 1]) for number in range(40)]
    chain = [Tracked(40 + at, [390 - at, 389 - at]) for at in range(3)]  # each is found when the one before it was
    failed, blocks = Trust(16).failed({0, 100, 390}, [*reversed(chain), *requests])
    assert {each.request.request_id for each in failed} == {"0", "10", "39", "40", "41", "42"}
    assert blocks == {0, 1, 100, 101, 387, 388, 389, 390, 391}
    assert all(each.doubt == NEVER for each in failed)
