"""What was named last, of which the oldest is forgotten where there is too much."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Name = TypeVar("Name")
Value = TypeVar("Value")


def remember(known: OrderedDict[Name, Value], name: Name, value: Value, most: int) -> Value:
    """Put it last of `most`. Each call costs the same."""
    known[name] = value
    known.move_to_end(name)
    if len(known) > most:
        known.popitem(last=False)
    return value
