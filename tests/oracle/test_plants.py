"""The storm finds the faults that PDX had: each is planted again, and the first wrong token ends the storm."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connector_storm import REQUESTS, Event, Storm, storm_bed
from exact_engine import Engine, PdxConnector

from pdx.engine.trust import Trust
from pdx.vllm import identity
from pdx.vllm.content import Content

MAX_BEDS = 10  # the first is mostly enough
EVENTS = 300

Plant = Callable[[pytest.MonkeyPatch], None]


def loads_in_step(patch: pytest.MonkeyPatch) -> None:
    """vLLM is told that loads are over in the step that computes the rest, as it was before ADR 50."""

    def matched(self: PdxConnector, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens) and not self.scheduler.in_step

    patch.setattr(PdxConnector, "get_num_new_matched_tokens", matched)
    patch.setattr(PdxConnector, "wait_for_layer_load", lambda self, name: self.worker.wait_layer(name))


def trust_in_others(patch: pytest.MonkeyPatch) -> None:
    """What another connector has promised is taken for computed."""
    patch.setattr(Trust, "scheduled", lambda self, tracked, step, number: None)
    patch.setattr(Trust, "failed", lambda self, blocks, requests: ([], set()))


def names_of_inputs(patch: pytest.MonkeyPatch) -> None:
    """Adapters and pictures are what vLLM calls them."""
    patch.setattr(Content, "name", lambda self, request, is_new: None)


def names_of_weights(patch: pytest.MonkeyPatch) -> None:
    """A model is its configuration and a branch."""
    patch.setattr(identity, "_weights", lambda model, load_format: "org/model@main")


@pytest.mark.parametrize(
    ("plant", "mode", "trouble"),
    [
        pytest.param(loads_in_step, "async", ["lose"], id="a load in its step fails"),
        pytest.param(loads_in_step, "sync", ["lose"], id="and others find its blocks"),
        pytest.param(loads_in_step, "graphs", [], id="it fails because a graph calls no hooks"),
        pytest.param(trust_in_others, "beside", [], id="another connector breaks its promise"),
        pytest.param(names_of_inputs, "content", ["retrain"], id="adapters and pictures have names"),
        pytest.param(names_of_weights, "content", [], id="weights have a name"),
    ],
)
def test_the_storm_finds(
    plant: Plant, mode: str, trouble: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    rng, kinds = random.Random(7), [*REQUESTS, *trouble]
    for bed in range(MAX_BEDS):  # some faults show themselves once in the life of an engine
        with storm_bed(mode, tmp_path, address=f"ipc://{tmp_path}/{bed}.sock") as (engines, _):
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
