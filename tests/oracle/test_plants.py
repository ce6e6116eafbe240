"""The storm finds the faults that PDX had, and one of each kind of cache group that it could have: each is planted, and
the first wrong token ends the storm."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from connector_storm import REQUESTS, Event, Storm, storm_bed
from exact_engine import Engine, PdxConnector

from pdx.engine import worker
from pdx.engine.plan import SavePlan
from pdx.engine.request import NULL_BLOCK, SlotGrant, TrackedRequest
from pdx.engine.trust import Trust
from pdx.memory.layout import KvLayout
from pdx.memory.rules import Rule
from pdx.vllm import identity
from pdx.vllm.content import Content

MAX_BEDS = 10  # the first is mostly enough
EVENTS = 300

Plant = Callable[[pytest.MonkeyPatch], None]


def failures_untold(patch: pytest.MonkeyPatch) -> None:
    """A load that has failed counts as loaded."""
    patch.setattr(PdxConnector, "get_block_ids_with_load_errors", lambda self: set())


def trust_in_others(patch: pytest.MonkeyPatch) -> None:
    """What another connector has promised is taken for computed."""
    patch.setattr(Trust, "scheduled", lambda self, tracked, step, number: None)
    patch.setattr(Trust, "failed", lambda self, blocks, requests: ([], set()))


def names_of_inputs(patch: pytest.MonkeyPatch) -> None:
    """Adapters and pictures are what vLLM calls them."""
    patch.setattr(Content, "name_inputs", lambda self, request, is_new: None)


def names_of_weights(patch: pytest.MonkeyPatch) -> None:
    """A model is its configuration and a branch."""
    patch.setattr(identity, "_weights", lambda model, load_format: "org/model@main")


def a_window_is_short(patch: pytest.MonkeyPatch) -> None:
    """Chunks of a window have one block too few, the first."""
    right = KvLayout.blocks_of

    def short(self: KvLayout, chunk: int, num_tokens: int) -> tuple[int, int]:
        first, end = right(self, chunk, num_tokens)
        return first + (self.kind == "window" and end > first + 1), end

    patch.setattr(KvLayout, "blocks_of", short)


def a_part_is_short(patch: pytest.MonkeyPatch) -> None:
    """Chunked local attention looks back to one chunk too few."""
    right = KvLayout.rule

    def short(self: KvLayout, tail_tokens: int = 0) -> Rule:
        rule = right(self, tail_tokens)
        return Rule(period=rule.period - 1) if rule.period else rule

    patch.setattr(KvLayout, "rule", short)


def a_state_is_old(patch: pytest.MonkeyPatch) -> None:
    """A state is saved as it was a step before."""
    right = TrackedRequest.plan_save

    def old(
        self: TrackedRequest, computed: int, end: int, step_end: int | None = None
    ) -> tuple[SavePlan | None, list[SlotGrant]]:
        save, lost = right(self, computed, end, step_end)
        for pages in save.pages if save is not None else ():
            if self._groups[pages.group].kind == "state":
                table = self.tables[pages.group]
                before = [block for block in table[: table.index(pages.block_ids[0])] if block != NULL_BLOCK]
                pages.block_ids[:] = before[-1:] or pages.block_ids
        return save, lost

    patch.setattr(TrackedRequest, "plan_save", old)


def heads_are_swapped(patch: pytest.MonkeyPatch) -> None:
    """A rank with several shards takes the last for the first."""
    right = worker._heads  # noqa: SLF001
    patch.setattr(worker, "_heads", lambda tensor, part, count, layout: right(tensor, count - 1 - part, count, layout))


@pytest.mark.parametrize(
    ("plant", "mode", "trouble", "kind"),
    [
        pytest.param(failures_untold, "async", ["lose"], "full", id="a load that failed is not told"),
        pytest.param(trust_in_others, "beside", [], "full", id="another connector breaks its promise"),
        pytest.param(names_of_inputs, "content", ["retrain"], "full", id="adapters and pictures have names"),
        pytest.param(names_of_weights, "content", [], "full", id="weights have a name"),
        pytest.param(a_window_is_short, "sync", [], "window", id="a block too few of a window"),
        pytest.param(a_part_is_short, "sync", [], "local", id="a chunk too few of chunked local attention"),
        pytest.param(a_state_is_old, "sync", [], "state", id="a state that is a step old"),
        pytest.param(heads_are_swapped, "ranks", [], "heads", id="heads in the place of others"),
    ],
)
def test_the_storm_finds(
    plant: Plant, mode: str, trouble: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    rng, kinds = random.Random(7), [*REQUESTS, *trouble]
    for bed in range(MAX_BEDS):  # some faults show themselves once in the life of an engine
        with storm_bed(mode, tmp_path, kind, address=f"ipc://{tmp_path}/{bed}.sock") as (engines, _):
            said = said_by_storm(engines, [Event.drawn(rng, kinds, 3) for _ in range(EVENTS)])
        if said:
            assert re.search("prompt of .* token|torn reads", said), said
            return
    pytest.fail("no token was wrong")


def said_by_storm(engines: list[Engine], events: list[Event]) -> str:
    """What it says is wrong; empty: nothing."""
    storm = Storm("plant", engines)
    try:
        storm.play(events)
        storm.settle()
    except AssertionError as error:
        return str(error)
    return ""
