"""The copier of GPU engines over several cache groups: each group has pages, layers and slots of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import FakeCuda
from group_pages import GENERATION, TwoGroups
from node_harness import MIB
from stream_bed import LaggingStreams, use_interpreted

from pdx.engine.gpu_copier import GpuCopier
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.memory.share import Share
from pdx.testing.waiting import wait_until


@pytest.fixture
def stage(fake: FakeCuda, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GpuCopier, Arena, TwoGroups]]:
    """A copier on streams that lag, an arena in page-locked host memory, and pages."""
    use_interpreted(monkeypatch)
    pages, counts = TwoGroups("cpu"), []
    with contextlib.closing(LaggingStreams()) as streams, Arena.create(place / "arena", MIB) as arena:
        for slot in pages.slots:
            arena.generations[slot.offset // GRANULE_BYTES] = GENERATION
        copier = GpuCopier(pages.maps(), Share(0, 1), streams, SimpleNamespace(count=counts.append))
        copier.use(arena)
        yield copier, arena, pages
        copier.close()
        copier.use(None)
        assert not counts


def test_each_group_is_gathered_from_its_layers_and_scattered_to_them(
    stage: tuple[GpuCopier, Arena, TwoGroups],
) -> None:
    copier, arena, pages = stage
    pages.compute()
    wait_until(lambda: copier.begin(arena, pages.plans) == pages.plans, what="the arena is page-locked")
    for group, layers in enumerate(pages.layers):
        assert all(copier.gather(group, range(at, at + 1)) for at in range(len(layers)))
    ended = threading.Event()
    copier.after_copies(ended.set)
    copier.end()
    assert ended.wait(20)
    for group, slot in enumerate(pages.slots):
        assert bytes(arena.data[slot.offset : slot.offset + slot.nbytes]) == pages.taken(group)
    before = pages.raw.clone()
    pages.raw.zero_()
    scatter = copier.loading(arena)
    assert scatter is not None
    for group, plan in enumerate(pages.load().pages_of(Share(0, 1))):
        assert copier.load(scatter, [plan], range(len(pages.layers[group]))) == []
    scatter.close()
    assert torch.equal(pages.raw, pages.of_plans(before))


def test_a_step_with_pages_of_one_group_leaves_the_other_alone(stage: tuple[GpuCopier, Arena, TwoGroups]) -> None:
    copier, arena, pages = stage
    pages.compute()
    wait_until(lambda: copier.begin(arena, pages.plans[1:]) == pages.plans[1:], what="the arena is page-locked")
    assert copier.gather(0, range(3))
    assert copier.gather(1, range(2))
    ended = threading.Event()
    copier.after_copies(ended.set)
    copier.end()
    assert ended.wait(20)
    attention, state = pages.slots
    assert not any(arena.data[attention.offset : attention.offset + attention.nbytes])
    assert bytes(arena.data[state.offset : state.offset + state.nbytes]) == pages.taken(1)
