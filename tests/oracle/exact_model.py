"""A toy model whose keys and tokens are an exact integer function of every token before: one wrong byte anywhere in the
cache gives another token, and there is no numerical noise. `answer` is what any engine must say.

All arithmetic is modulo 2**64. A token's key in a layer is one word; the cache holds it `WORDS` times, each time masked
by another constant, so that a page that is torn is seen as such.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORDS = 8  # of 8 bytes, per token and layer
LAYERS = 3
FIRST_TOKEN, NUM_TOKENS = 100, 900  # that are ever sampled

Word = np.uint64
Words = NDArray[np.uint64]

_ANSWERS_KEPT = 4096


def mix(words: Words) -> Words:
    """A bijection in which each bit depends on all others."""
    mixed = words.astype(Word, copy=True)
    with np.errstate(over="ignore"):
        mixed ^= mixed >> Word(33)
        mixed *= Word(0xFF51AFD7ED558CCD)
        mixed ^= mixed >> Word(33)
        mixed *= Word(0xC4CEB9FE1A85EC53)
        mixed ^= mixed >> Word(33)
    return mixed


MASKS = mix(np.arange(1, WORDS + 1, dtype=Word))
_EMBEDDINGS = mix(np.arange(4096, dtype=Word) + Word(77))


def embed(tokens: Sequence[int]) -> Words:
    """What the first layer gets."""
    found: Words = _EMBEDDINGS[np.array(tokens, dtype=np.int64)]
    return found


def keys_of(hidden: Words, start: int, layer: int) -> Words:
    """The keys of tokens that stand at `start` and behind it."""
    positions = np.arange(start, start + len(hidden), dtype=Word)
    with np.errstate(over="ignore"):
        return mix(hidden * Word(3) + positions * Word(0x9E3779B97F4A7C15) + Word(layer + 1))


def attend(hidden: Words, keys: Words, layer: int) -> Words:
    """What the layer gives for its last `len(hidden)` tokens, by the keys of all tokens up to them."""
    with np.errstate(over="ignore"):
        sums = np.cumsum(keys * (np.arange(len(keys), dtype=Word) * Word(2) + Word(1)), dtype=Word)
        return mix((hidden ^ sums[len(keys) - len(hidden) :]) + Word(layer * 7 + 5))


def sample(hidden: Word) -> int:
    """The token that follows."""
    return int(mix(np.array([hidden ^ Word(0xABCDEF)]))[0] % Word(NUM_TOKENS)) + FIRST_TOKEN


_answers: dict[tuple[tuple[int, ...], int], list[int]] = {}


def answer(prompt: Sequence[int], count: int, layers: int = LAYERS) -> list[int]:
    """The `count` tokens that follow the prompt."""
    asked = (tuple(prompt), layers)
    known = _answers.get(asked, [])
    if len(known) < count:
        if len(_answers) >= _ANSWERS_KEPT:
            _answers.clear()
        known = _answers[asked] = _generate(prompt, count, layers)
    return known[:count]


def keys(prompt: Sequence[int]) -> list[Words]:
    """Those of the prompt's tokens, in each layer."""
    found, hidden = [], embed(prompt)
    for layer in range(LAYERS):
        found.append(keys_of(hidden, 0, layer))
        hidden = attend(hidden, found[-1], layer)
    return found


def _generate(prompt: Sequence[int], count: int, layers: int) -> list[int]:
    new, generated = list(prompt), list[int]()
    keys = [np.zeros(0, Word) for _ in range(layers)]
    while len(generated) < count:
        hidden = embed(new)
        for layer in range(layers):
            keys[layer] = np.concatenate([keys[layer], keys_of(hidden, len(keys[layer]), layer)])
            hidden = attend(hidden, keys[layer], layer)
        new = [sample(hidden[-1])]
        generated += new
    return generated
