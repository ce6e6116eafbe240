"""The wire format: round trips, the same bytes through an independent msgpack, and every bound refused.

Strategies and bad values come from the message types themselves (`wire_values`), so a new field is tested when added.
"""

import contextlib

import msgpack
import msgspec
import pytest
from damage import flipped
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect
from wire_values import assert_bounded, refuse_all, valid, within

from pdx.errors import ProtocolError
from pdx.memory.keys import KEY_BYTES
from pdx.memory.slot import Slot
from pdx.transports.channel import MAX_DETAIL_BYTES, MAX_NOTIFY_BYTES, TOKEN_BYTES, RemoteRegion
from pdx.wire import messages, proxy
from pdx.wire.base import MAX_KEYS, MAX_SCHEMES

DECODERS = {
    messages.ToNode: messages.decode_to_node,
    messages.FromNode: messages.decode_from_node,
    proxy.NodeReport: proxy.decode_to_proxy,
    messages.Cancel: proxy.decode_from_proxy,
    proxy.PeerList: proxy.decode_from_proxy,
    proxy.Prefilled: proxy.decode_from_proxy,
    proxy.Arriving: proxy.decode_from_proxy,
    proxy.Order: proxy.decode_from_proxy,
    proxy.Reply: proxy.decode_to_proxy,
    proxy.Follow: proxy.decode_from_proxy,
    proxy.Changes: proxy.decode_to_proxy,
    messages.PeerFrame: messages.decode_peer,
    messages.Landed: messages.decode_landed,
}
# Of each envelope with bodies: how one is put into it.
ENVELOPES = {messages.ToNode: (1, True), messages.FromNode: (1,), messages.PeerFrame: (1, 0)}
BODIES = [
    (envelope, kind)
    for envelope in ENVELOPES
    for field in inspect.type_info(envelope).fields
    if field.name == "body"
    for kind in field.type.types
]
of_bodies = pytest.mark.parametrize(
    ("envelope", "kind"), BODIES, ids=[f"{envelope.__name__}-{kind.tag}" for envelope, kind in BODIES]
)
# Only a node makes these, and only tools read them, of its own user or through a proxy; no number there is acted on.
UNBOUNDED = {"NodeStatus", "AttachedStatus"}
TRANSFER = "0123456789abcdef"


FRAMES = {kind: within(inspect.type_info(kind)) for kind in DECODERS}
any_message = st.one_of(*FRAMES.values())


@given(any_message)
@settings(max_examples=examples(200))
def test_every_message_comes_back_as_it_was_and_an_independent_msgpack_reads_and_writes_the_same_bytes(message):
    frame = messages.encode(message)
    assert DECODERS[type(message)](frame) == message
    plain = msgpack.unpackb(frame, strict_map_key=False)
    assert msgpack.packb(plain) == frame
    assert plain == msgspec.to_builtins(message, builtin_types=(bytes,))


def test_the_bytes_of_a_message_are_pinned():
    """What another implementation must send; changing it needs another VERSION."""
    frame = messages.encode(messages.ToNode(7, True, messages.Fill([Slot(4096, 100, 3)], first_layer=2, seal=True)))
    assert msgpack.unpackb(frame) == [7, True, ["Fill", [[4096, 100, 3, 0]], 2, 1, True, None]]
    assert frame.hex() == "9307c396a446696c6c9194cd10006403000201c3c0"
    assert messages.VERSION == 14
    frame = messages.encode(
        messages.PeerFrame(7, 3, messages.Admitted(granted=[0, 2], granted_slots=[Slot(4096, 100, 3)]))
    )
    assert msgpack.unpackb(frame) == [
        7,
        3,
        ["Admitted", 0, [], 0, False, [0, 2], [[4096, 100, 3, 0]], False, False, 0, [], 0.0, b""],
    ]
    assert frame == bytes.fromhex(
        "9307039da841646d69747465640090 00c29200029194cd1000640300c2c20090 cb0000000000000000 c400"
    )
    landed = messages.encode(messages.Landed(9, [messages.Slices(8192, 4, 2, 1, b"01234567")]))
    assert msgpack.unpackb(landed) == [9, [[8192, 4, 2, 1, b"01234567"]]]


# ---- values out of bounds, from the types --------------------------------------------------------


@of_bodies
def test_every_value_of_a_body_out_of_bounds_is_refused(envelope, kind):
    """CVE-2026-93838, CVE-2026-94626: one unbounded integer was enough to exhaust memory."""
    if kind.tag not in UNBOUNDED:
        count = refuse_all(kind, lambda body: [*ENVELOPES[envelope], body], DECODERS[envelope])
        assert count or not kind.fields


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind not in ENVELOPES])
def test_every_value_out_of_bounds_is_refused(kind):
    assert refuse_all(inspect.type_info(kind), lambda body: body, DECODERS[kind])


@pytest.mark.parametrize("seq", [0, -1, 1 << 63, "1", None, 1.0, []])
def test_an_envelope_with_an_impossible_number_is_refused(seq):
    for decode, rest in ((messages.decode_to_node, [True, ["Status"]]), (messages.decode_peer, [0, ["Ping"]])):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb([seq, *rest]))


def test_every_field_that_crosses_a_process_has_a_bound():
    for kind in DECODERS:
        assert_bounded(inspect.type_info(kind), kind.__name__, UNBOUNDED)


@pytest.mark.parametrize(
    "region",
    [
        ["../../evil", 1, b"t" * TOKEN_BYTES, b""],
        ["os.system", 1, b"t" * TOKEN_BYTES, b""],
        ["tcp", 1, b"t" * TOKEN_BYTES, ["pickle", b"."]],
    ],
)
def test_a_handle_of_remote_memory_is_plain_and_bounded(region):
    """CVE-2026-115912, CVE-2026-105192: handles of memory carried pickles; ours name no class and no path."""
    with pytest.raises(ProtocolError):
        messages.decode_peer(
            msgpack.packb([1, 0, ["Welcome", 1, 1, "", 0, 0, "", "", b"", messages.VERSION, "n", "h", [region]]])
        )


# ---- frames that are no messages ------------------------------------------------------------------


def refused_by_all(frame):
    for decode in DECODERS.values():
        with pytest.raises(ProtocolError):
            decode(frame)


@of_bodies
def test_a_message_cut_short_at_any_byte_is_refused(envelope, kind):
    frame, decode = msgpack.packb([*ENVELOPES[envelope], valid(kind)]), DECODERS[envelope]
    decode(frame)
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:length])


def test_an_unknown_tag_is_refused():
    refused_by_all(msgpack.packb([1, True, ["Exec", "rm"]]))
    refused_by_all(msgpack.packb([1, ["Exec"]]))
    refused_by_all(msgpack.packb(["Exec"]))
    refused_by_all(msgpack.packb([1, 0, ["Exec", "rm"]]))
    refused_by_all(msgpack.packb([1, 0, ["Fill"]]))


def test_trailing_bytes_are_refused():
    for message in (
        messages.ToNode(1, True, messages.Admit([])),
        messages.Cancel(TRANSFER),
        messages.PeerFrame(1, 0, messages.Admit([])),
        messages.Landed(1, []),
    ):
        refused_by_all(messages.encode(message) + b"\x00")


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read():
    frame = messages.encode(messages.ToNode(1, True, messages.Admit([]))) + bytes(messages.MAX_FRAME_BYTES)
    for decode in DECODERS.values():
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            decode(frame)
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        messages.decode_landed(messages.encode(messages.Landed(1, [])) + bytes(MAX_NOTIFY_BYTES))


def test_the_largest_message_fits_into_a_frame():
    slots = [Slot(1 << 47, 1 << 47, (1 << 63) - 1)] * MAX_KEYS
    fill = messages.ToNode((1 << 63) - 1, True, messages.Fill(slots, 4095, 4096, seal=True))
    keys = [b"k" * KEY_BYTES] * MAX_KEYS
    admit = messages.ToNode(
        1, True, messages.Admit(keys, 1 << 48, 4096, 1023, 86_400.0, 1 << 48, True, "t" * 64, "expects")
    )
    found = messages.FromNode(1, messages.Admitted(MAX_KEYS, slots * 8, 1 << 62, sources=bytes(MAX_KEYS + 1)))
    granted = messages.FromNode(1, messages.Admitted(granted=list(range(MAX_KEYS)), granted_slots=slots * 8))
    for message in (fill, admit, found, granted):
        assert DECODERS[type(message)](messages.encode(message)) == message


def test_the_largest_messages_of_peers_fit_into_a_frame():
    slots = [Slot(1 << 47, 1 << 47, (1 << 63) - 1)] * (MAX_KEYS * 8)
    keys = [b"k" * KEY_BYTES] * MAX_KEYS
    region = RemoteRegion("s" * 32, 1 << 48, b"t" * TOKEN_BYTES, bytes(MAX_DETAIL_BYTES))
    for body in (
        messages.Admit(keys, 1 << 48, 4096, 1024, 0.0, 1 << 48, True, "t" * 64, layout=b"l" * KEY_BYTES, want=1 << 62),
        messages.Admitted(granted=[MAX_KEYS] * MAX_KEYS, granted_slots=slots),
        messages.Push(keys, "", 1024, "t" * 64),
        messages.Hello(
            1,
            1,
            "peer",
            "é" * 256,
            epoch=1 << 62,
            host="h" * 64,
            schemes=["s" * 32] * MAX_SCHEMES,
            layouts=[b"l" * KEY_BYTES] * 1024,
        ),
        messages.Welcome(
            1,
            1,
            name="n",
            host="h",
            regions=[region] * MAX_SCHEMES,
            probe=slots[0],
            layouts=[b"l" * KEY_BYTES] * 1024,
        ),
        messages.Refused("PeerRefused", "é" * 1024),
        messages.Release(1, complete=True),
    ):
        message = messages.PeerFrame((1 << 63) - 1, 1 << 62, body)
        assert messages.decode_peer(messages.encode(message)) == message


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 100_000,
        b"\x81\xa1a" * 50_000,
        b"\x93\x01\xc3" * 50_000,
        b"\x94\xa4Fill" * 20_000,
        b"\x94\xa5Admit" * 20_000,
    ],
)
def test_deep_nesting_is_refused(bomb):
    refused_by_all(bomb)
    refused_by_all(b"\x93\x01\xc3" + bomb)
    refused_by_all(b"\x93\x01\x00" + bomb)
    refused_by_all(b"\x93\x01\xc3\x94\xa4Fill" + bomb)


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_length_that_lies_allocates_nothing(head):
    refused_by_all(head)
    refused_by_all(b"\x93\x01\xc3\x92\xa6Delete" + head)
    refused_by_all(b"\x93\x01\x00\x93\xa8Admitted\x01" + head)
    refused_by_all(b"\x93\x01\x00" + head)


@given(st.binary(max_size=200))
@settings(max_examples=examples(500))
def test_random_bytes_raise_nothing_but_protocol_error(frame):
    for decode in DECODERS.values():
        with contextlib.suppress(ProtocolError):
            decode(frame)


@given(any_message, st.data())
@settings(max_examples=examples(500))
def test_flipped_bytes_raise_nothing_but_protocol_error(message, data):
    frame = flipped(messages.encode(message), data)
    for decode in DECODERS.values():
        with contextlib.suppress(ProtocolError):
            decode(frame)
