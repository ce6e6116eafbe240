"""Pages that go to host memory by way of memory of the GPU: a kernel, then the copy engine.

Streams are LaggingStreams, the driver is the fake one, the node's arena is page-locked host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_bed import Bed
from toy_engine import CHUNK, PAGE_BYTES, tokens

from pdx.engine import staging
from pdx.engine.staging import Staging
from pdx.testing.waiting import wait_until


@pytest.mark.parametrize(("pages", "hooks"), [(1, True), (3, False), (7, True), (100_000, False)])
def test_whatever_fits_into_a_half_the_bytes_arrive(
    beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch, pages: int, hooks: bool
) -> None:
    """So many pages, layer by layer or all at once."""
    monkeypatch.setattr(staging, "STAGING_BYTES", 2 * pages * PAGE_BYTES)
    bed = beds(False)
    first, second = bed.engine(), bed.engine()
    first.skip_hooks = not hooks
    prompt = tokens(1, 3 * CHUNK + 3)
    first.finish(first.save(prompt, step=CHUNK + 3))
    bed.node.wait_sealed(3)
    assert second.load(prompt) == 3 * CHUNK
    bed.node.wait_at_rest()


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(1, 100))
@settings(max_examples=examples(200))
def test_no_part_is_taken_that_nobody_waited_for(sizes: list[int], most: int) -> None:
    """Where the copy engine does nothing by itself, each part is waited for before its bytes are written again."""
    busy: dict[int, tuple[int, int]] = {}

    class Emptied:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self, stream: Any) -> None:
            for number in [number for number in busy if number <= self.number]:  # copies end in order
                del busy[number]

    ring = Staging.__new__(Staging)
    ring._half_bytes, ring._at, ring._taken = 50, 0, deque()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging, "_MAX_UNDER_WAY", most)
        for number, nbytes in enumerate(sizes):
            start = ring._room(nbytes, None)
            assert 0 <= start <= start + nbytes <= 100
            assert not [part for part in busy.values() if part[0] < start + nbytes and start < part[1]]
            busy[number] = start, start + nbytes
            assert len(busy) <= most
            ring._taken.append((start, start + nbytes, Emptied(number)))


def test_a_part_is_filled_again_only_when_it_is_emptied(
    beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 2 * 4 * PAGE_BYTES)
    bed = beds(False)
    engine = bed.engine()
    prompt = tokens(4, 3 * CHUNK)
    streams = engine.streams
    with streams.held(streams.copying):
        request = engine.save(prompt)

        def launches() -> int:
            return len([entry for entry in bed.log if isinstance(entry, tuple)])

        wait_until(
            lambda: launches() >= 2 and streams.gathering.is_still and streams.compute().is_still,
            what="the ring is full",
        )
        assert launches() == 2
    engine.finish(request)
    bed.node.wait_sealed(3)
    assert bed.engine().load(prompt) == 3 * CHUNK


def test_without_room_for_it_kernels_write_to_host_memory(
    beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **settings: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bed = beds(False)
    with monkeypatch.context() as patched:
        patched.setattr(staging.torch, "empty", full)
        first = bed.engine()
    prompt = tokens(5, 2 * CHUNK)
    first.finish(first.save(prompt))
    bed.node.wait_sealed(2)
    assert bed.engine().load(prompt) == 2 * CHUNK
    wait_until(lambda: bed.node.degraded("staging_unavailable") == 1)
