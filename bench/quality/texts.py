"""Texts to measure with, from the installed Python: nothing is fetched, and PDX redistributes nothing.

Prose is what `help()` prints on Python's topics (`pydoc_data.topics`), code the standard library's modules; both are
under the PSF License Agreement, version 2. They change a little between Python versions: results name the version.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.errors import ConfigError

CONTEXT_TOKENS = (256, 512, 1024, 2048)  # whole chunks; the samples take turns
FOLLOWING_TOKENS = 129  # after each but the last, the prediction of the next is scored
_CHARACTERS = 12  # per token: more than the mean of any text


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginning of a text. `context`: whole chunks, whose KV is judged by the loss on `following`."""

    name: str
    context: list[int]
    following: list[int]


def topics() -> dict[str, str]:
    """Pages of documentation by name."""
    from pydoc_data.topics import topics as found

    return {f"topic {name}": text.strip() for name, text in found.items()}


def modules() -> dict[str, str]:
    """Sources of the standard library by name."""
    return {
        f"module {file.stem}": file.read_text("utf-8", errors="replace")
        for file in Path(os.__file__).parent.glob("*.py")
    }


def samples(tokenizer: Any, count: int, seed: int) -> Iterator[Sample]:
    """Draw `count` different texts, alternating prose and code, with contexts of all lengths.

    :raises ConfigError: there are too few.
    """
    draw = random.Random(seed)
    sources = [sorted(topics().items()), sorted(modules().items())]
    for source in sources:
        draw.shuffle(source)
    for number in range(count):
        source = sources[number % len(sources)]
        length = CONTEXT_TOKENS[number // len(sources) % len(CONTEXT_TOKENS)]
        need = length + FOLLOWING_TOKENS
        for name, text in source:
            tokens = tokenizer.encode(text[: _CHARACTERS * need]).ids[:need]
            if len(tokens) == need:
                source.remove((name, text))
                yield Sample(name, tokens[:length], tokens[length:])
                break
        else:
            raise ConfigError(f"Python brings no more than {number} texts that are long enough; fewer --samples")
