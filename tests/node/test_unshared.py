"""What a node tells of two engines of one model that cannot read each other's chunks."""

from __future__ import annotations

import pytest

from pdx.memory.apart import differing
from pdx.memory.layout import CacheGroups, KvLayout
from pdx.wire.messages import VERSION, Hello

LAYOUT = KvLayout(
    model="m", dtype="f", num_layers=3, num_heads=2, head_dim=8, block_tokens=16, page_bytes=1024, chunk_tokens=128,
    order="LBHNC", backend="B", isa="", num_shards=2, hashing="sha256",
)  # fmt: skip
FULL = {"layers": (1, 3, 5)}
WINDOW = {"kind": "window", "window": 512, "layers": (0, 2, 4)}
WINDOW_NAME = "the window group (layers 0,2,4; 512 tokens)"


def hello(*groups: dict, **changes: object) -> Hello:
    layouts = [KvLayout(**{**_fields(LAYOUT), "hash_tokens": 16, **changes, **group}) for group in groups or ({},)]
    made = CacheGroups.of(layouts)
    return Hello(VERSION, 1, "scheduler", shape=made.described(), groups=made.described_groups())


def _fields(layout: KvLayout) -> dict:
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        pytest.param(hello(FULL, WINDOW), hello(FULL, WINDOW), "", id="nothing"),
        pytest.param(
            hello(FULL, WINDOW, num_shards=4),
            hello(FULL, WINDOW),
            "num_shards '4' and '2' (--tensor-parallel-size, or shards)",
            id="shards",
        ),
        pytest.param(
            hello(FULL, WINDOW | {"block_tokens": 32, "page_bytes": 2048}),
            hello(FULL, WINDOW),
            f"block_tokens '32' and '16' (--block-size) of {WINDOW_NAME}, "
            f"page_bytes '2048' and '1024' of {WINDOW_NAME}",
            id="blocks of one of several groups",
        ),
        pytest.param(
            hello(num_layers=6),
            hello(FULL, WINDOW),
            "cache groups 1 and 2 (--disable-hybrid-kv-cache-manager)",
            id="number of groups",
        ),
    ],
)
def test_the_fields_that_differ_are_named_with_their_groups(mine: Hello, other: Hello, said: str) -> None:
    assert differing(mine, other) == said


def test_what_a_group_has_for_itself_is_told_of_it_alone() -> None:
    told = hello(FULL, WINDOW)
    assert told.groups == [{"layers": "1,3,5"}, {"kind": "window", "layers": "0,2,4", "window": "512"}]
    assert told.shape["num_shards"] == "2"
    assert not told.shape.keys() & {"layers", "kind", "window"}
    assert hello(layers=(0, 1, 2, 5, 7, 8)).shape["layers"] == "0-2,5,7-8"
    assert not hello().groups
