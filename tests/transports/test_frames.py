"""What travels over a stream: it comes back as it was, is cut alike on both sides, and nothing else is understood."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import ProtocolError
from pdx.transports import frames
from pdx.transports.arrivals import WINDOW, Arrivals
from pdx.transports.channel import MAX_NOTIFY_BYTES, MAX_PIECES, Piece, merged
from pdx.transports.frames import MAX_STREAMS, MIN_PART_BYTES, OK, Ack, Greeting, Head, cut, parts_of

TOKEN = secrets.token_bytes(16)
PIECES = st.lists(
    st.builds(Piece, st.integers(0, 1 << 48), st.integers(0, 1 << 48), st.integers(1, 4 << 20)), min_size=1, max_size=40
)


def addresses(pieces):
    """Each run of bytes as (local, remote, nbytes), neighbours joined."""
    return [(piece.local, piece.remote, piece.nbytes) for piece in merged(pieces)]


def test_a_reason_comes_back_in_one_line_that_can_be_logged():
    packed = frames.pack_answer(TOKEN, frames.UNREACHABLE, "no way\nto GPU\x1b[31m é")
    ack = frames.unpack_ack(packed[: frames.ACK_BYTES])
    assert frames.reason_bytes(ack) == len(packed) - frames.ACK_BYTES
    assert frames.unpack_reason(packed[frames.ACK_BYTES :]) == "no way?to GPU?[31m é"
    assert frames.pack_answer(TOKEN, OK) == frames.pack_ack(Ack(TOKEN, 0, OK))


@given(st.text(max_size=4000))
def test_a_reason_is_bounded(text):
    packed = frames.pack_answer(TOKEN, frames.UNREACHABLE, text)
    ack = frames.unpack_ack(packed[: frames.ACK_BYTES])
    assert frames.reason_bytes(ack) == len(packed) - frames.ACK_BYTES <= frames.MAX_REASON_BYTES
    with pytest.raises(ProtocolError):
        frames.reason_bytes(Ack(TOKEN, frames.MAX_REASON_BYTES + 1, frames.UNREACHABLE))


def head_of(body, **changes):
    return Head(**{"token": TOKEN, "number": 0, "part": 0, "parts": 1, "body_bytes": len(body), **changes})


@given(PIECES, st.integers(1, MAX_STREAMS))
def test_parts_are_the_whole_write(pieces, streams):
    """No byte twice, none missing, in order."""
    parts = parts_of(sum(piece.nbytes for piece in pieces), streams)
    together = [piece for part in range(parts) for piece in cut(pieces, part, parts)]
    assert addresses(together) == addresses(pieces)
    assert all(cut(pieces, part, parts) for part in range(parts))


@given(PIECES, st.binary(max_size=300))
def test_a_write_comes_back_as_it_was(pieces, notify):
    packed = frames.pack_body(pieces, notify)
    head = head_of(packed, number=2**64 - 1, part=3, parts=9)
    first, *rest = frames.pack_part(head, packed)
    assert len(first) == frames.HEAD_BYTES
    assert frames.unpack_head(first) == head
    body = frames.inline_body(head, bytearray(first)) or b"".join(rest)
    assert frames.unpack_body(body) == frames.Body(pieces, notify)


def test_the_largest_write_is_within_the_bounds():
    pieces = [Piece(1 << 48, 1 << 48, 1 << 48)] * MAX_PIECES
    packed = frames.pack_body(pieces, bytes(MAX_NOTIFY_BYTES))
    assert frames.unpack_head(frames.pack_part(head_of(packed), packed)[0]).body_bytes == len(packed)


def test_greetings_and_acknowledgements_come_back():
    greeting = Greeting(TOKEN, secrets.token_bytes(16), 2, 3)
    packed = frames.pack_greeting(greeting)
    split = frames.GREETING_HEAD_BYTES
    assert frames.greeting_bytes(packed[:split]) == len(packed) - split
    assert frames.unpack_greeting(packed[split:]) == greeting
    ack = Ack(TOKEN, 77, OK)
    assert frames.unpack_ack(frames.pack_ack(ack)) == ack


@given(st.binary(max_size=200))
def test_anything_else_is_a_protocol_error(data):
    for unpack, size in (
        (frames.unpack_greeting, None),
        (frames.unpack_body, None),
        (frames.greeting_bytes, frames.GREETING_HEAD_BYTES),
        (frames.unpack_head, frames.HEAD_BYTES),
        (frames.unpack_ack, frames.ACK_BYTES),
    ):
        with pytest.raises(ProtocolError):
            unpack(data if size is None else data[:size].ljust(size, b"x"))


def begin(arrivals, number, part=0, parts=1, pieces=None, nbytes=1):
    packed = frames.pack_body(pieces or [Piece(0, 0, nbytes)], b"")
    return arrivals.begin(head_of(packed, number=number, part=part, parts=parts), packed)


def test_what_is_remembered_is_bounded_by_the_window():
    """However many writes there are, in whatever order they end within the window."""
    arrivals = Arrivals()
    for first in range(0, 4 * WINDOW, WINDOW):
        for number in reversed(range(first, first + WINDOW)):
            assert arrivals.end_part(begin(arrivals, number))
            with pytest.raises(ProtocolError):
                begin(arrivals, number)
        assert not arrivals.unfinished()
        assert not arrivals._over
        with pytest.raises(ProtocolError):
            begin(arrivals, first)
        with pytest.raises(ProtocolError):
            begin(arrivals, first + 2 * WINDOW)


def test_a_write_is_over_with_its_last_part():
    arrivals = Arrivals()
    size = 3 * MIN_PART_BYTES
    several = [begin(arrivals, 0, part, 3, nbytes=size) for part in (2, 0, 1)]
    assert len({id(arrival) for arrival in several}) == 1
    assert [arrivals.end_part(arrival) for arrival in several] == [False, False, True]


@pytest.mark.parametrize(
    "second",
    [
        {"part": 0},
        {"part": 1, "parts": 4},
        {"part": 1, "pieces": [Piece(0, 1, 3 * MIN_PART_BYTES)]},
        {"part": 1, "pieces": [Piece(1, 0, 3 * MIN_PART_BYTES)]},
    ],
    ids=["twice", "another count", "another place", "another source"],
)
def test_parts_that_do_not_fit_together(second):
    arrivals = Arrivals()
    common = {"parts": 3, "pieces": [Piece(0, 0, 3 * MIN_PART_BYTES)]}
    begin(arrivals, 0, part=0, **common)
    with pytest.raises(ProtocolError):
        begin(arrivals, 0, **{**common, **second})


def test_more_parts_than_the_write_has_room_for():
    with pytest.raises(ProtocolError):
        begin(Arrivals(), 0, parts=2, nbytes=2 * MIN_PART_BYTES - 1)
