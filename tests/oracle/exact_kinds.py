"""Kinds of models by their cache groups, in vLLM's own specs: what a group's layers look at, how large its blocks are,
and the one buffer in which all groups' pages lie.

As in vLLM the groups draw from one pool of blocks, and layers of different groups lie over one another: a block is of
one group at a time.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from exact_model import WORDS, Mixer, State, Word, Words, masks
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pdx.vllm.releases import moves_groups

BLOCK = 16  # tokens
LAST, STATE = 8, 32  # words for each of the last keys, and for the state, in a page of a state layer
_ODD = np.arange(1, 129, 2, dtype=Word)


class Group(NamedTuple):
    """A cache group. `words`: for each token and layer, in equal parts of all KV heads; `is_latent`: its pages are
    MLA's."""

    mixer: Mixer
    layers: tuple[int, ...]
    block: int = BLOCK  # tokens
    words: int = WORDS
    is_latent: bool = False
    heads: int = 1

    @property
    def is_state(self) -> bool:
        return self.mixer.kind == "state"

    @property
    def page_words(self) -> int:
        """Of one layer and block, all that is used of it."""
        return len(State().last) * LAST + STATE if self.is_state else self.block * self.words


class Kind(NamedTuple):
    """A kind of model. `unit`: tokens that a block hash is of, by the engine's command line; 0: as vLLM has it."""

    groups: tuple[Group, ...]
    unit: int = 0

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Of each layer."""
        found = {layer: group.mixer for group in self.groups for layer in group.layers}
        return tuple(found[layer] for layer in range(len(found)))

    @property
    def block(self) -> int:
        """Tokens of the smallest: what vLLM calls the cache's block size."""
        return min(group.block for group in self.groups)

    @property
    def state_block(self) -> int:
        """Tokens of a state's slot, the same in all groups; 0: no group has states."""
        return next((group.block for group in self.groups if group.is_state), 0)

    @property
    def page_words(self) -> int:
        """Of one layer and block in the buffer: the largest group's, which others are padded to."""
        return max(group.page_words for group in self.groups)


def _full(*layers: int, **settings: Any) -> Group:
    return Group(Mixer(), layers, **settings)


def _window(span: int, *layers: int, **settings: Any) -> Group:
    return Group(Mixer("window", span), layers, **settings)


def _state(*layers: int, **settings: Any) -> Group:
    return Group(Mixer("state"), layers, **settings)


# Windows of one token more than whole blocks, and of others; local parts of several blocks.
KINDS = {
    "full": Kind((_full(0, 1, 2),)),
    "latent": Kind((_full(0, 1, is_latent=True),)),
    "window": Kind((_window(100, 0, 2), _full(1, 3))),
    "windows": Kind((_window(33, 0, 1, 2),)),
    "local": Kind((Group(Mixer("local", 128), (0,)), Group(Mixer("local", 128), (1,)), _full(2))),
    "state": Kind((_state(0, 2), _full(1, 3))),
    "mixed": Kind((_window(41, 0), _state(1), _state(2), _full(3))),
    "unequal": Kind((_window(100, 0, 2, block=64), _full(1, 3, block=32, words=2 * WORDS))),
    "heads": Kind((_window(100, 0, 2, heads=4), _full(1, 3, heads=4))),  # which ranks may have among them
    "units": Kind((_state(0, block=64), _full(1, block=64)), unit=16),  # hits that end inside a block
}
# Beside "full" with a draft model's layer, which is its last one: without that, and with it in a group of its own.
DRAFTED = {"undrafted": Kind((_full(0, 1),)), "apart": Kind((_full(0, 1), _full(2)))}
# A token's key depends on the token and its position alone, so that it is known at any other position, too.
ONE_LAYER = {"one layer": Kind((_full(0),))}
# `make test` has PdxConnector over these kinds, and by these schedulers where both have something to say of all kinds;
# `make test-long` has all of them.
EVERY_DAY = ("full", "window", "mixed")
EVERY_DAY_ASYNC = {"full": True, "window": False, "mixed": True}
_needs_groups = pytest.mark.skipif(not moves_groups(), reason="PDX moves one group of full attention before vLLM 0.32")


def with_pdx(*kinds: str) -> list[Any]:
    """Parameters of tests that have PdxConnector over these kinds."""
    found = []
    for name in kinds:
        marks = [] if name in EVERY_DAY else [pytest.mark.long]
        if any(group.mixer.kind != "full" for group in KINDS[name].groups):
            marks.append(_needs_groups)
        found.append(pytest.param(name, marks=marks))
    return found


def by_schedulers(*kinds: str) -> pytest.MarkDecorator:
    """For tests that have PdxConnector over these kinds, scheduled in either way."""
    params = [
        pytest.param(
            *(each.values[0], asynchronous),
            marks=each.marks
            if EVERY_DAY_ASYNC.get(each.values[0]) == asynchronous
            else [*each.marks, pytest.mark.long],
            id=f"{each.values[0]}-{'async' if asynchronous else 'sync'}",
        )
        for each in with_pdx(*kinds)
        for asynchronous in (False, True)
    ]
    return pytest.mark.parametrize(("kind", "asynchronous"), params)


MOVED_KINDS = [each for each in KINDS if each != "heads"]  # which is "window", cut finer


def layer_name(layer: int) -> str:
    """By which vLLM knows it."""
    return f"model.layers.{layer}.attn"


def known(kind: Any, base: Any = None, **settings: Any) -> Any:
    """Make it of those settings that this release's constructor knows, which is that of `base`."""
    names = inspect.signature(base or kind).parameters
    return kind(**{name: value for name, value in settings.items() if name in names})


def cache_config(kind: Kind, num_blocks: int, ranks: int = 1) -> Any:
    """What vLLM's engine tells of the cache of each of its ranks, as far as it is known before hashes are."""
    page = kind.page_words * Word().nbytes // ranks
    size = page * num_blocks
    names = [[layer_name(layer) for layer in group.layers] for group in kind.groups]
    total = size * max(map(len, names))
    return known(
        KVCacheConfig,
        num_blocks=num_blocks,
        kv_cache_tensors=[
            known(KVCacheTensor, size=total, layers=each, shared_by=each, layer_stride=size, block_stride=page)
            for each in names
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(each, _spec(group, page, ranks)) for each, group in zip(names, kind.groups, strict=True)
        ],
        kv_cache_layout="LBHNC",
    )


def of_stages(config: Any, stages: Sequence[int]) -> list[Any]:
    """What the workers of stages that have so many layers are told of it: each of its own layers."""
    ends = list(itertools.accumulate(stages))
    own = [{layer_name(at) for at in range(end - count, end)} for end, count in zip(ends, stages, strict=True)]
    found = []
    for names in own:
        groups = [
            KVCacheGroupSpec([name for name in each.layer_names if name in names], each.kv_cache_spec)
            for each in config.kv_cache_groups
        ]
        found.append(dataclasses.replace(config, kv_cache_groups=groups))
    return found if len(stages) > 1 else [config]


def _spec(group: Group, page: int, ranks: int) -> Any:
    """:param page: bytes that a layer's page is padded to."""
    mixer, block = group.mixer, group.block
    if group.is_state:
        shapes = ((len(State().last), 4 * LAST), (4, STATE // 2))
        dtypes = (torch.bfloat16, torch.float32)
        return MambaSpec(block, shapes, dtypes, page_size_padded=page, mamba_cache_mode="align")
    # In float32: a token has so many words for its key and its value.
    heads, width = group.heads // ranks, group.words // group.heads
    sizes: dict[str, Any] = {"block_size": block, "num_kv_heads": heads, "head_size": width, "dtype": torch.float32}
    if group.is_latent:
        return MLAAttentionSpec(**{**sizes, "head_size": 2 * group.words})
    if mixer.kind == "window":
        return SlidingWindowSpec(**sizes, sliding_window=mixer.span)
    if mixer.kind == "local":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=mixer.span)
    return FullAttentionSpec(**sizes)


Tables = list[list[int]]  # blocks of a request, in each group: what vLLM's runners keep


class Pages:
    """The cache of a kind, of which each rank has some heads; a state is one's alone. `torn`: pages that were not
    written as a whole and have been read. `tensors`: of each rank, by layer; `raws`: all that each has."""

    def __init__(self, kind: Kind, num_blocks: int, ranks: int = 1) -> None:
        self._kind = kind
        self.torn = 0
        rows = max(len(group.layers) for group in kind.groups)
        raws = [
            torch.zeros((rows, num_blocks, kind.page_words * Word().nbytes // ranks), dtype=torch.int8)
            for _ in range(ranks)
        ]
        self.raws = [raw.numpy().view(Word) for raw in raws]  # [rows, num_blocks, words]
        self.raw = self.raws[0]
        self.tensors: list[dict[str, torch.Tensor]] = [{} for _ in raws]
        # (number of the group, it, [num_blocks, …] of each rank) by layer.
        self._pages: dict[int, tuple[int, Group, list[Words]]] = {}
        for number, group in enumerate(kind.groups):
            for row, layer in enumerate(group.layers):
                self._pages[layer] = number, group, []
                for raw, words, tensors in zip(raws, self.raws, self.tensors, strict=True):
                    pages = words[row, :, : group.page_words // ranks]
                    if group.is_state:  # as in vLLM, bytes
                        tensor = raw[row, :, : group.page_words * Word().nbytes].view(num_blocks, 1, 1, -1)
                    else:
                        heads, width = group.heads // ranks, group.words // group.heads
                        pages = pages.reshape(num_blocks, heads, group.block, width).swapaxes(1, 2)
                        assert np.shares_memory(pages, words)
                        tensor = raw[row].view(torch.float32).view(num_blocks, heads, group.block, 2 * width)
                    tensors[layer_name(layer)] = tensor
                    self._pages[layer][2].append(pages)

    def write(self, layer: int, tables: Tables, start: int, keys: Words) -> None:
        """Of tokens that stand at `start` and behind it."""
        number, group, pages = self._pages[layer]
        places = np.arange(start, start + len(keys))
        blocks = np.array(tables[number], dtype=np.int64)[places // group.block]
        assert blocks.all(), f"tokens of a request are written to the null block, layer {layer}"
        of_heads = (keys[:, None] ^ masks(group.words)).reshape(len(keys), group.heads, -1)
        for of_rank, mine in zip(pages, np.split(of_heads, len(pages), axis=1), strict=True):
            of_rank[blocks, places % group.block] = mine

    def read(self, layer: int, tables: Tables, start: int, end: int) -> Words:
        """The keys of tokens [start, end)."""
        number, group, pages = self._pages[layer]
        first = start // group.block
        blocks = np.array(tables[number][first : -(-end // group.block)], dtype=np.int64)
        begin = first * group.block
        found = np.concatenate([of_rank[blocks] for of_rank in pages], axis=2)  # [blocks, tokens, heads, words]
        return self._whole(found.reshape(-1, group.words)[start - begin : end - begin] ^ masks(group.words))

    def state(self, layer: int, tables: Tables, end: int) -> State:
        """Of a state layer, in the slot of the step that ends there."""
        number, group, pages = self._pages[layer]
        words = pages[0][tables[number][-(-end // group.block) - 1]] ^ masks(group.page_words)
        last, state = words[:-STATE].reshape(-1, LAST), words[-STATE:]
        return State(self._whole(last), self._whole(state[None]))

    def put_state(self, layer: int, tables: Tables, end: int, state: State) -> None:
        """In the same slot."""
        number, group, pages = self._pages[layer]
        block = tables[number][-(-end // group.block) - 1]
        assert block, f"a request's state is written to the null block, layer {layer}"
        words = np.concatenate([np.repeat(state.last, LAST), np.repeat(state.word, STATE)])
        pages[0][block] = words ^ masks(group.page_words)

    def _whole(self, words: Words) -> Words:
        """What each row holds in each of its words; something else, if one word is not what the others are."""
        apart = words - words[:, :1]
        self.torn += (is_torn := bool(apart.any()))
        return words[:, 0] + (apart * _ODD[: words.shape[1]]).sum(axis=1, dtype=Word) if is_torn else words[:, 0]

    def move_states(self, tables: Tables, slot: int, to: int) -> None:
        """Copy a request's states from one slot to another, in each group that has some."""
        for layer in range(len(self._pages)):
            number, group, pages = self._pages[layer]
            if group.is_state:
                table = tables[number]
                pages[0][table[to]] = pages[0][table[slot]]

    def zero(self, blocks: Sequence[int]) -> None:
        """In the layers of groups that attend."""
        rows = max(len(group.layers) for group in self._kind.groups if not group.is_state)
        for raw in self.raws:
            raw[:rows, list(blocks)] = 0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Of blocks (from, to), whose groups do not matter."""
        sources, targets = zip(*pairs, strict=True)
        for raw in self.raws:
            raw[:, list(targets)] = raw[:, list(sources)]
