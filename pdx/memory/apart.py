"""Describes how the layouts of two engines differ that cannot read each other's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pdx.memory.layout import group_title

# The setting behind each field of a layout in which two engines of one model usually differ.
_SET_BY = {
    "backend": "--attention-backend",
    "block_tokens": "--block-size",
    "chunk_tokens": "chunk_tokens",
    "dtype": "--dtype and --kv-cache-dtype",
    "hashing": "--prefix-caching-hash-algo",
    "isa": "the CPU",
    "num_shards": "--tensor-parallel-size, or shards",
    "release": "the release",
    "stages": "--pipeline-parallel-size, or stages",
}


class Shaped(Protocol):
    """An engine's description: the fields of its layout as text, and those of each cache group if it has several."""

    @property
    def shape(self) -> Mapping[str, str]: ...

    @property
    def groups(self) -> Sequence[Mapping[str, str]]: ...


def differing(mine: Shaped, other: Shaped) -> str:
    """The fields in which the layouts of two engines differ, with both values and the settings behind them; empty if
    there are none. Fields that differ only in some cache groups are given with the group's name."""
    groups, others = fields_of_groups(mine), fields_of_groups(other)
    if len(groups) != len(others) and mine.shape.get("stages") != other.shape.get("stages"):
        [text] = _differing(*({"stages": each.shape.get("stages", "")} for each in (mine, other)))
        return text
    if len(groups) != len(others):
        return f"cache groups {len(groups)} and {len(others)} (--disable-hybrid-kv-cache-manager)"
    apart = [_differing(*both) for both in zip(groups, others, strict=True)]
    of_all = [text for text in apart[0] if all(text in each for each in apart)]
    of_some = [
        f"{text} of {group_title(fields)}"
        for fields, each in zip(groups, apart, strict=True)
        for text in each
        if text not in of_all
    ]
    return ", ".join([*of_all, *of_some])


def fields_of_groups(engine: Shaped) -> list[dict[str, str]]:
    """All fields of each cache group of an engine."""
    return [{**engine.shape, **group} for group in engine.groups or [{}]]


def _differing(mine: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {mine.get(name, '')[:64]!r} and {other.get(name, '')[:64]!r}"
        + (f" ({_SET_BY[name]})" if name in _SET_BY else "")
        for name in sorted(mine.keys() | other.keys())
        if mine.get(name) != other.get(name)
    ]
