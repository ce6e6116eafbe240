"""The arena's regions: opened once, on a thread, each for itself, and closed whatever state they are in."""

import threading

import pytest
from fake_cuda import fake_cuda
from inproc import InprocRegion
from push_stage import MIB

from pdx.config import NodeConfig
from pdx.cuda.arena import GpuArena
from pdx.cuda.gpu import Gpu
from pdx.errors import ChannelUnavailable
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.node.peers.regions import Regions
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.transports import registry
from pdx.wire.burst import BURST

OPENING = threading.Event()
GO_ON = threading.Event()
CLOSED = []
TAKEN = []


class SlowRegion(InprocRegion):
    """Says when it is being opened, and waits."""

    @classmethod
    def register(cls, memory, *, host="127.0.0.1", wake=None):
        OPENING.set()
        assert GO_ON.wait(10)
        return super().register(memory, host=host, wake=wake)

    def close(self):
        CLOSED.append(self.scheme)
        super().close()


class DeafRegion(SlowRegion):
    """Cannot listen."""

    def listen(self):
        raise ChannelUnavailable("no address")


class DeviceRegion(InprocRegion):
    """Sees what it is given."""

    @classmethod
    def register(cls, memory, *, host="127.0.0.1", wake=None):
        TAKEN.append((memory.gpu, memory.address, memory.nbytes))
        raise ChannelUnavailable("not today")


class BrokenRegion(InprocRegion):
    """A third party's, with a bug."""

    @classmethod
    def availability(cls):
        raise ZeroDivisionError("a bug")


def regions_of(arena, env, *schemes):
    return Regions(NodeConfig(address="ipc:///n.sock", channels=list(schemes)), env, arena, Slot(0, 4096, 0))


@pytest.fixture(autouse=True)
def schemes(monkeypatch):
    for event in (OPENING, GO_ON):
        event.clear()
    CLOSED.clear()
    for name, kind in {
        "inproc": "InprocRegion",
        "slow": "SlowRegion",
        "deaf": "DeafRegion",
        "broken": "BrokenRegion",
        "device": "DeviceRegion",
    }.items():
        monkeypatch.setitem(registry._OURS, name, f"{__name__}:{kind}")


@pytest.fixture
def open_regions(tmp_path):
    arena = Arena.create(tmp_path / "arena", MIB)
    env = Env()
    made = []

    def make(*schemes):
        made.append(regions_of(arena, env, *schemes))
        made[-1].mailbox, made[-1].counters = env.mailbox, env.counters
        return made[-1]

    yield make
    GO_ON.set()
    for regions in made:
        regions.close()
    env.mailbox.close()
    arena.close()


def test_what_works_is_opened_once_and_what_does_not_says_why(open_regions, caplog):
    GO_ON.set()
    regions = open_regions("inproc", "deaf", "broken", "nonsense", "slow")
    called = []
    regions.when_open(lambda: called.append(1))
    regions.when_open(lambda: called.append(2))
    wait_until(lambda: regions.mailbox.deliver() or called == [1, 2])
    assert regions.schemes == ["inproc", "slow"]
    assert set(regions.why) == {"deaf", "broken", "nonsense"}
    assert "ZeroDivisionError: a bug" in regions.why["broken"]
    assert regions.counters == {"channels_unavailable": 3}
    assert len(CLOSED) == 1, "what was registered and cannot listen is closed"
    regions.when_open(lambda: called.append(3))
    assert called == [1, 2, 3]
    caplog.clear()  # the traceback in there keeps the arena


def test_of_two_that_clash_the_second_is_opened_where_it_is_named(open_regions, monkeypatch):
    """Each brings a UCX of its own, and a process with both has crashed."""
    GO_ON.set()
    monkeypatch.setattr("pdx.node.peers.regions.schemes", lambda **_: ["inproc", "slow"])
    monkeypatch.setattr("pdx.node.peers.regions.CLASHES", {"slow": "inproc"})
    for named, opened in (([], ["inproc"]), (["inproc", "slow"], ["inproc", "slow"])):
        regions = open_regions(*named)
        regions.when_open(lambda: None)
        wait_until(lambda regions=regions: regions.mailbox.deliver() or regions.is_open)
        assert regions.schemes == opened


def test_closed_while_they_are_being_opened_nothing_is_begun_with_them(open_regions):
    regions = open_regions("slow")
    called = []
    for _ in range(BURST):  # results of other threads, which are in the mailbox before it
        regions.mailbox.post(lambda: None)
    regions.when_open(lambda: called.append(1))
    assert OPENING.wait(10)
    threading.Timer(0.05, GO_ON.set).start()
    regions.close()
    assert called == [], "whoever waited is closed already, and nobody would end what it begins"
    assert len(CLOSED) == 1
    assert regions.regions == regions.listeners == {}


def test_an_arena_on_a_gpu_is_registered_as_device_memory_and_only_where_that_works(tmp_path, caplog):
    TAKEN.clear()
    env = Env()
    with fake_cuda(), GpuArena.create(tmp_path / "arena", MIB, Gpu.find("0")) as arena:
        regions = regions_of(arena, env, "shm", "tcp", "device")
        regions.when_open(lambda: None)
        wait_until(lambda: env.mailbox.deliver() or regions.is_open)
        regions.close()
        assert (arena.gpu, arena.address, MIB) in TAKEN
        assert regions_of(arena, env).candidates[0] == "cuda_ipc"
    env.mailbox.close()
    assert regions.schemes == []
    assert all("moves host memory" in regions.why[scheme] for scheme in ("shm", "tcp"))
    assert caplog.text.count("no channel tcp") == 1
