"""Comma-separated lists as option types, and the order of turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from pdx.config import parse_bytes
from pdx.errors import ConfigError

_P = TypeVar("_P")


def comma_separated(one: Callable[[str], object]) -> Callable[[Any], tuple[Any, ...]]:
    """A type for click: comma-separated values, without duplicates, in order; an empty text is an empty list.

    `one` converts a word; the message of its ConfigError or ValueError is shown to the user.
    """

    def list_(value: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # click may convert a value twice
            return value
        words = value.split(",") if value.strip() else []
        try:
            return tuple(dict.fromkeys(one(word.strip()) for word in words))
        except (ConfigError, ValueError) as error:
            raise click.BadParameter(str(error)) from error

    list_.__name__ = "list"  # shown in help
    return list_


def counts(least: int = 1) -> Callable[[Any], tuple[int, ...]]:
    """A type for click: integers of at least `least`, such as 1,8,64."""

    def one(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise ValueError(f"{word!r} is not a whole number from {least} on; write for example 1,8,64")
        return int(word)

    return comma_separated(one)


NAMES, BYTE_SIZES = comma_separated(str), comma_separated(parse_bytes)  # such as shm,tcp and 64KiB,1MiB


def in_turns(
    rounds: int, points: Sequence[_P], names: Sequence[str], *, all_at_once: bool
) -> Iterator[tuple[int, _P, str]]:
    """All combinations of (round, point, name). If all systems run at the same time, they take turns within each point,
    each starting equally often; otherwise within each round, so that no system is started more often than necessary."""
    for round_ in range(rounds):
        if all_at_once:
            for index, point in enumerate(points):
                yield from ((round_, point, name) for name in _rotated(names, round_ + index))
        else:
            for name in _rotated(names, round_):
                yield from ((round_, point, name) for point in points)


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names) if names else 0
    return [*names[first:], *names[:first]]
