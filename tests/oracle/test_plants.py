"""The storm finds the faults that PDX had: each is planted again, and the first wrong token ends the storm."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from connector_storm import REQUESTS, Event, Storm, storm_bed
from exact_engine import Engine, PdxConnector

from pdx.engine.trust import Trust
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


@pytest.mark.parametrize(
    ("plant", "mode", "trouble"),
    [
        pytest.param(failures_untold, "async", ["lose"], id="a load that failed is not told"),
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
