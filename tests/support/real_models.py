"""Text and tokens of Gemma 3 270M (see `pdx.bench.harness.real_models`), whose tokenizer has no merges: `tokens_of`
takes the longest token each time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_SPACE = "\u2581"
_LONGEST = 32  # characters of a token that is looked for


def made_or_skipped(make: Callable[[Path], Path], folder: Path) -> Path:
    """The model that `make` makes in this folder; skips the test where pip does not get it."""
    import pytest

    from pdx.bench.harness.real_models import NoModel

    try:
        return make(folder)
    except NoModel as error:
        pytest.skip(str(error))


def tokens_of(folder: Path, text: str) -> list[int]:
    """The ids of a text, with the one that begins all texts."""
    ids = _tokenizer(folder).get_vocab()
    found, left = [ids["<bos>"]], text.replace(" ", _SPACE)
    while left:
        length = next(size for size in range(_LONGEST, 0, -1) if left[:size] in ids)
        found.append(ids[left[:length]])
        left = left[length:]
    return found


def text_of(folder: Path, tokens: list[int]) -> str:
    """The text of these ids."""
    text: str = _tokenizer(folder).decode(tokens, skip_special_tokens=False)
    return text


def _tokenizer(folder: Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))
