"""Options that are lists, written with commas, as types for click."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from pdx.config import parse_bytes
from pdx.errors import ConfigError

_T = TypeVar("_T")

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic in newer versions of click only


class _Listed(_ParamType, Generic[_T]):
    """What is between the commas, each once and in that order; an empty text is an empty list."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[_T, ...]:
        if isinstance(value, tuple):  # click may convert what it has converted
            return value
        words = value.split(",") if value.strip() else []
        try:
            return tuple(dict.fromkeys(self._one(word.strip()) for word in words))
        except (ConfigError, ValueError) as error:
            self.fail(str(error), param, ctx)

    @abstractmethod
    def _one(self, word: str) -> _T:
        """:raises ConfigError, ValueError: it is not one of them; the message is for the user."""


class Counts(_Listed[int]):
    """Whole numbers of at least `least`, such as 1,8,64."""

    name = "numbers"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def _one(self, word: str) -> int:
        if not word.isdecimal() or int(word) < self._least:
            raise ValueError(f"{word!r} is not a whole number from {self._least} on; write for example 1,8,64")
        return int(word)


class ByteSizes(_Listed[int]):
    """Sizes, such as 64KiB,1MiB."""

    name = "sizes"

    def _one(self, word: str) -> int:
        return parse_bytes(word)


class Names(_Listed[str]):
    """Words, such as shm,tcp."""

    name = "names"

    def _one(self, word: str) -> str:
        return word
