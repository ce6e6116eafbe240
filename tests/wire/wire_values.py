"""Values that a msgspec type allows, and values that it must refuse, derived from the type itself."""

import copy
import re

import msgpack
import pytest
from hypothesis import strategies as st
from msgspec import inspect

from pdx.errors import ProtocolError
from pdx.memory.keys import KEY_BYTES

TEXTS = (
    "abcdef0123456789",
    "abcdef-0123456789",
    "abcdef",
    "a:bcdef-0123456789",
    "moved",
)  # one for each pattern


def within(kind):
    """A strategy of values that a msgspec type allows."""
    match kind:
        case inspect.IntType():
            low = kind.ge if kind.ge is not None else -(1 << 63)
            high = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else (1 << 63) - 1)
            return st.integers(low, high) | st.sampled_from([low, high])
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False, allow_infinity=False)
        case inspect.StrType(pattern=None):
            most = min(kind.max_length or 20, 20)
            return st.text(st.characters(codec="utf-8"), min_size=kind.min_length or 0, max_size=most)
        case inspect.StrType(min_length=None):
            most = kind.max_length if kind.max_length is not None else 1 << 20
            return st.from_regex(re.compile(kind.pattern, re.ASCII)).filter(lambda text: len(text) <= most)
        case inspect.StrType():
            return st.from_regex(f"[0-9a-zA-Z_-]{{{kind.min_length},{kind.max_length}}}", fullmatch=True)
        case inspect.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 20, 20))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of(*map(within, kind.types))
        case inspect.ListType():
            return st.lists(within(kind.item_type), max_size=4)
        case inspect.DictType():
            return st.dictionaries(within(kind.key_type), within(kind.value_type), max_size=3)
        case inspect.StructType():
            return st.builds(kind.cls, **{field.name: within(field.type) for field in kind.fields})
    raise AssertionError(f"no strategy for {kind}")


def beyond(kind):
    """Wire values that a msgspec type must refuse."""
    match kind:
        case inspect.IntType():
            low = kind.ge if kind.ge is not None else -(1 << 63)
            high = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else None
            yield from [low - 1] if low > -(1 << 63) else []
            yield from [high + 1] if high is not None else []
            yield from [-1, -(1 << 63)] if low >= 0 else []
            yield from ["1", None, [], {}, 1.5, b"1"]
            yield from [(1 << 64) - 1] if high is not None else []
        case inspect.FloatType():
            yield from ["1", None, float("nan"), float("inf"), float("-inf"), -1e-9, (kind.le or 0) * 1.01, 1 << 63]
        case inspect.StrType():
            yield from [1, None, [], b"\xff" * 20]
            yield from ["x" * (kind.max_length + 1)] if kind.max_length is not None else []
            yield from ["x" * (kind.min_length - 1)] if kind.min_length else []
            if kind.pattern:
                yield from ["x" * 20 + bad for bad in ("\n", " ", "/", "\0", ".", "é", "\n\n")]
                yield from ["\n" + "x" * 20, "x" * 65, *([] if re.search(kind.pattern, "") else [""])]
        case inspect.BytesType():
            yield from [1, None, []]
            yield b"k" * (kind.max_length + 1)
            yield from [b"k" * (kind.min_length - 1), b""] if kind.min_length else []
        case inspect.BoolType():
            yield from [0, 1, "true", None, []]
        case inspect.LiteralType():
            yield from ["", "nobody", 0, None, []]
        case inspect.ListType():
            yield from [None, {}, "list", 1, [None], [[]]]
            yield from [] if isinstance(kind.item_type, inspect.ListType) else [[[0]]]
            yield [valid(kind.item_type)] * (kind.max_length + 1) if kind.max_length is not None else None
        case inspect.DictType():
            yield from [None, [], "dict"]
            name, value = valid(kind.key_type), valid(kind.value_type)
            yield from ({bad: value} for bad in beyond(kind.key_type) if isinstance(bad, (str, int)))
            yield from ({name: bad} for bad in beyond(kind.value_type))
        case inspect.UnionType():
            for member in kind.types:
                if not isinstance(member, (inspect.NoneType, inspect.StructType)):
                    yield from (bad for bad in beyond(member) if bad is not None)
        case inspect.StructType():
            yield from [None, 1, "x", {}]
            yield from [[]] if kind.tag is not None or any(field.required for field in kind.fields) else []


def valid(kind):
    """One wire value that a type allows."""
    match kind:
        case inspect.IntType():
            return max(1, kind.ge or 0)
        case inspect.FloatType():
            return 1.0
        case inspect.StrType():
            return next(text for text in TEXTS if re.search(kind.pattern or "", text))
        case inspect.BytesType():
            return b"k" * min(KEY_BYTES, kind.max_length or KEY_BYTES)
        case inspect.BoolType():
            return False
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.UnionType():
            return valid(next(member for member in kind.types if not isinstance(member, inspect.NoneType)))
        case inspect.ListType():
            return [valid(kind.item_type)]
        case inspect.DictType():
            return {}
        case inspect.StructType(array_like=False):
            return {field.encode_name: valid(field.type) for field in kind.fields}
        case inspect.StructType():
            tag = [kind.tag] if kind.tag is not None else []
            return tag + [valid(field.type) for field in kind.fields]
    raise AssertionError(kind)


def spoiled(kind, path=()):
    """(path, bad value) for every field within a struct type, however deep."""
    offset = kind.tag is not None
    for index, field in enumerate(kind.fields):
        here = (*path, index + offset)
        for bad in beyond(field.type):
            yield here, bad
        inner = field.type
        if isinstance(inner, inspect.UnionType):  # its first type that is not None, as in `valid`
            inner = next(member for member in inner.types if not isinstance(member, inspect.NoneType))
        if isinstance(inner, inspect.ListType) and isinstance(inner.item_type, inspect.StructType):
            yield from spoiled(inner.item_type, (*here, 0))
        if isinstance(inner, inspect.StructType):
            yield from spoiled(inner, here)


def refuse_all(kind, envelope, decode):
    """Check that `decode` refuses each spoiled value of a message in its envelope; how many there were."""
    assert decode(msgpack.packb(envelope(valid(kind))))  # the unspoiled message is fine
    count = 0
    for path, bad in spoiled(kind):
        wire = copy.deepcopy(valid(kind))
        parent = wire
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = bad
        with pytest.raises(ProtocolError):
            pytest.fail(f"accepted {bad!r:.60} at {path}: {decode(msgpack.packb(envelope(wire)))!r:.200}")
        count += 1
    return count


def assert_bounded(kind, where, exempt=frozenset()):
    """Fail if a field of a type, however deep, has no bound; `exempt` names structs that need none."""
    match kind:
        case inspect.IntType():
            assert kind.ge is not None, where
            assert kind.le is not None or kind.lt is not None, where
        case inspect.StrType(max_length=None):
            assert kind.pattern, where
            assert not any(re.search(kind.pattern, letter * 1000) for letter in "aA0_"), where
        case inspect.StrType():
            pass
        case inspect.BytesType():
            assert kind.max_length is not None, where
        case inspect.ListType():
            assert kind.max_length is not None, where
            assert_bounded(kind.item_type, where, exempt)
        case inspect.DictType():
            assert kind.max_length is not None, where
            assert_bounded(kind.key_type, where, exempt)
            assert_bounded(kind.value_type, where, exempt)
        case inspect.FloatType():
            assert kind.ge is not None, where
            assert kind.le is not None, where
        case inspect.StructType() if kind.cls.__name__ not in exempt:
            for field in kind.fields:
                assert_bounded(field.type, f"{kind.cls.__name__}.{field.name}", exempt)
        case inspect.UnionType():
            for member in kind.types:
                assert_bounded(member, where, exempt)
        case inspect.StructType() | inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            pass
        case _:
            raise AssertionError(f"{where}: what bounds {kind}?")
