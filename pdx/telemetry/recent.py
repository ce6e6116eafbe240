"""Bounded dicts that forget the oldest entry."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Name = TypeVar("Name")
Value = TypeVar("Value")


def remember(known: OrderedDict[Name, Value], name: Name, value: Value, most: int) -> Value:
    """Set `name` as the newest entry of at most `most`; return `value`. Constant time."""
    known[name] = value
    known.move_to_end(name)
    if len(known) > most:
        known.popitem(last=False)
    return value
