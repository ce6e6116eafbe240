"""Who gets the handle of a node's GPU memory: attached processes with their ticket, nobody else, and nobody waits."""

import array
import os
import resource
import socket
import struct
import subprocess
import sys
import time

import msgspec
import pytest
from gpu_harness import GpuNode, fake_cuda
from node_harness import MIB, Wire

from pdx.config import NodeConfig
from pdx.cuda.arena import fetch_handle
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory, Handle
from pdx.errors import GpuError, NodeError, NodeUnavailable, ProtocolError
from pdx.node import handover
from pdx.node.handover import HandoverServer
from pdx.telemetry.env import Env
from pdx.telemetry.faults import QUIET_S

HANDLE = Handle("ipc", f"GPU-{'0' * 8}-0000-0000-0000-{'0' * 12}", 4096, 12090, 1, b"h" * 64)
TICKET = b"t" * 16


class Stage:
    """A server without a node: the test is its loop, its clock and its sessions."""

    def __init__(self, place):
        self.now = 100.0
        self.watched = set()
        self.tickets = {os.getpid(): TICKET}
        self.export = lambda: (HANDLE, -1)
        env = Env(lambda: self.now)
        self.counters = env.counters
        self.server = HandoverServer(place / "node.sock.gpu", self, self, self, env)
        self.clients = []

    def is_attached(self, pid):
        return pid in self.tickets

    def admits(self, pid, ticket):
        return self.tickets.get(pid) == ticket

    def register(self, fd, _flags):
        self.watched.add(fd)

    def unregister(self, fd):
        self.watched.remove(fd)

    def connect(self, *messages):
        """A connection that has said this."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.clients.append(client)
        client.connect(str(self.server.path))
        for message in messages:
            client.send(message)
        client.setblocking(False)
        return client

    def serve(self):
        """One turn of the loop: everything that is watched gets its turn, ready or not."""
        for fd in sorted(self.watched):
            self.server.serve(fd)

    def serve_all(self, turns=4):
        for _ in range(turns):
            self.serve()

    def close(self):
        self.server.close()
        assert self.watched == set()
        assert not self.server.path.exists()
        for client in self.clients:
            client.close()


@pytest.fixture
def stage(place):
    made = Stage(place)
    yield made
    made.close()
    made.close()


def peer_is(monkeypatch, *pids, uid=None):
    """The kernel says so of who is at the other end: these processes one after the other, and then the last of them."""
    left = list(pids)

    def told(stream, *what):
        assert what[:2] == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("iII", left.pop(0) if len(left) > 1 else left[0], os.geteuid() if uid is None else uid, 0)

    monkeypatch.setattr(socket.socket, "getsockopt", told)


def is_over(client):
    """Whether the server has closed it without a word."""
    try:
        return client.recv(2000) == b""
    except ConnectionResetError:  # it had not read all that was said
        return True
    except BlockingIOError:
        return False


def test_who_shows_its_ticket_gets_the_handle_and_the_connection_ends(stage):
    client = stage.connect(TICKET)
    stage.serve_all()
    assert msgspec.msgpack.decode(client.recv(2000), type=Handle) == HANDLE
    assert is_over(client)
    assert stage.counters == {"handovers": 1}


def test_without_a_descriptor_left_the_loop_does_not_spin_and_who_waits_gets_the_handle_later(stage):
    client = stage.connect(TICKET)
    os.close(lowest_free := os.dup(client.fileno()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        stage.serve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert stage.watched == set()  # it would be readable in every turn
    stage.server.tick()
    stage.serve_all()
    assert msgspec.msgpack.decode(client.recv(2000), type=Handle) == HANDLE


def fails():
    raise GpuError("cuMemExportToShareableHandle failed")


@pytest.mark.parametrize(
    ("said", "settings", "why"),
    [
        *((said, {}, "that is not its ticket") for said in (b"x" * 16, b"t" * 15, b"t" * 17, TICKET * 10_000, b"\0")),
        (TICKET, {"tickets": {1: TICKET}}, "it is not attached"),  # another's
        (TICKET, {"export": fails}, "cuMemExportToShareableHandle failed"),
    ],
)
def test_anything_else_is_closed_and_counted(stage, said, settings, why, caplog):
    vars(stage).update(settings)
    client = stage.connect(said)
    stage.serve_all()
    assert is_over(client)
    assert stage.counters == {"handover_refused": 1}
    assert f"process {os.getpid()}: {why}" in caplog.text
    assert TICKET.decode() not in caplog.text


def test_a_process_that_is_refused_again_and_again_cannot_fill_the_log(stage, monkeypatch, caplog):
    def refused(pid, times):
        peer_is(monkeypatch, pid)
        for _ in range(times):
            stage.connect()
            stage.serve_all()
        return sum(f"process {pid}:" in message for message in caplog.messages)

    assert [refused(1000, 5), refused(1001, 2)] == [1, 1], "each process has its line"
    stage.now += QUIET_S
    assert refused(1000, 2) == 2
    assert stage.counters == {"handover_refused": 9}


def test_descriptors_that_come_with_a_ticket_are_not_taken(stage):
    read, write = os.pipe()
    client = stage.connect()
    client.sendmsg([TICKET], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read] * 10))])
    os.close(read)
    stage.serve_all()
    with pytest.raises(BrokenPipeError):  # nobody holds the reading end
        os.write(write, b"x")
    os.close(write)


def test_another_user_is_refused_before_it_is_heard(stage, monkeypatch, caplog):
    peer_is(monkeypatch, os.getpid(), uid=os.getuid() + 1)
    client = stage.connect(TICKET)
    stage.serve_all()
    assert is_over(client)
    assert f"user {os.getuid() + 1}" in caplog.text


def test_who_says_nothing_is_waited_for_a_while_and_nobody_waits_for_it(stage):
    slow = stage.connect()
    stage.serve()
    quick = stage.connect(TICKET)
    stage.serve_all()
    assert quick.recv(2000)
    stage.now += handover.TIMEOUT_S * 0.9
    stage.server.tick()
    assert not is_over(slow)
    stage.now += handover.TIMEOUT_S * 0.2
    stage.server.tick()
    assert is_over(slow)


def test_one_process_takes_a_few_places_only(stage):
    silent = [stage.connect() for _ in range(handover.MAX_OF_ONE_PROCESS)]
    stage.serve_all(10)
    another = stage.connect(TICKET)
    stage.serve_all()
    assert is_over(another)
    silent[0].send(TICKET)
    stage.serve_all()
    assert silent[0].recv(2000)
    again = stage.connect(TICKET)
    stage.serve_all()
    assert again.recv(2000), "there is a place again"


def test_with_all_places_taken_the_others_wait_in_the_backlog(stage, monkeypatch):
    peer_is(monkeypatch, *range(1000, 2000))
    stage.tickets = {pid: TICKET for pid in range(1000, 2000)}
    clients = [stage.connect() for _ in range(handover.MAX_UNPROVED + 1)]
    stage.serve_all(50)
    assert len(stage.watched) == handover.MAX_UNPROVED, "the listener is not among them"
    last = clients[-1]
    last.send(TICKET)
    stage.serve_all()
    assert not is_over(last)
    clients[0].close()
    stage.serve_all()
    assert last.recv(2000)


def test_a_client_that_left_costs_no_descriptor(stage):
    opened = []

    def export():
        opened.append(os.open("/dev/zero", os.O_RDONLY))
        return HANDLE, opened[-1]

    stage.export = export
    stage.connect(TICKET).close()
    stage.clients.clear()
    stage.serve_all()
    (fd,) = opened
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# ---- the asking side ----------------------------------------------------------------------------


@pytest.fixture
def answering(place):
    """A node that answers whatever the test says, one connection after the other."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(place / "node.sock.gpu"))
    server.listen(8)
    child = None

    def answer(message, fds=0):
        nonlocal child
        # In a child, because `fetch_handle` blocks; in Python, because a thread would do for nobody but the test.
        code = (
            "import socket, sys, array, os\n"
            "server = socket.socket(fileno=int(sys.argv[1])); stream, _ = server.accept(); stream.recv(100)\n"
            "fds = array.array('i', [os.open('/dev/zero', 0)] * int(sys.argv[3]))\n"
            "stream.sendmsg([bytes.fromhex(sys.argv[2])], [(1, 1, fds)] if fds else [])\n"
        )
        command = [sys.executable, "-c", code, str(server.fileno()), message.hex(), str(fds)]
        child = subprocess.Popen(command, pass_fds=[server.fileno()])
        return place / "node.sock.gpu"

    yield answer
    if child is not None:
        child.wait(10)
    server.close()
    (place / "node.sock.gpu").unlink()


GOOD = msgspec.msgpack.encode(HANDLE)
VMM = msgspec.msgpack.encode(msgspec.structs.replace(HANDLE, kind="vmm", data=b""))


@pytest.mark.parametrize(
    ("message", "fds"),
    [
        (b"garbage", 0),
        (GOOD + b"x", 0),
        (GOOD.replace(b"ipc", b"ipx"), 0),
        (msgspec.msgpack.encode(["ipc", HANDLE.gpu, 1 << 60, 0, 1, b""]), 0),
        (msgspec.msgpack.encode(["ipc", "../../etc", 4096, 0, 1, b""]), 0),
        (GOOD + b"x" * 5000, 0),
        (GOOD, 1),
        (VMM, 0),
        (VMM, 2),
        (VMM, 20),
    ],
)
def test_an_answer_that_is_none_is_refused_and_its_descriptors_closed(answering, message, fds):
    """That nothing is left open, the leak check of all tests sees."""
    with pytest.raises(ProtocolError):
        fetch_handle(answering(message, fds), TICKET, 10.0)


def test_a_descriptor_is_not_inherited(answering):
    handle, fd = fetch_handle(answering(VMM, 1), TICKET, 10.0)
    assert handle.kind == "vmm"
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_no_node_and_a_node_that_is_silent(place):
    with pytest.raises(NodeUnavailable, match="no node hands over"):
        fetch_handle(place / "nothing", TICKET, 5.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(place / "s"))
        server.listen(0)
        started = time.monotonic()
        for _ in range(3):  # the second or third finds a full backlog
            with pytest.raises(NodeUnavailable):
                fetch_handle(place / "s", TICKET, 0.05)
        assert time.monotonic() - started < 30.0
    (place / "s").unlink()


def test_a_connection_that_a_stop_has_interrupted_is_made_again(answering, monkeypatch):
    """`socket.connect` says nothing then, and nobody is at the other end."""
    connect, interrupted = socket.socket.connect, iter([True])
    monkeypatch.setattr(socket.socket, "connect", lambda *where: next(interrupted, False) or connect(*where))
    handle, _ = fetch_handle(answering(GOOD), TICKET, 10.0)
    assert handle == HANDLE
    monkeypatch.setattr(socket.socket, "connect", lambda *where: None)
    with pytest.raises(NodeUnavailable, match="not connected"):
        fetch_handle("anywhere", TICKET, 0.01)


def test_a_ticket_is_not_shown_to_another_user(place, monkeypatch):
    peer_is(monkeypatch, 1, uid=os.getuid() + 1)
    shown = []
    monkeypatch.setattr(socket.socket, "send", lambda self, data: shown.append(data))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        path = place / "s"
        server.bind(str(path))
        server.listen(1)
        try:
            with pytest.raises(ProtocolError, match="listens at"):
                fetch_handle(path, TICKET, 5.0)
        finally:
            path.unlink()
    assert shown == []


# ---- a real node --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    made = GpuNode(NodeConfig(address=f"ipc://{tmp_path_factory.mktemp('n')}/node.sock", arena_bytes=4 * MIB, gpu="0"))
    try:
        yield made.wait_ready()
    finally:
        made.close()
    assert not made.handover.exists()


@pytest.fixture
def session(node):
    with Wire(node.address) as wire:
        yield wire.hello()


def test_the_welcome_says_where_and_every_session_has_its_own_ticket(node, session):
    assert (session.gpu[:4], session.handover, len(session.ticket)) == ("GPU-", str(node.handover), 16)
    with Wire(node.address) as second:
        assert second.hello().ticket not in (session.ticket, b"")
    assert node.handover.stat().st_mode & 0o777 == 0o600


def test_the_memory_of_a_real_node_can_be_mapped(node, session):
    with fake_cuda():
        handle, fd = fetch_handle(node.handover, session.ticket, 10.0)
        with DeviceMemory.open(handle, fd, on=Gpu.find("0")) as memory:
            assert memory.nbytes >= session.arena_bytes
        os.close(fd)
    assert (handle.kind, handle.gpu, handle.pid) == ("vmm", session.gpu, node.pid)


def test_a_ticket_is_that_of_a_session_and_ends_with_it(node):
    with Wire(node.address) as wire:
        ticket = wire.hello().ticket
        with pytest.raises(NodeError, match="its log says why"):
            fetch_handle(node.handover, ticket[::-1], 10.0)
        wire.close()
        with pytest.raises(NodeError, match="its log says why"):
            fetch_handle(node.handover, ticket, 10.0)
