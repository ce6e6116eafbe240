"""Notifications become verdicts: which slices are what was sent, and which nobody waits for."""

import threading
from contextlib import ExitStack, closing
from types import SimpleNamespace

import msgspec
import pytest
from plain_memory import PlainMemory

from pdx.errors import GpuError
from pdx.memory.arena import GRANULE_BYTES
from pdx.memory.digest import digests
from pdx.memory.slot import Slot
from pdx.node.peers.receive_thread import MAX_UNHEARD, ReceiveThread
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.transports.channel import Notification
from pdx.wire.messages import Landed, Slices, encode

TOKEN = b"t" * 16
LAYERS = 4
ROOM = SimpleNamespace(slot=Slot(GRANULE_BYTES, GRANULE_BYTES, 7), layers=LAYERS)
SLICE = GRANULE_BYTES // LAYERS


class FakeListener:
    """Gives out what the test puts in."""

    def __init__(self):
        self.notifications = []
        self.takes = 0
        self.bug = None

    def take(self):
        self.takes += 1
        if self.bug is not None:
            bug, self.bug = self.bug, None
            raise bug
        taken, self.notifications = self.notifications, []
        return taken


class FailingMemory(PlainMemory):
    """It is read with this error, once."""

    fails_once = None

    def read(self, offset, nbytes):
        if (error := self.fails_once) is not None:
            self.fails_once = None
            raise error
        return super().read(offset, nbytes)


class Stage:
    """A thread over two granules, with a room at the second."""

    def __init__(self, *, needs_digests=True, is_polled=False):
        self.memory = memoryview(bytearray(range(256)) * (2 * GRANULE_BYTES // 256))
        self.env = Env()
        self.mailbox = self.env.mailbox
        self.listener = FakeListener()
        self.wake = threading.Event()
        self.verdicts = []
        self.dropped = []
        push = SimpleNamespace(session=SimpleNamespace(token=TOKEN), chunks={GRANULE_BYTES: ROOM})
        self.grants = {GRANULE_BYTES: push}
        self.regions = SimpleNamespace(arena=FailingMemory(self.memory))
        region = SimpleNamespace(scheme="test", wake=self.wake, is_polled=is_polled, crosses_wire=needs_digests)
        self.thread = ReceiveThread(self, region, self.listener, digests="wire")

    def landed(self, scheme, token, admit, good, bad, nbytes):
        self.verdicts.append(SimpleNamespace(token=token, admit=admit, good=good, bad=bad, nbytes=nbytes))

    def malformed(self, scheme, text):
        self.dropped.append((scheme, text))

    def notify(self, payload, token=TOKEN):
        """It lands, and the control loop hears of it."""
        before = len(self.verdicts) + len(self.dropped)
        self.listener.notifications.append(Notification(token, payload))
        self.wake.set()
        wait_until(lambda: self.mailbox.deliver() or len(self.verdicts) + len(self.dropped) > before)

    def land(self, *slices, push=5, token=TOKEN):
        self.notify(encode(Landed(push, list(slices))), token)
        return self.verdicts[-1]

    def digests(self, first, count):
        return digests(
            PlainMemory(self.memory), [(GRANULE_BYTES + layer * SLICE, SLICE) for layer in range(first, first + count)]
        )

    def close(self):
        self.thread.close()
        self.mailbox.close()


@pytest.fixture
def stage_with():
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(closing(Stage(**settings)))


@pytest.fixture
def stage(stage_with):
    return stage_with()


def test_slices_that_are_what_was_sent_are_good(stage):
    verdict = stage.land(Slices(GRANULE_BYTES, 7, 1, 2, stage.digests(1, 2)))
    assert (verdict.token, verdict.admit, verdict.bad, verdict.nbytes) == (TOKEN, 5, [], 2 * SLICE)
    assert [(one.first_layer, one.layers) for one in verdict.good] == [(1, 2)]


def test_one_changed_byte_is_found_in_any_layer(stage):
    for layer in range(LAYERS):
        right = stage.digests(0, LAYERS)
        at = GRANULE_BYTES + layer * SLICE + 100 * layer
        stage.memory[at] ^= 1
        verdict = stage.land(Slices(GRANULE_BYTES, 7, 0, LAYERS, right))
        assert (verdict.good, len(verdict.bad), verdict.nbytes) == ([], 1, 0), layer
        stage.memory[at] ^= 1


@pytest.mark.parametrize("made", ["none", "short", "long", "swapped"])
def test_digests_that_are_missing_or_of_others_are_bad(stage, made):
    right = stage.digests(0, 2)
    made = {"none": b"", "short": right[:-1], "long": right + b"\0" * 8, "swapped": right[8:] + right[:8]}[made]
    stage.memory[GRANULE_BYTES] ^= 0xFF  # the two slices would have the same bytes
    verdict = stage.land(Slices(GRANULE_BYTES, 7, 0, 2, made))
    assert len(verdict.bad) == 1


def test_without_digests_only_where_no_wire_is_crossed(stage_with):
    stage = stage_with(needs_digests=False)
    assert len(stage.land(Slices(GRANULE_BYTES, 7, 0, LAYERS)).good) == 1
    wrong = bytes(8 * LAYERS)
    assert len(stage.land(Slices(GRANULE_BYTES, 7, 0, LAYERS, wrong)).bad) == 1, "those that are there are checked"


def test_slices_of_rooms_that_are_not_granted_are_passed_over(stage):
    """No room, an earlier generation, inside a room, another session's."""
    one = Slices(GRANULE_BYTES, 7, 0, 1, stage.digests(0, 1))
    for change in ({"offset": 0}, {"generation": 6}, {"offset": GRANULE_BYTES + 8}):
        verdict = stage.land(msgspec.structs.replace(one, **change))
        assert (verdict.good, verdict.bad) == ([], [])
    verdict = stage.land(one, token=b"u" * 16)
    assert (verdict.good, verdict.bad) == ([], [])
    verdicts = len(stage.verdicts)
    stage.listener.notifications.append(Notification(TOKEN, encode(Landed(0, []))))
    stage.land(one)
    assert len(stage.verdicts) == verdicts + 1, "the probe is none"


@pytest.mark.parametrize("has_digests", [True, False])
def test_layers_that_a_chunk_does_not_have_are_bad(stage_with, has_digests):
    stage = stage_with(needs_digests=has_digests)
    for first, count in ((0, LAYERS + 1), (LAYERS, 1), (4095, 4096)):
        made = bytes(8 * count) if has_digests else b""
        assert len(stage.land(Slices(GRANULE_BYTES, 7, first, count, made)).bad) == 1


def test_what_is_no_notification_or_a_bug_of_the_listener_is_counted_and_harms_nothing(stage):
    payloads = (b"", b"\xc1", b"\x92\x01", bytes(70_000), b"\x92\xff\x90")
    for payload in payloads:
        stage.notify(payload)
    stage.listener.bug = ZeroDivisionError("a bug")
    stage.wake.set()
    wait_until(lambda: stage.mailbox.deliver() or len(stage.dropped) > len(payloads))
    assert stage.dropped[-1] == ("test", "ZeroDivisionError: a bug")
    assert stage.land(Slices(GRANULE_BYTES, 7, 0, 1, stage.digests(0, 1))).good


@pytest.mark.parametrize(
    ("error", "dropped"),
    [(ZeroDivisionError("a bug"), [("test", "ZeroDivisionError: a bug")]), (GpuError("failed"), [])],
)
def test_a_notification_that_cannot_be_handled_takes_no_other_with_it(stage, error, dropped):
    """What was taken is gone from the listener: the chunks of the others would never be whole. Memory of a GPU is read
    by copies, which may fail: those slices are bad."""
    good = encode(Landed(5, [Slices(GRANULE_BYTES, 7, 0, 1, stage.digests(0, 1))]))
    stage.regions.arena.fails_once = error
    stage.listener.notifications = [Notification(TOKEN, good)] * 3  # at once: the thread may be taking
    stage.wake.set()
    wait_until(lambda: stage.mailbox.deliver() or len(stage.verdicts) + len(dropped) == 3)
    assert stage.dropped == dropped
    assert [(len(one.good), len(one.bad)) for one in stage.verdicts] == [(0, 1)] * (not dropped) + [(1, 0)] * 2


def test_a_listener_that_cannot_wake_is_polled(stage_with):
    stage = stage_with(is_polled=True)
    stage.thread.expect(True)
    stage.listener.notifications.append(Notification(TOKEN, encode(Landed(1, []))))
    wait_until(lambda: stage.mailbox.deliver() or stage.verdicts)
    stage.thread.expect(False)
    takes = stage.listener.takes
    wait_until(lambda: stage.listener.takes > takes, what="it looks now and then")


def test_a_control_loop_that_does_not_hear_is_not_told_more(stage_with):
    """Nothing more is taken from the listener, so that writers are held up there and this process does not grow."""
    stage = stage_with(needs_digests=False)
    payload = encode(Landed(5, [Slices(GRANULE_BYTES, 7, 0, 1, b"")]))
    stage.listener.notifications = [Notification(TOKEN, payload)] * MAX_UNHEARD
    stage.wake.set()
    wait_until(lambda: not stage.listener.notifications)
    stage.listener.notifications = [Notification(TOKEN, payload)]
    for _ in range(2):  # when it has begun its second round, the first is over
        stage.wake.set()
        wait_until(lambda: not stage.wake.is_set())
    assert len(stage.listener.notifications) == 1
    wait_until(lambda: stage.mailbox.deliver() or len(stage.verdicts) == MAX_UNHEARD + 1)
