"""The wire format: round trips, the same bytes through an independent msgpack, and every bound refused.

Strategies and bad values are derived from the message types themselves, so a new field is tested when it is added.
"""

import contextlib
import copy

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from pdx import messages
from pdx.errors import ProtocolError
from pdx.messages import (
    KEY_BYTES,
    MAX_FRAME_BYTES,
    MAX_KEYS,
    Cancel,
    Fill,
    FromNode,
    Lookup,
    Mark,
    NodeReport,
    Slot,
    ToNode,
    decode_from_node,
    decode_from_proxy,
    decode_to_node,
    decode_to_proxy,
    encode,
)

DECODERS = {
    ToNode: decode_to_node,
    FromNode: decode_from_node,
    NodeReport: decode_to_proxy,
    Cancel: decode_from_proxy,
}
BODIES = [*msgspec.inspect.type_info(messages.Ask).types, *msgspec.inspect.type_info(messages.Answer).types]
UNBOUNDED = {"NodeStatus", "AttachedStatus"}  # only a node makes these, only its own user's tools read them
TRANSFER = "0123456789abcdef"


# ---- values within bounds, from the types --------------------------------------------------------


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
            return st.text(st.characters(codec="utf-8"), min_size=kind.min_length or 0, max_size=20)
        case inspect.StrType():
            return st.from_regex(f"[0-9a-zA-Z_-]{{{kind.min_length},{kind.max_length}}}", fullmatch=True)
        case inspect.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=kind.max_length or 20)
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


FRAMES = {kind: within(inspect.type_info(kind)) for kind in DECODERS}
any_message = st.one_of(*FRAMES.values())


@given(any_message)
@settings(max_examples=400)
def test_every_message_comes_back_as_it_was(message):
    assert DECODERS[type(message)](encode(message)) == message


@given(any_message)
def test_an_independent_msgpack_reads_and_writes_the_same_bytes(message):
    frame = encode(message)
    plain = msgpack.unpackb(frame, strict_map_key=False)
    assert msgpack.packb(plain) == frame
    assert plain == msgspec.to_builtins(message, builtin_types=(bytes,))


def test_the_bytes_of_a_message_are_pinned():
    """What another implementation must send; changing it needs another VERSION."""
    frame = encode(ToNode(7, True, Fill([Slot(4096, 100, 3)], first_layer=2, seal=True)))
    assert msgpack.unpackb(frame) == [7, True, ["Fill", [[4096, 100, 3]], 2, 1, True]]
    assert frame.hex() == "9307c395a446696c6c9193cd100064030201c3"


# ---- values out of bounds, from the types --------------------------------------------------------


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
                yield "\n" + "x" * 20
        case inspect.BytesType():
            yield from [1, None, []]
            yield from [b"k" * (kind.max_length + 1), b"k" * (kind.min_length - 1), b""]
        case inspect.BoolType():
            yield from [0, 1, "true", None, []]
        case inspect.LiteralType():
            yield from ["", "nobody", 0, None, []]
        case inspect.ListType():
            yield from [None, {}, "list", 1, [None], [[]], [[0]]]
            item = {inspect.BytesType: b"k" * KEY_BYTES, inspect.IntType: 0}.get(type(kind.item_type), [0, 0, 0])
            if kind.max_length is not None and kind.max_length <= MAX_KEYS:
                yield [item] * (kind.max_length + 1)
        case inspect.UnionType():
            for member in kind.types:
                if not isinstance(member, (inspect.NoneType, inspect.StructType)):
                    yield from (bad for bad in beyond(member) if bad is not None)
        case inspect.StructType():
            yield from [None, 1, "x", {}, []]


def valid(kind):
    """One wire value that a type allows."""
    match kind:
        case inspect.IntType():
            return max(1, kind.ge or 0)
        case inspect.FloatType():
            return 1.0
        case inspect.StrType():
            return TRANSFER
        case inspect.BytesType():
            return b"k" * KEY_BYTES
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
        if isinstance(inner, inspect.ListType) and isinstance(inner.item_type, inspect.StructType):
            yield from spoiled(inner.item_type, (*here, 0))
        if isinstance(inner, inspect.StructType):
            yield from spoiled(inner, here)


def refuse_all(kind, envelope, decode):
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


@pytest.mark.parametrize("kind", BODIES[: len(inspect.type_info(messages.Ask).types)], ids=lambda kind: kind.tag)
def test_a_node_refuses_every_value_out_of_bounds(kind):
    """CVE-2026-93838, CVE-2026-94626: one unbounded integer was enough to exhaust memory."""
    count = refuse_all(kind, lambda body: [1, True, body], decode_to_node)
    assert count or not kind.fields


@pytest.mark.parametrize("kind", BODIES[len(inspect.type_info(messages.Ask).types) :], ids=lambda kind: kind.tag)
def test_a_client_refuses_every_value_out_of_bounds(kind):
    if kind.tag not in UNBOUNDED:
        refuse_all(kind, lambda body: [1, body], decode_from_node)


@pytest.mark.parametrize("kind", [NodeReport, Cancel])
def test_node_and_proxy_refuse_every_value_out_of_bounds(kind):
    assert refuse_all(inspect.type_info(kind), lambda body: body, DECODERS[kind])


@pytest.mark.parametrize("seq", [0, -1, 1 << 63, "1", None, 1.0, []])
def test_an_envelope_with_an_impossible_number_is_refused(seq):
    with pytest.raises(ProtocolError):
        decode_to_node(msgpack.packb([seq, True, ["Status"]]))


def test_every_field_that_crosses_a_process_has_a_bound():
    def check(kind, where):
        match kind:
            case inspect.IntType():
                assert kind.ge is not None, where
                assert kind.le is not None or kind.lt is not None, where
            case inspect.StrType() | inspect.BytesType() | inspect.ListType():
                assert kind.max_length is not None, where
                if isinstance(kind, inspect.ListType):
                    check(kind.item_type, where)
            case inspect.FloatType():
                assert kind.ge is not None, where
                assert kind.le is not None, where
            case inspect.StructType() if kind.cls.__name__ not in UNBOUNDED:
                for field in kind.fields:
                    check(field.type, f"{kind.cls.__name__}.{field.name}")
            case inspect.UnionType():
                for member in kind.types:
                    check(member, where)

    for kind in DECODERS:
        check(inspect.type_info(kind), kind.__name__)


# ---- frames that are no messages ------------------------------------------------------------------


def refused_by_all(frame):
    for decode in DECODERS.values():
        with pytest.raises(ProtocolError):
            decode(frame)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.tag)
def test_a_message_cut_short_at_any_byte_is_refused(kind):
    is_ask = kind in inspect.type_info(messages.Ask).types
    frame = msgpack.packb([1, True, valid(kind)] if is_ask else [1, valid(kind)])
    decode = decode_to_node if is_ask else decode_from_node
    decode(frame)
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:length])


def test_an_unknown_tag_is_refused():
    refused_by_all(msgpack.packb([1, True, ["Exec", "rm"]]))
    refused_by_all(msgpack.packb([1, ["Exec"]]))
    refused_by_all(msgpack.packb(["Exec"]))


def test_trailing_bytes_are_refused():
    for body in (encode(ToNode(1, True, Lookup([]))), encode(Cancel(TRANSFER))):
        refused_by_all(body + b"\x00")


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read():
    frame = encode(ToNode(1, True, Lookup([]))) + bytes(MAX_FRAME_BYTES)
    for decode in DECODERS.values():
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            decode(frame)


def test_the_largest_message_fits_into_a_frame():
    slots = [Slot(1 << 47, 1 << 47, (1 << 63) - 1)] * MAX_KEYS
    fill = ToNode((1 << 63) - 1, True, Fill(slots, 4095, 4096, seal=True))
    lookup = ToNode(1, True, Lookup([b"k" * KEY_BYTES] * MAX_KEYS, 1023, 86_400.0, "t" * 64))
    found = FromNode(1, messages.Found(MAX_KEYS, slots * 8, 1 << 62))
    for message in (fill, lookup, found):
        assert DECODERS[type(message)](encode(message)) == message


@pytest.mark.parametrize(
    "bomb",
    [b"\x91" * 100_000, b"\x81\xa1a" * 50_000, b"\x93\x01\xc3" * 50_000, b"\x94\xa4Fill" * 20_000],
)
def test_deep_nesting_is_refused(bomb):
    refused_by_all(bomb)
    refused_by_all(b"\x93\x01\xc3" + bomb)
    refused_by_all(b"\x93\x01\xc3\x94\xa4Fill" + bomb)


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_length_that_lies_allocates_nothing(head):
    refused_by_all(head)
    refused_by_all(b"\x93\x01\xc3\x92\xa6Delete" + head)


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_raise_nothing_but_protocol_error(frame):
    for decode in DECODERS.values():
        with contextlib.suppress(ProtocolError):
            decode(frame)


@given(any_message, st.data())
@settings(max_examples=500)
def test_flipped_bytes_raise_nothing_but_protocol_error(message, data):
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for decode in DECODERS.values():
        with contextlib.suppress(ProtocolError):
            decode(bytes(frame))


def test_a_timeline_event_is_bounded_text():
    with pytest.raises(ProtocolError):
        decode_to_node(encode(ToNode(1, False, Mark(TRANSFER, "e" * 33, 1))))
