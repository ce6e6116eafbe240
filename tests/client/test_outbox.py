"""What a process owes its node: order, merging, answers, losses."""

import pytest

from pdx.client import outbox
from pdx.client.outbox import Outbox, gives_back
from pdx.memory.slot import Slot
from pdx.wire.messages import Abort, Admit, Cancel, Fill, Mark, Ping, Release


def slot(number):
    return Slot(number * 4096, 4096, 7)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (Abort([slot(1)]), True),
        (Release(3), True),
        (Cancel("t" * 16), True),
        (Fill([slot(1)], seal=True), True),
        (Fill([slot(1)]), False),
        (Mark("t" * 16, "event", 1), False),
        (Ping(), False),
    ],
)
def test_what_gives_something_back(body, expected):
    assert gives_back(body) is expected


def add(box, *bodies, first=1, is_asked=False):
    for number, body in enumerate(bodies, first):
        assert box.add(number, body, is_asked=is_asked)


def send(box):
    """Send all that waits: numbers and bodies."""
    found = []
    while (waiting := box.next) is not None:
        found.append(waiting)
        box.sent(waiting[0])
    return found


def test_slots_that_wait_go_in_one_message_and_keep_their_place():
    box, first = Outbox(), [slot(1)]
    add(box, Abort(first), Abort([slot(2)]), Release(5), Abort([slot(3)]), Abort([slot(4)], unused=True))
    assert send(box) == [
        (1, Abort([slot(1), slot(2)])),
        (3, Release(5)),
        (4, Abort([slot(3)])),
        (5, Abort([slot(4)], unused=True)),
    ]
    assert first == [slot(1)], "the caller's own list"
    add(box, Abort([slot(9)]), first=6)
    assert send(box) == [(6, Abort([slot(9)]))], "what was sent grows no more"


def test_a_message_of_many_slots_is_bounded(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_MERGED", 3)
    box = Outbox()
    add(box, *(Abort([slot(number)]) for number in range(7)))
    assert [len(body.slots) for _, body in send(box)] == [3, 3, 1]


def test_an_abort_that_somebody_waits_for_is_a_message_of_its_own():
    box = Outbox()
    add(box, Abort([slot(1)]))
    add(box, Abort([slot(2)]), first=2, is_asked=True)
    add(box, Abort([slot(3)]), first=3)
    assert [number for number, _ in send(box)] == [1, 2, 3]
    assert box.answered(2).asked == 2
    assert box.answered(1).asked == 0


def test_what_is_never_answered_is_given_up():
    box = Outbox()
    add(box, Release(1))
    for number in range(10, 10 + outbox.MAX_TIMES - 1):
        send(box)
        (owed,) = box.lost(1 << 40)
        assert box.again(number, owed)
    send(box)
    (owed,) = box.lost(1 << 40)
    assert not box.again(99, owed)
    assert len(box) == 0


def test_a_question_that_nobody_waits_for_is_not_sent_and_what_gives_back_is():
    box = Outbox()
    add(box, Admit([b"k" * 16]), Release(4), is_asked=True)
    box.forget(1)
    box.forget(2)
    box.forget(77)
    assert send(box) == [(2, Release(4))]


def test_only_cancels_can_be_too_many(monkeypatch):
    monkeypatch.setattr(outbox, "MAX_KEPT", 2)
    box = Outbox()
    add(box, Release(1), Release(2))
    assert not box.add(3, Cancel("t" * 16), is_asked=False)
    assert box.add(4, Release(3), is_asked=False)
