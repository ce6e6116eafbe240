"""What travels over a stream: it comes back as it was, is cut alike on both sides, and nothing else is understood."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdx.errors import ProtocolError
from pdx.transports.channel import MAX_NOTIFY_BYTES, MAX_PIECES, Piece
from pdx.transports.streams import frames
from pdx.transports.streams.frames import OK

TOKEN = secrets.token_bytes(16)
PIECES = st.lists(
    st.builds(Piece, st.integers(0, 1 << 48), st.integers(0, 1 << 48), st.integers(1, 4 << 20)), min_size=1, max_size=40
)


def test_a_reason_comes_back_in_one_line_that_can_be_logged():
    packed = frames.pack_answer(frames.UNREACHABLE, "no way\nto GPU\x1b[31m é")
    assert frames.unpack_ack(packed[: frames.ACK_BYTES]) == (len(packed) - frames.ACK_BYTES, frames.UNREACHABLE)
    assert frames.unpack_reason(packed[frames.ACK_BYTES :]) == "no way?to GPU?[31m é"
    assert frames.pack_answer(OK) == frames.pack_ack(0, OK)


@given(PIECES, st.binary(max_size=300))
def test_a_write_comes_back_as_it_was(pieces, notify):
    packed = frames.pack_body(pieces, notify)
    first, *rest = frames.pack_write(2**64 - 1, packed)
    assert len(first) == frames.HEAD_BYTES
    number, body_bytes, inside = frames.unpack_head(first)
    assert (number, body_bytes) == (2**64 - 1, len(packed))
    assert frames.unpack_body(inside or b"".join(rest)) == frames.Body(pieces, notify)


def test_the_largest_write_is_within_the_bounds():
    pieces = [Piece(1 << 48, 1 << 48, 1 << 48)] * MAX_PIECES
    packed = frames.pack_body(pieces, bytes(MAX_NOTIFY_BYTES))
    assert frames.unpack_head(frames.pack_write(0, packed)[0])[1] == len(packed)


@given(st.binary(max_size=200))
def test_anything_else_is_a_protocol_error(data):
    for unpack, size in (
        (frames.unpack_greeting, frames.GREETING_BYTES),
        (frames.unpack_body, None),
        (frames.unpack_head, frames.HEAD_BYTES),
        (frames.unpack_ack, frames.ACK_BYTES),
    ):
        with pytest.raises(ProtocolError):
            unpack(data if size is None else data[:size].ljust(size, b"x"))
