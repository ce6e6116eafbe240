"""The thread that writes to a peer: every write that was submitted is answered, whatever becomes of the channel."""

import threading
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
from plain_memory import PlainMemory
from push_stage import MIB, SendingStage, key

from pdx.config import NodeConfig
from pdx.errors import ChannelBroken, ChannelUnavailable, TransferAborted, WriteRefused
from pdx.memory.digest import digests
from pdx.memory.slot import Slot
from pdx.node.peers.connection import ConnectionState
from pdx.node.peers.peer_tiers import PeerTiers
from pdx.node.peers.send_thread import SendThread
from pdx.store.tier import Job, Part
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.transports.channel import TOKEN_BYTES, Memory, RemoteRegion
from pdx.wire.messages import Chosen, Welcome, decode_landed

TOKEN = bytes(TOKEN_BYTES)


class FakeTransfer:
    """Over when the test says so."""

    def __init__(self, channel):
        self.channel = channel
        self.error = None
        self.is_over = False
        self.aborts = 0

    def poll(self):
        return self.is_over

    def abort(self):
        self.aborts += 1
        self.end(TransferAborted("asked to"))

    def end(self, error=None):
        if not self.is_over:
            self.error, self.is_over = error, True
            self.channel.wake.set()


class FakeChannel:
    """Remembers what is written."""

    def __init__(self, region, wake):
        self.region = region
        self.wake = wake
        self.transfers = []
        self.notes = []
        self.probes = 0
        self.is_closed = False

    def write(self, pieces, notify):
        note, made = decode_landed(notify), FakeTransfer(self)
        if note.admit == 0:
            self.probes += 1
            made.end(self.region.probe_fault)
            return made
        if self.region.bug is not None:
            raise self.region.bug
        self.notes.append(note)
        self.transfers.append(made)
        if self.region.is_quick:
            made.end()
        return made

    def close(self):
        self.is_closed = True
        for transfer in self.transfers:
            transfer.end(ChannelBroken("closed"))


class FakeRegion:
    """`fault`: what connecting raises; `probe_fault`: what becomes of a probe."""

    crosses_wire = True
    is_polled = False

    def __init__(self, *, is_quick=False, fault=None, bug=None, probe_fault=None):
        self.is_quick, self.fault, self.bug, self.probe_fault = is_quick, fault, bug, probe_fault
        self.channels = []

    def connect(self, remote, *, timeout_s, wake):
        if self.fault is not None:
            raise self.fault
        self.channels.append(FakeChannel(self, wake))
        return self.channels[-1]


class Stage:
    """A sender with these regions, and what came of it."""

    def __init__(self, regions, *, measure=False, digests="wire", preferred=""):
        self.env = Env()
        self.mailbox = self.env.mailbox
        self.view = memoryview(bytearray(MIB))
        self.memory = Memory(self.view)
        self.regions = SimpleNamespace(regions=regions, arena=PlainMemory(self.view), probe=Slot(0, 4096, 0))
        self.config = SimpleNamespace(digests=digests, peer_timeout_s=5.0)
        self.chosen = []
        self.done = []
        self.broken = []
        self.ended = 0
        self.jobs = []
        self.tags = {}  # by identity: what the test calls each of the jobs
        remotes = [RemoteRegion(name, MIB, TOKEN, b"") for name in regions]
        welcome = Welcome(1, 1, regions=remotes, probe=Slot(0, 4096, 0))
        tier = SimpleNamespace(name="peer")
        self.sender = SendThread(self, tier, None, welcome, list(regions), measure=measure, preferred=preferred)

    def channel_chosen(self, sender, scheme, rates):
        self.chosen.append((scheme, rates))

    def written(self, sender, job, error):
        self.done.append((self.tags[id(job)], type(error) if error else None))

    def channel_broken(self, sender, why):
        self.broken.append(why)

    def sender_ended(self, sender):
        self.ended += 1

    def until(self, condition):
        wait_until(lambda: self.mailbox.deliver() or condition())

    @property
    def channel(self):
        """The one that was chosen."""
        self.until(lambda: self.chosen)
        return self.regions.regions[self.chosen[0][0]].channels[-1]

    def submit(self, tag, push=1):
        self.jobs.append(Job(push, [Part(bytes(16), 0, 2, 0, 2, Slot(0, 10, 0), Slot(0, 10, 7))], 10))
        self.tags[id(self.jobs[-1])] = tag
        self.sender.submit(self.jobs[-1])

    def close(self):
        self.sender.close()
        self.sender.join(10)
        self.until(lambda: self.ended)
        assert self.ended == 1
        assert all(channel.is_closed for region in self.regions.regions.values() for channel in region.channels)
        self.mailbox.close()


@pytest.fixture
def stage_with():
    def make(*regions, **settings):
        named = {f"s{number}": region for number, region in enumerate(regions or [FakeRegion()])}
        return stack.enter_context(closing(Stage(named, **settings)))

    with ExitStack() as stack:
        yield make


def test_writes_go_in_their_order_and_are_answered_when_they_are_over(stage_with):
    stage = stage_with()
    channel = stage.channel
    for tag in range(3):
        stage.submit(tag)
    stage.until(lambda: len(channel.transfers) == 3)
    channel.transfers[1].end()
    stage.until(lambda: stage.done == [(1, None)])
    channel.transfers[0].end(WriteRefused("no"))
    stage.until(lambda: stage.done == [(1, None), (0, WriteRefused)])
    stage.sender.close()
    stage.until(lambda: stage.ended)
    assert stage.done[2:] == [(2, ChannelBroken)], "it is not known whether it has arrived"


@pytest.mark.parametrize(
    ("wire", "settings", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"digests": "always"}, True),
        (True, {"digests": "never"}, False),
    ],
)
def test_what_crosses_a_wire_has_digests(stage_with, wire, settings, expected):
    region = FakeRegion(is_quick=True)
    region.crosses_wire = wire
    stage = stage_with(region, **settings)
    channel = stage.channel
    stage.submit(0)
    stage.until(lambda: stage.done)
    (slices,) = channel.notes[0].slices
    assert slices.digests == (digests(PlainMemory(stage.view), [(0, 5), (5, 5)]) if expected else b"")


def test_a_push_that_is_given_up_is_aborted_written_or_not(stage_with):
    stage = stage_with()
    channel = stage.channel
    stage.submit(0, push=1)
    stage.submit(1, push=2)
    stage.until(lambda: len(channel.transfers) == 2)
    stage.sender.abort(1)
    stage.submit(2, push=1)
    stage.until(lambda: len(stage.done) == 2)
    assert sorted(stage.done) == [(0, TransferAborted), (2, TransferAborted)]
    assert len(channel.transfers) == 2
    stage.sender.forget(1)
    stage.submit(3, push=1)
    stage.until(lambda: len(channel.transfers) == 3)


def test_a_channel_with_a_bug_ends_and_no_write_is_forgotten(stage_with):
    region = FakeRegion(bug=ValueError("outside of the region"))
    stage = stage_with(region)
    assert stage.channel
    other = stage_with(FakeRegion(), FakeRegion(fault=ZeroDivisionError("a bug")), measure=True)
    other.until(lambda: other.ended)
    assert other.broken == ["ZeroDivisionError: a bug"]  # and those that were tried are closed, see `close`
    stage.submit(0)
    stage.submit(1)
    stage.until(lambda: stage.ended)
    assert stage.broken == ["ValueError: outside of the region"]
    assert stage.done == [(0, ChannelBroken), (1, ChannelBroken)]


def test_what_is_submitted_to_a_thread_that_has_ended_is_answered_too(stage_with):
    """The control loop hears of the end later than it happens."""
    stage = stage_with(FakeRegion(fault=ChannelBroken("nobody there")))
    stage.sender.join(10)
    stage.submit(0)
    stage.until(lambda: stage.ended)
    assert stage.done == [(0, ChannelBroken)]
    assert "nobody there" in stage.broken[0]


@pytest.mark.parametrize("settings", [{}, {"measure": True, "preferred": "s1"}], ids=str)
def test_the_first_through_which_a_probe_goes_is_used_or_the_preferred_one(stage_with, settings):
    """And no other is tried behind it."""
    stage = stage_with(FakeRegion(probe_fault=ChannelBroken("no way")), FakeRegion(), FakeRegion(), **settings)
    assert stage.channel is stage.regions.regions["s1"].channels[0]
    assert stage.chosen == [("s1", {})]
    assert stage.regions.regions["s2"].channels == []
    assert stage.channel.probes == 1
    assert stage.regions.regions["s0"].channels[0].is_closed
    assert stage.sender.missing == {"s0": "no way"}


def test_the_fastest_is_used_where_they_are_measured(stage_with):
    slow, quick = FakeRegion(), FakeRegion()

    class SlowChannel(FakeChannel):
        def write(self, pieces, notify):
            threading.Event().wait(0.02)
            return super().write(pieces, notify)

    slow.connect = lambda remote, *, timeout_s, wake: slow.channels.append(SlowChannel(slow, wake)) or slow.channels[-1]
    stage = stage_with(slow, quick, measure=True)
    assert stage.channel is quick.channels[0]
    assert stage.chosen[0][1]["s1"] > stage.chosen[0][1]["s0"] > 0
    assert slow.channels[0].is_closed


def test_where_the_preferred_one_does_not_connect_the_others_are_measured_and_the_reason_is_kept(stage_with):
    fault = ChannelUnavailable("no peer access")
    stage = stage_with(FakeRegion(fault=fault), FakeRegion(), FakeRegion(), measure=True, preferred="s0")
    assert stage.channel in (stage.regions.regions["s1"].channels[0], stage.regions.regions["s2"].channels[0])
    assert set(stage.chosen[0][1]) == {"s1", "s2"}
    assert stage.sender.missing == {"s0": "no peer access"}


# ---- what becomes of the connection -------------------------------------------------------------


class Peer:
    """A connection that stands."""

    name = "b"
    state = ConnectionState.READY
    number = 1

    def __init__(self):
        self.sent = []

    def send(self, body, about=0):
        self.sent.append(body)


class TiersStage(SendingStage):
    """The tiers of a node that has dialled `b`, where one channel may lead."""

    def __init__(self, folder, region):
        super().__init__(folder)
        self.peer = Peer()
        self.mailbox = self.env.mailbox
        self.gone = []
        self.left = []
        connections = SimpleNamespace(
            address_of=lambda name: "", of=lambda name: self.peer, dial=lambda name: self.peer, leave=self.left.append
        )
        self.config = NodeConfig(address=f"ipc://{folder}/node.sock", channels=["s0"])
        self.regions = SimpleNamespace(regions={"s0": region}, arena=self.arena, probe=Slot(0, 4096, 0))
        self.connections, self.marks = connections, []
        self.fetches = SimpleNamespace(lost=lambda name, now: self.gone.append(name))
        self.inbound = SimpleNamespace(session_over=lambda peer, is_dead: self.left.append((peer, is_dead)))
        self.tiers = PeerTiers(self)
        welcome = Welcome(1, 1, regions=[RemoteRegion("s0", MIB, TOKEN, b"")])
        self.tiers.ready(self.peer, welcome, ["s0"], at_once=True)
        self.tier = self.tiers.tier("b")

    def until(self, condition):
        wait_until(lambda: self.mailbox.deliver() or condition())

    def close(self):
        self.tiers.close()
        self.mailbox.close()
        super().close()


@pytest.fixture
def tiers_with(tmp_path):
    with ExitStack() as stack:
        yield lambda region: stack.enter_context(closing(TiersStage(tmp_path, region)))


def push(stage):
    return stage.tiers.push("b", [key(0)], 1, transfer=None, layout=b"")


def test_a_peer_to_which_no_channel_leads_may_go_on_writing_here(tiers_with):
    """The connection is also that of the other direction, in which there may be no firewall."""
    region = FakeRegion(fault=ChannelUnavailable("a firewall"))
    stage = tiers_with(region)
    stage.fill(stage.reserve([0], 100), 0, 1, seal=True)
    assert len(push(stage)) == 1
    stage.until(lambda: not stage.copies.of(stage.tier) and not stage.tiers._left)
    assert (stage.left, stage.gone, stage.peer.sent) == ([], [], [])
    assert "a firewall" in stage.tier.why
    assert stage.counters["copies_lost"] == stage.counters["channels_broken"] == 1
    region.fault = None
    assert len(push(stage)) == 1
    stage.until(lambda: stage.tier.is_ready)
    assert stage.peer.sent[0] == Chosen("s0")
    assert len(stage.copies.of(stage.tier)) == 1
    assert stage.tier.why == ""


def test_a_channel_that_breaks_ends_the_connection_as_soon_as_nothing_is_written(tiers_with):
    region = FakeRegion(bug=ChannelBroken("torn"))
    stage = tiers_with(region)
    stage.until(lambda: stage.tier.is_ready)
    stage.fill(stage.reserve([0], 100), 0, 1, seal=True)
    assert len(push(stage)) == 1
    stage.tier.store(Job(7, [Part(bytes(16), 0, 2, 0, 2, Slot(0, 10, 0), Slot(0, 10, 7))], 10))
    stage.until(lambda: stage.left)
    assert stage.left == [stage.peer, (stage.peer, False)]
    assert "b" in stage.gone, "what was asked since over that connection is not waited for"
    assert not stage.tier.is_ready


def test_a_step_down_to_another_channel_is_said_and_counted(tiers_with, caplog):
    stage = tiers_with(FakeRegion())
    stage.until(lambda: stage.tier.is_ready)
    assert (stage.tier.why, caplog.records) == ("", [])
    stage.tier.expected, stage.tier.sender.missing = "cuda_ipc", {"cuda_ipc": "no peer access"}
    stage.tiers.channel_chosen(stage.tier.sender, "s0", {})
    assert stage.tier.why == "no cuda_ipc: no peer access"
    assert stage.counters["channels_stepped_down"] == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
