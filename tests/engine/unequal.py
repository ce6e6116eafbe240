"""What holds between two engines of other sizes that cut a model's chunks alike, whatever the sizes are of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from node_harness import NodeProcess, NodeThread
from test_two_nodes import DECODE, LENGTH, PREFILL
from toy_engine import BLOCK, CHUNK, Request, ToyEngine, tokens


class Unequal(Protocol):
    """An engine that writes, and one that reads, each closed at the end; `per_chunk`: slots of a chunk."""

    @property
    def per_chunk(self) -> int: ...

    def write(self, address: str) -> contextlib.closing[ToyEngine]: ...

    def read(self, address: str) -> contextlib.closing[ToyEngine]: ...


def check_loaded(node: NodeThread, shape: Unequal, more: int = 0) -> None:
    """Each finds what the other one has saved. `more`: tokens behind the chunks of the second prompt."""
    prompt = tokens(1, 3 * CHUNK + 3)
    with shape.write(node.address) as writer, shape.read(node.address) as reader:
        writer.finish(writer.save(prompt, step=7))
        node.wait_sealed(3 * shape.per_chunk)
        assert reader.load(prompt) == 3 * CHUNK
        other = tokens(2, 2 * CHUNK + more)
        reader.finish(reader.save(other))
        node.wait_sealed(5 * shape.per_chunk)
        assert writer.load(other) == 2 * CHUNK
        node.wait_at_rest()
        assert node.status().chunks == {"sealed": 5 * shape.per_chunk}, "of ranks with the same heads one writes them"


def check_handed_over(one: NodeProcess, two: NodeProcess, shape: Unequal) -> None:
    with shape.write(one.address) as first, shape.read(two.address) as second:
        prompt = tokens(3, LENGTH)
        first.finish(first.save(prompt, PREFILL, step=CHUNK))
        decode = Request("d", [*prompt, 7], {**DECODE, "prefill_tokens": len(prompt)})
        assert second.admit(decode) == set()
        assert decode.num_computed >= LENGTH // BLOCK * BLOCK
        second.check_cache(decode, decode.num_computed)
        second.finish(decode)
        one.wait_at_rest()
        two.wait_at_rest()


def check_disk(on_disk: Callable[[], NodeThread], shape: Unequal, more: int = 0) -> None:
    """The next node finds what the one before has left on the disk."""
    prompt, node = tokens(4, 3 * CHUNK + more), on_disk()
    with shape.write(node.address) as writer:
        writer.finish(writer.save(prompt))
        node.wait_sealed(3 * shape.per_chunk)
    node.close()
    node = on_disk()
    with shape.read(node.address) as reader:
        assert reader.load(prompt) == 3 * CHUNK
        node.wait_at_rest()
