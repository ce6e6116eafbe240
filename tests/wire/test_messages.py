"""The wire format: round trips, the same bytes through an independent msgpack, and every bound refused.

Strategies and bad values come from the message types themselves (`wire_values`), so a new field is tested when added.
"""

import contextlib

import msgpack
import msgspec
import pytest
from damage import flipped
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from wire_values import assert_bounded, refuse_all, valid, within

from pdx.errors import ProtocolError
from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Slot
from pdx.wire import messages
from pdx.wire.base import MAX_KEYS
from pdx.wire.messages import (
    MAX_FRAME_BYTES,
    Admit,
    Cancel,
    Fill,
    FromNode,
    Mark,
    ToNode,
    decode_from_node,
    decode_to_node,
    encode,
)
from pdx.wire.proxy import (
    Arriving,
    Changes,
    Follow,
    NodeReport,
    Order,
    PeerList,
    Prefilled,
    Reply,
    decode_from_proxy,
    decode_to_proxy,
)

DECODERS = {
    ToNode: decode_to_node,
    FromNode: decode_from_node,
    NodeReport: decode_to_proxy,
    Cancel: decode_from_proxy,
    PeerList: decode_from_proxy,
    Prefilled: decode_from_proxy,
    Arriving: decode_from_proxy,
    Order: decode_from_proxy,
    Reply: decode_to_proxy,
    Follow: decode_from_proxy,
    Changes: decode_to_proxy,
}
BODIES = [*msgspec.inspect.type_info(messages.Ask).types, *msgspec.inspect.type_info(messages.Answer).types]
# Only a node makes these, and only tools read them, of its own user or through a proxy; no number there is acted on.
UNBOUNDED = {"NodeStatus", "AttachedStatus"}
TRANSFER = "0123456789abcdef"


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
    assert msgpack.unpackb(frame) == [7, True, ["Fill", [[4096, 100, 3, 0]], 2, 1, True]]
    assert frame.hex() == "9307c395a446696c6c9194cd10006403000201c3"


# ---- values out of bounds, from the types --------------------------------------------------------


@pytest.mark.parametrize("kind", BODIES[: len(inspect.type_info(messages.Ask).types)], ids=lambda kind: kind.tag)
def test_a_node_refuses_every_value_out_of_bounds(kind):
    """CVE-2026-93838, CVE-2026-94626: one unbounded integer was enough to exhaust memory."""
    count = refuse_all(kind, lambda body: [1, True, body], decode_to_node)
    assert count or not kind.fields


@pytest.mark.parametrize("kind", BODIES[len(inspect.type_info(messages.Ask).types) :], ids=lambda kind: kind.tag)
def test_a_client_refuses_every_value_out_of_bounds(kind):
    if kind.tag not in UNBOUNDED:
        refuse_all(kind, lambda body: [1, body], decode_from_node)


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind not in (ToNode, FromNode)])
def test_node_and_proxy_refuse_every_value_out_of_bounds(kind):
    assert refuse_all(inspect.type_info(kind), lambda body: body, DECODERS[kind])


@pytest.mark.parametrize("seq", [0, -1, 1 << 63, "1", None, 1.0, []])
def test_an_envelope_with_an_impossible_number_is_refused(seq):
    with pytest.raises(ProtocolError):
        decode_to_node(msgpack.packb([seq, True, ["Status"]]))


def test_every_field_that_crosses_a_process_has_a_bound():
    for kind in DECODERS:
        assert_bounded(inspect.type_info(kind), kind.__name__, UNBOUNDED)


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
    for body in (encode(ToNode(1, True, Admit([]))), encode(Cancel(TRANSFER))):
        refused_by_all(body + b"\x00")


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read():
    frame = encode(ToNode(1, True, Admit([]))) + bytes(MAX_FRAME_BYTES)
    for decode in DECODERS.values():
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            decode(frame)


def test_the_largest_message_fits_into_a_frame():
    slots = [Slot(1 << 47, 1 << 47, (1 << 63) - 1)] * MAX_KEYS
    fill = ToNode((1 << 63) - 1, True, Fill(slots, 4095, 4096, seal=True))
    keys = [b"k" * KEY_BYTES] * MAX_KEYS
    admit = ToNode(1, True, Admit(keys, 1 << 48, 4096, 1023, 86_400.0, 1 << 48, True, "t" * 64, "expects"))
    found = FromNode(1, messages.Admitted(MAX_KEYS, slots * 8, 1 << 62))
    granted = FromNode(1, messages.Admitted(granted=list(range(MAX_KEYS)), granted_slots=slots * 8))
    for message in (fill, admit, found, granted):
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
    frame = flipped(encode(message), data)
    for decode in DECODERS.values():
        with contextlib.suppress(ProtocolError):
            decode(frame)


def test_a_timeline_event_is_bounded_text():
    with pytest.raises(ProtocolError):
        decode_to_node(encode(ToNode(1, False, Mark(TRANSFER, "e" * 33, 1))))
