"""A connector that follows the rules is right for every kind of cache group, and one that breaks any is found soon."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_storm import REQUESTS, Event, Storm, of_kind
from exact_engine import Engine, Shape, check_nothing_left, tokens
from exact_kinds import KINDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_connector import REFERENCE, STORE, ReferenceConnector, Slot, needed, written
from test_connector_storm import EXAMPLES, requests
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
each_kind = pytest.mark.parametrize("kind", KINDS)
HISTORY = 512


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines with the reference connector and a store that is theirs."""
    STORE.clear()
    made: list[Engine] = []

    def engine(kind: str, *, loads_in_step: bool = False, **shape: Any) -> Engine:
        extra = {"model": kind, "asynchronous": not loads_in_step, **shape.pop("extra", {})}
        name = f"{kind} {len(made)}"
        made.append(Engine(name, model, "", Shape(kind=kind, connector=REFERENCE, budget=128, extra=extra, **shape)))
        return made[-1]

    yield engine
    for each in made:
        each.run()
    check_nothing_left(made)
    STORE.clear()


def written_by(make: Callable[..., Engine], kind: str) -> list[int]:
    """The beginning of a prompt, which the store has; a step of its writer has ended where it ends."""
    history = tokens(HISTORY, kind)
    make(kind).ask("w", history + tokens(50, "w"), 2)
    return history


@each_kind
@both
def test_what_was_saved_is_found(make: Callable[..., Engine], kind: str, asynchronous: bool) -> None:
    history = written_by(make, kind)
    reader = make(kind, asynchronous=asynchronous)
    reader.ask("a", history + tokens(100, "a"), 12)
    assert reader.runner.computed == 100 + 12 - 1
    assert reader.faults.loads == 1
    reader.ask("b", history + tokens(100, "a") + tokens(30, "b"), 12)


@each_kind
@both
def test_a_whole_prompt_is_found_behind_which_one_token_is_left(
    make: Callable[..., Engine], kind: str, asynchronous: bool
) -> None:
    """As an engine that decodes finds it. It ends inside a block, but for one."""
    prefill, decode = make(kind), make(kind, asynchronous=asynchronous)
    for length in (20, 200, 256, 563):
        prompt, before = tokens(length, (kind, length)), decode.runner.computed
        prefill.ask(f"p {length}", prompt, 1)
        decode.ask(f"d {length}", prompt + prefill.outputs[f"p {length}"], 40)
        assert decode.runner.computed - before == 1 + 40 - 1


@each_kind
@both
def test_a_load_that_fails_is_computed(make: Callable[..., Engine], kind: str, asynchronous: bool) -> None:
    history = written_by(make, kind)
    reader = make(kind, asynchronous=asynchronous)
    reader.faults.lose(lambda page: page % 3 == 2, times=2)
    for name in "ab":
        reader.add(name, history + tokens(100, name), 12)
    reader.run()
    reader.check()
    assert not reader.faults.of_next_load()(2)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.state_block])
@both
def test_a_load_in_the_step_itself_does_for_all_but_states(
    make: Callable[..., Engine], kind: str, asynchronous: bool
) -> None:
    history = written_by(make, kind)
    reader = make(kind, asynchronous=asynchronous, loads_in_step=True)
    reader.ask("a", history + tokens(100, "a"), 12)
    assert reader.runner.computed == 100 + 12 - 1


# ---- storms -------------------------------------------------------------------------------------

_names = itertools.count()


@pytest.fixture(scope="module")
def engines(model: Path) -> dict[str, list[Engine]]:
    """Of each kind one of each scheduler, with little room for requests, and holes in the store."""
    return {kind: storm_engines(model, kind) for kind in KINDS}


def storm_engines(model: Path, kind: str, **extra: Any) -> list[Engine]:
    """On a store that they alone have. :param extra: settings of their connector."""
    common: dict[str, Any] = {
        "connector": REFERENCE,
        "blocks": 160,
        "budget": 160,
        "seqs": 6,
        "extra": {"model": f"{kind} {next(_names)}", "pages": 2000, "holes": 40, **extra},
    }
    shapes = [Shape(**common), Shape(**common, asynchronous=True), Shape(**common, threshold=48)]
    return [Engine(f"{kind} {number}", model, "", of_kind(shape, kind)) for number, shape in enumerate(shapes)]


@each_kind
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(played=st.lists(requests(("abort", "lose", "reset")), min_size=1, max_size=20))
def test_every_token_of_a_storm_is_right(engines: dict[str, list[Engine]], kind: str, played: list[Event]) -> None:
    storm = Storm(f"reference-{next(_names)}", engines[kind])
    storm.play(played)
    storm.settle()


# ---- plants -------------------------------------------------------------------------------------


def needs_less(of: type, slots: int) -> Callable[..., Iterator[Slot]]:
    """Of a sort of group, so many slots fewer at their beginning."""

    def slots_of(number: int, spec: Any, end: int, computed: int = 0) -> Iterator[Slot]:
        found = list(needed(number, spec, end, computed))
        yield from found[slots:] if isinstance(spec, of) else found

    return slots_of


def state_of_before(number: int, spec: Any, start: int, end: int, length: int) -> Iterator[Slot]:
    """A state is named by the tokens that came with the step after its own."""
    for slot in written(number, spec, start, end, length):
        yield slot._replace(number=max(0, slot.number - 1)) if isinstance(spec, MambaSpec) else slot


def whole_prompt(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
    """The last token counts as found, too, where the prompt is known."""
    names, end = self._names_of(request), request.num_tokens
    self._lengths[request.request_id] = request.num_prompt_tokens
    if end > num_computed_tokens and all(
        (self._model, each.group, names[each.end]) in STORE for each in self._needed(end, 0)
    ):
        self._hits[request.request_id] = end
        return end - num_computed_tokens, True
    return found_before(self, request, num_computed_tokens)


found_before = ReferenceConnector.get_num_new_matched_tokens


def of_blocks(self: Any, finished: set[str]) -> Any:
    """That a load has failed is told of its blocks."""
    failed = [block for blocks in self._failed.values() for block in blocks]
    self.get_block_ids_with_load_errors = lambda: set(failed)
    return untold(self, finished)


def untold(self: Any, finished: set[str]) -> Any:
    """That a load has failed."""
    results = results_before(self, finished)
    results.failed_recving = set()
    return results


results_before = ReferenceConnector.get_transfer_results


FIND, RESULTS = "ReferenceConnector.get_num_new_matched_tokens", "ReferenceConnector.get_transfer_results"
PLANTS = [
    ("a window short of a block", "needed", needs_less(SlidingWindowSpec, 1), "window windows mixed unequal"),
    ("no window", "needed", needs_less(SlidingWindowSpec, 1000), "window windows mixed unequal"),
    ("a local part short of a block", "needed", needs_less(ChunkedLocalAttentionSpec, 1), "local"),
    ("no state", "needed", needs_less(MambaSpec, 1), "state mixed units"),
    ("the state of the step before", "written", state_of_before, "state mixed units"),
    ("the last token is loaded", FIND, whole_prompt, "state mixed units"),
    ("blocks of a failed load are told", RESULTS, of_blocks, "windows"),
    ("a failed load is not told", RESULTS, untold, "window local state mixed"),
]


@pytest.mark.parametrize(
    ("rule", "plant", "kind"),
    [pytest.param(*found, kind, id=f"{name}: {kind}") for name, *found, kinds in PLANTS for kind in kinds.split()],
)
def test_a_broken_rule_is_found(model: Path, monkeypatch: pytest.MonkeyPatch, rule: str, plant: Any, kind: str) -> None:
    monkeypatch.setattr(f"reference_connector.{rule}", plant)
    is_wrong_soon(storm_engines(model, kind), "lose")


@pytest.mark.parametrize("kind", ["state", "mixed", "units"])
def test_states_that_are_loaded_in_a_step_are_too_late(model: Path, kind: str) -> None:
    """vLLM moves a state to the slot of the step's end before it binds the connector's metadata."""
    is_wrong_soon(storm_engines(model, kind, asynchronous=False))


def is_wrong_soon(engines: list[Engine], *trouble: str) -> None:
    """A token, or a page that is read, in a storm."""
    rng = random.Random(7)
    events = [Event.drawn(rng, [*REQUESTS, *trouble], 3) for _ in range(300)]
    with pytest.raises(AssertionError, match=r"prompt of .* token|torn reads"):
        Storm("plant", engines).play(events)
