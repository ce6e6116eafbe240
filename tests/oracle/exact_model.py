"""A toy model whose keys and tokens are an exact integer function of every token before: one wrong byte anywhere in the
cache gives another token, and there is no numerical noise. `answer` is what any engine must say.

All arithmetic is modulo 2**64. A token's key in a layer is one word; the cache holds it `WORDS` times, each time masked
by another constant, so that a page that is torn is seen as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WORDS = 8  # of 8 bytes, per token and layer
LAYERS = 3
FIRST_TOKEN, NUM_TOKENS = 100, 900  # that are ever sampled

Word = np.uint64
Words = NDArray[np.uint64]


def mix(words: Words) -> Words:
    """A bijection in which each bit depends on all others."""
    mixed = words.astype(Word, copy=True)
    mixed ^= mixed >> Word(33)
    mixed *= Word(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> Word(33)
    mixed *= Word(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> Word(33)
    return mixed


MASKS = mix(np.arange(1, WORDS + 1, dtype=Word))
_EMBEDDINGS = mix(np.arange(4096, dtype=Word) + Word(77))


class Picture(NamedTuple):
    """Stands for `length` tokens of a prompt from `offset` on. What it is called does not reach the model."""

    offset: int
    length: int
    content: int
    called: str = ""


class Beside(NamedTuple):
    """What reaches the model beside tokens. 0: nothing."""

    weights: int = 0
    adapter: int = 0
    pictures: tuple[Picture, ...] = ()


NOTHING = Beside()


def embed(tokens: Sequence[int], start: int = 0, beside: Beside = NOTHING) -> Words:
    """What the first layer gets of tokens that stand at `start` and behind it."""
    found: Words = _EMBEDDINGS[np.array(tokens, dtype=np.int64)]
    found ^= Word(beside.weights * 0x9E3779B1 + beside.adapter * 0x85EBCA77)
    for picture in beside.pictures:
        seen = slice(max(0, picture.offset - start), max(0, picture.offset + picture.length - start))
        found[seen] += mix(np.array([picture.content], dtype=Word))
    return found


def keys_of(hidden: Words, start: int, layer: int) -> Words:
    """The keys of tokens that stand at `start` and behind it."""
    positions = np.arange(start, start + len(hidden), dtype=Word)
    return mix(hidden * Word(3) + positions * Word(0x9E3779B97F4A7C15) + Word(layer + 1))


def attend(hidden: Words, keys: Words, layer: int, start: int = 0, before: Words | None = None) -> tuple[Words, Words]:
    """What the layer gives for its last `len(hidden)` tokens, and the sum over the keys that it looked at.

    `keys`: of the tokens from `start` on; `before`: the sum over those before, [1].
    """
    places = np.arange(start, start + len(keys), dtype=Word)
    sums = np.cumsum(keys * (places * Word(2) + Word(1)), dtype=Word)
    if before is not None:
        sums += before
    return mix((hidden ^ sums[len(keys) - len(hidden) :]) + Word(layer * 7 + 5)), sums[-1:]


def sample(hidden: Word) -> int:
    """The token that follows."""
    return int(mix(np.array([hidden ^ Word(0xABCDEF)]))[0] % Word(NUM_TOKENS)) + FIRST_TOKEN


class _Generation:
    """Goes on from a prompt for as long as it is asked."""

    def __init__(self, prompt: Sequence[int], layers: int, beside: Beside) -> None:
        self._new, self._start, self._beside = list(prompt), 0, beside
        self._sums: list[Words | None] = [None] * layers
        self.tokens: list[int] = []

    def go_on(self) -> None:
        hidden = embed(self._new, self._start, self._beside)
        for layer, before in enumerate(self._sums):
            hidden, self._sums[layer] = attend(hidden, keys_of(hidden, self._start, layer), layer, self._start, before)
        self._start += len(self._new)
        self._new = [sample(hidden[-1])]
        self.tokens += self._new


@lru_cache(1024)
def _generation(prompt: tuple[int, ...], layers: int, beside: Beside) -> _Generation:
    return _Generation(prompt, layers, beside)


def answer(prompt: Sequence[int], count: int, layers: int = LAYERS, beside: Beside = NOTHING) -> list[int]:
    """The `count` tokens that follow the prompt."""
    generation = _generation(tuple(prompt), layers, beside)
    while len(generation.tokens) < count:
        generation.go_on()
    return generation.tokens[:count]


def keys(prompt: Sequence[int]) -> list[Words]:
    """Those of the prompt's tokens, in each layer."""
    found, hidden = [], embed(prompt)
    for layer in range(LAYERS):
        found.append(keys_of(hidden, 0, layer))
        hidden, _ = attend(hidden, found[-1], layer)
    return found
