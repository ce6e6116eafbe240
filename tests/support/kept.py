"""What an object keeps in memory, wherever in it that is: whatever is over must not be left there."""

from __future__ import annotations

import gc
from collections import Counter
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_NOTHING = (type, FunctionType, BuiltinFunctionType, ModuleType, Enum, str, bytes, int, float, type(None))


def kept(of: Any, *others: Any) -> Counter[str]:
    """How many objects it leads to, by type, and how many entries those have; without these `others`."""
    seen, left = {id(of), *map(id, others)}, [of]
    found: Counter[str] = Counter()
    while left:
        each = left.pop()
        found[type(each).__name__] += 1
        if isinstance(each, Counter):
            found["entry"] += sum(map(bool, each.values()))
        elif isinstance(each, dict | set):
            found["entry"] += len(each)
        more = [one for one in gc.get_referents(each) if not isinstance(one, _NOTHING) and id(one) not in seen]
        left += {id(one): one for one in more}.values()
        seen.update(map(id, more))
    return found
