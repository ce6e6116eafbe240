"""Eviction policies by name. Built-in ones are listed here; others are entry points in the group `pdx.policies`.

    [project.entry-points."pdx.policies"]
    mine = "mypackage.mymodule:make"

`make(total_bytes, argument)` returns a `pdx.store.policies.policy.EvictionPolicy` for an arena or disk of so many
bytes; `argument` is the text after the colon in `--policy mine:argument`, or empty.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from pdx.errors import ConfigError
from pdx.store.policies.gittins import Gittins
from pdx.store.policies.lru import Lru
from pdx.store.policies.policy import EvictionPolicy
from pdx.store.policies.ranks import Age
from pdx.store.policies.s3fifo import S3Fifo

GROUP = "pdx.policies"
Maker = Callable[[int], EvictionPolicy[Any]]  # makes a policy for an arena or a disk of so many bytes
_SIZED: dict[str, Maker] = {"lru": lambda _: Lru(), "s3fifo": S3Fifo, "gittins": Gittins}
_TIMED = {"age": False, "idle": True}  # -> whether a use restarts the time limit


def names() -> list[str]:
    """The names of all policies, built-in ones first."""
    ours = [*_SIZED, *_TIMED]
    return [*ours, *sorted({point.name for point in entry_points(group=GROUP)}.difference(ours))]


def find(setting: str, now: Callable[[], float] | None = None, option: str = "--policy") -> Maker:
    """The maker of the policy that `option` names. `now`: its clock, if it needs one; `time.monotonic` by default.

    :raises ConfigError: there is no such policy, or its argument is invalid.
    """
    name, colon, argument = setting.partition(":")
    said = f"{option} {setting}"
    if name in _TIMED:
        seconds = _seconds(said, name, argument)
        return lambda _: Age(seconds, now or time.monotonic, is_idle=_TIMED[name])
    if name in _SIZED:
        if colon:
            raise ConfigError(f"{said}: {name} takes nothing behind a colon")
        return _SIZED[name]
    point = next((point for point in entry_points(group=GROUP) if point.name == name), None)
    if point is None:
        raise ConfigError(f"{said}: no policy is named {name!r}; there are {', '.join(names())}")
    try:
        make = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{said}: {point.value} cannot be had: {error}") from error
    return lambda total_bytes: make(total_bytes, argument)


def _seconds(said: str, name: str, argument: str) -> float:
    try:
        seconds = float(argument)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e9:
        raise ConfigError(f"{said}: say after how many seconds a chunk goes, as in {name}:3600")
    return seconds
