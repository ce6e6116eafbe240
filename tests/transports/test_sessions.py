"""The spans granted to a session: what may be written to, and when it is free again."""

import random
import threading

from pdx.transports.channel import MAX_UNTAKEN_BYTES, NOTIFICATION_BYTES, Piece
from pdx.transports.sessions import SessionListener, WriteSession


def test_notifications_that_nobody_takes_are_bounded_however_little_they_say():
    """Each costs memory."""
    listener = SessionListener("x", 8192, threading.Event(), b"")
    listener.invite(bytes(16))
    listener.grant(bytes(16), 0, 8192)
    session = listener.find(bytes(16))
    for _ in range(MAX_UNTAKEN_BYTES // NOTIFICATION_BYTES):
        assert session.has_room
        listener.land(session, listener.enter(session, [Piece(0, 0, 1)]), b"")
    assert not session.has_room
    assert len(listener.take()) == MAX_UNTAKEN_BYTES // NOTIFICATION_BYTES
    assert session.has_room


def test_spans_that_come_and_go_are_found_as_by_looking_at_all():
    draw = random.Random(3)
    spans, model, entered = WriteSession(), {}, []
    for _ in range(5000):
        start = draw.randrange(64) * 16
        match draw.randrange(4):
            case 0:
                model[start] = draw.randrange(1, 17)
                spans.grant(start, model[start])
            case 1 if start in model:
                is_free = spans.revoke(start, model.pop(start))
                assert is_free == (not any(start in one for one in entered))
            case 2 if entered:
                spans.leave(entered.pop(draw.randrange(len(entered))))
            case _:
                offset, nbytes = draw.randrange(1024), draw.randrange(1, 17)
                inside = [at for at, size in model.items() if at <= offset and offset + nbytes <= at + size]
                found = spans.enter([(offset, nbytes)])
                assert found == (inside or None)
                if found:
                    entered.append(found)
    spans.end()
    assert spans.enter([(start, 1) for start in model]) is None
