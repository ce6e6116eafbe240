"""Texts of a given number of tokens that nobody sent before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_POOL = 1000  # words: seven of them in a row, which is less than one page, hardly come twice
_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_SHORT = [" the", " a", " I", " of"]  # few tokens each, to fill what is left
_SHORTEST = [".", ",", "!", ";"]  # where even those are too long; two of them in a row may be one token
_TRIES = 8

Encode = Callable[[str], Sequence[int]]


class Writer:
    """Writes texts. The same tokenizer, salt and name give the same text, any other name or salt a different one.

    Texts begin with a space and consist of words, so that tokenizers split between two of them: texts written one
    behind the other have as many tokens as they have alone.
    """

    def __init__(self, encode: Encode, salt: str) -> None:
        """`encode` adds no special tokens."""
        self._encode = encode
        self._salt = salt
        draw = random.Random("words")
        words = {" " + "".join(_syllables(draw)) for _ in range(_POOL)}
        self._words = sorted(words)
        # Behind another word: some tokenizers put a token of their own in front of every text.
        alone = len(encode(_SHORT[0]))
        self._cost = {word: len(encode(_SHORT[0] + word)) - alone for word in [*self._words, *_SHORT, *_SHORTEST]}

    def text(self, name: str, tokens: int) -> str:
        """A text of `tokens` tokens; where the tokenizer allows no such text, the nearest one found."""
        best, off = "", tokens
        wanted = tokens
        for _ in range(_TRIES):
            text = self._draw(random.Random(f"{self._salt} {name}"), wanted)
            error = len(self._encode(text)) - tokens
            if abs(error) < off or not best:
                best, off = text, abs(error)
            if error == 0:
                break
            wanted = max(1, wanted - error)
        return best

    def _draw(self, draw: random.Random, tokens: int) -> str:
        """Words whose tokens, counted one by one, are `tokens`."""
        text: list[str] = []
        left = tokens
        while left > 0:
            word = draw.choice(self._words)
            if self._cost[word] > left:
                short = self._at_most(_SHORT, left) or self._at_most(_SHORTEST, left)
                if not short:
                    break
                word = draw.choice(short)
            text.append(word)
            left -= self._cost[word]
        return "".join(text)

    def _at_most(self, words: Sequence[str], tokens: int) -> list[str]:
        return [word for word in words if 0 < self._cost[word] <= tokens]


def _syllables(draw: random.Random) -> list[str]:
    return [draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(draw.randint(1, 4))]
