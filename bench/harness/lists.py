"""Lists: types of options that are written with commas, and turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from pdx.config import parse_bytes
from pdx.errors import ConfigError


def listed(one: Callable[[str], object]) -> Callable[[Any], tuple[Any, ...]]:
    """A type for click: what is between the commas, each once and in that order; an empty text is an empty list.

    `one` makes a value from a word; the message of its ConfigError or ValueError is for the user.
    """

    def list_(value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # click may convert what it has converted
            return value
        words = value.split(",") if value.strip() else []
        try:
            return tuple(dict.fromkeys(one(word.strip()) for word in words))
        except (ConfigError, ValueError) as error:
            raise click.BadParameter(str(error)) from error

    list_.__name__ = "list"  # what the help says
    return list_


def counts(least: int = 1) -> Callable[[Any], tuple[int, ...]]:
    """A type for click: whole numbers of at least `least`, such as 1,8,64."""

    def one(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise ValueError(f"{word!r} is not a whole number from {least} on; write for example 1,8,64")
        return int(word)

    return listed(one)


NAMES, BYTE_SIZES = listed(str), listed(parse_bytes)  # such as shm,tcp and 64KiB,1MiB


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same in turns: each begins as often."""
    first = by % len(names) if names else 0
    return [*names[first:], *names[:first]]
