"""A toy model whose keys and tokens are an exact integer function of all that its layers look at: one wrong byte in the
cache gives another token, and there is no numerical noise. `answer` is what any engine must say.

All arithmetic is modulo 2**64. A token's key in a layer is one word; the cache holds it `WORDS` times, each time masked
by another constant, so that a page that is torn is seen as such. A layer's `Mixer` says which keys it looks at, or that
it keeps a state instead.
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


def unmix(words: Words) -> Words:
    """What `mix` has made these of."""
    found = words.astype(Word, copy=True)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        found ^= found >> Word(33)
        found *= Word(pow(factor, -1, 1 << 64))
    found ^= found >> Word(33)
    return found


@lru_cache
def masks(count: int) -> Words:
    """By which a word that is held `count` times is masked."""
    return mix(np.arange(1, count + 1, dtype=Word))


MASKS = masks(WORDS)
_EMBEDDINGS = mix(np.arange(4096, dtype=Word) + Word(77))
_STATE_STEP = 0xD6E8FEB86659FD93  # odd: a state is never lost in the next
_STATE_BACK = pow(_STATE_STEP, -1, 1 << 64)
_CONVOLVED = np.array([7, 5, 3, 1], dtype=Word)  # weights of a token's key and the ones before it, the oldest first


class Mixer(NamedTuple):
    """What a layer looks at, of the tokens up to the one that it computes: all of them ("full"), the last `span`
    ("window"), those since the last multiple of `span` ("local"), or a state that each token advances ("state")."""

    kind: str = "full"
    span: int = 0

    def first(self, position: int) -> int:
        """The first token that the one at `position` looks at; of a state, which has none, `position`."""
        if self.kind == "window":
            return max(0, position - self.span + 1)
        if self.kind == "local":
            return position - position % self.span
        return position if self.kind == "state" else 0


FULL = (Mixer(),) * LAYERS


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


_PLACE = 0x9E3779B97F4A7C15  # a position's part of a key


def turned(keys: Words, shift: int) -> Words:
    """These keys, so many positions further behind."""
    return mix(unmix(keys) + Word(shift * _PLACE % (1 << 64)))


def keys_of(hidden: Words, start: int, layer: int) -> Words:
    """The keys of tokens that stand at `start` and behind it."""
    positions = np.arange(start, start + len(hidden), dtype=Word)
    return mix(hidden * Word(3) + positions * Word(_PLACE) + Word(layer + 1))


def sums_of(keys: Words, start: int, before: Words | None = None) -> Words:
    """The sums over the keys up to each token, of tokens that stand at `start` and behind it, and what they begin with:
    [tokens + 1]. `before`: that, [1]; without it the sums are over these keys alone."""
    places = np.arange(start, start + len(keys), dtype=Word)
    sums = np.zeros(len(keys) + 1, dtype=Word)
    np.cumsum(keys * (places * Word(2) + Word(1)), out=sums[1:])
    return sums if before is None else sums + before


def seen(sums: Words, base: int, mixer: Mixer, start: int) -> Words:
    """What tokens from `start` on look at, by the sums over the keys from `base` on, or from further on where no token
    looks further back. A full layer's begin with the sum over all keys before."""
    found = sums[start + 1 - base :]
    if mixer.kind == "full":
        return found
    return found - sums[np.array([mixer.first(start + number) - base for number in range(len(found))], dtype=np.int64)]


class State(NamedTuple):
    """Of a state layer, behind some token: its last keys, [CONVOLVED - 1], and the state itself, [1]."""

    last: Words = np.zeros(len(_CONVOLVED) - 1, dtype=Word)
    word: Words = np.zeros(1, dtype=Word)


def advance(keys: Words, state: State) -> tuple[Words, State]:
    """The state behind each of these tokens, [tokens], and all of it behind the last one."""
    joined = np.concatenate([state.last, keys])
    inputs = np.convolve(joined, _CONVOLVED[::-1], "valid").astype(Word)
    forth, back = (np.full(len(keys), step, dtype=Word).cumprod(dtype=Word) for step in (_STATE_STEP, _STATE_BACK))
    words = forth * (state.word + np.cumsum(inputs * back, dtype=Word))  # each: the one before, times the step, plus
    return words, State(joined[len(keys) :], words[-1:])


def mixed(hidden: Words, found: Words, layer: int) -> Words:
    """What the layer gives for its tokens, by what each has looked at."""
    return mix((hidden ^ found) + Word(layer * 7 + 5))


def sample(hidden: Word) -> int:
    """The token that follows."""
    return int(mix(np.array([hidden ^ Word(0xABCDEF)]))[0] % Word(NUM_TOKENS)) + FIRST_TOKEN


class _Generation:
    """Goes on from a prompt for as long as it is asked."""

    def __init__(self, prompt: Sequence[int], mixers: Sequence[Mixer], beside: Beside) -> None:
        self._new, self._start, self._beside = list(prompt), 0, beside
        self._mixers = mixers
        # Of each layer, what those who come look at of the tokens that were: a state, or sums from some token on.
        self._states = [State() for _ in mixers]
        self._sums = [(0, np.zeros(1, dtype=Word)) for _ in mixers]
        self.tokens: list[int] = []

    def go_on(self) -> None:
        hidden = embed(self._new, self._start, self._beside)
        for layer in range(len(self._mixers)):
            hidden = mixed(hidden, self._mix(layer, keys_of(hidden, self._start, layer)), layer)
        self._start += len(self._new)
        self._new = [sample(hidden[-1])]
        self.tokens += self._new

    def _mix(self, layer: int, keys: Words) -> Words:
        mixer, end = self._mixers[layer], self._start + len(keys)
        if mixer.kind == "state":
            found, self._states[layer] = advance(keys, self._states[layer])
            return found
        base, sums = self._sums[layer]
        sums = np.concatenate([sums, sums_of(keys, self._start, sums[-1:])[1:]])
        next_base = end if mixer.kind == "full" else mixer.first(end)
        self._sums[layer] = next_base, sums[next_base - base :]
        return seen(sums, base, mixer, self._start)


@lru_cache(1024)
def _generation(prompt: tuple[int, ...], mixers: tuple[Mixer, ...], beside: Beside) -> _Generation:
    return _Generation(prompt, mixers, beside)


def answer(prompt: Sequence[int], count: int, mixers: tuple[Mixer, ...] = FULL, beside: Beside = NOTHING) -> list[int]:
    """The `count` tokens that follow the prompt, of a model with these layers."""
    generation = _generation(tuple(prompt), mixers, beside)
    while len(generation.tokens) < count:
        generation.go_on()
    return generation.tokens[:count]


def keys(prompt: Sequence[int]) -> list[Words]:
    """Those of the prompt's tokens, in each layer of a model whose layers are all full."""
    found, hidden = [], embed(prompt)
    for layer in range(LAYERS):
        found.append(keys_of(hidden, 0, layer))
        hidden = mixed(hidden, sums_of(found[-1], 0)[1:], layer)
    return found
