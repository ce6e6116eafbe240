"""What tests of the node share: real node processes, a raw connection to one, and real client processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import msgspec
import zmq

import pdx
from pdx.config import NodeConfig, private_folder, socket_path
from pdx.errors import ArenaFull, NodeUnavailable
from pdx.node.daemon import TICK_S, Daemon
from pdx.testing.waiting import wait_until
from pdx.wire.messages import (
    VERSION,
    Answer,
    Ask,
    Bye,
    Hello,
    Refused,
    ToNode,
    Welcome,
    decode_from_node,
    encode,
)
from pdx.wire.status import NodeStatus
from pdx.wire.verbs import CheckFinish, JobStatus, Status

MIB = 1 << 20
_PUPPET = Path(__file__).with_name("node_puppet.py")
_LAST_SEQ = 1 << 62  # beyond all numbers that tests give their messages


def arenas_of(address: str) -> list[Path]:
    """The arena files in /dev/shm of nodes at this address."""
    name = hashlib.blake2b(address.encode(), digest_size=8).hexdigest()
    return sorted(Path("/dev/shm").glob(f"pdx-{name}-*"))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def has_ended(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], 0)[0])
    finally:
        os.close(pidfd)


class Wire:
    """A raw connection to a node: it sends whatever it is told to, and believes nothing."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)  # the node may be starting
        self._socket.connect(address)
        self._path = address.removeprefix("ipc://")
        self.seq = 0
        self.node_pid = 0  # once attached

    def send_frames(self, *frames: bytes) -> None:
        """Any frames at all."""
        self._socket.send_multipart(list(frames))

    def tell(self, body: Ask, *, seq: int | None = None, reply: bool = False) -> int:
        """One message; its number."""
        self.seq = self.seq + 1 if seq is None else seq
        self.send_frames(encode(ToNode(self.seq, reply, body)))
        return self.seq

    def answer(self, timeout_s: float = 30.0) -> tuple[int, Answer] | None:
        """The next answer, None if none comes."""
        if not self._socket.poll(timeout_s * 1000):
            return None
        envelope = decode_from_node(self._socket.recv())
        return envelope.seq, envelope.body

    def ask(self, body: Ask, *, seq: int | None = None) -> Any:
        """Ask and wait for the answer to it."""
        number = self.tell(body, seq=seq, reply=True)
        received = self.answer()
        assert received is not None, f"no answer to {body}"
        assert received[0] == number
        return received[1]

    def hello(self, **settings: Any) -> Welcome | Refused:
        """Attach as a client of this process, or as `settings` say."""
        answer = self.ask(Hello(**{"version": VERSION, "pid": os.getpid(), "kind": "client", **settings}))
        if isinstance(answer, Welcome):
            self.node_pid = answer.pid
        return answer

    def refused(self, body: Ask) -> str:
        """The name of the error that the node refuses `body` with."""
        answer = self.ask(body)
        assert isinstance(answer, Refused), answer
        return answer.error

    def status(self) -> NodeStatus:
        """The node's status; only when attached."""
        answer = self.ask(Status())
        assert isinstance(answer, NodeStatus), answer
        return answer

    def close(self) -> None:
        """Say bye where the node still runs, so that its next user finds it as it was. Idempotent."""
        if self._socket.closed:
            return
        if self.node_pid:
            wait_until(self._has_left, what="the node has read the bye, or has ended")
        self._socket.close()
        self._context.term()

    def _has_left(self) -> bool:
        # Said again each time: of answers to one that has read none, the node drops what is too much.
        self.tell(Bye(), seq=max(self.seq + 1, _LAST_SEQ), reply=True)
        while received := self.answer(0.3):
            if received[0] >= _LAST_SEQ:
                return True
        return has_ended(self.node_pid) or not os.path.exists(self._path)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def attached(address: str, **settings: Any) -> Wire:
    """A wire that said hello and was welcomed."""
    wire = Wire(address)
    answer = wire.hello(**settings)
    if not isinstance(answer, Welcome):
        wire.close()
        raise AssertionError(answer)  # noqa: TRY004
    return wire


def over(wire: Wire, status: Any) -> JobStatus:
    """The job's end."""
    assert isinstance(status, JobStatus), status
    ask = CheckFinish(status.job)
    return wait_until(lambda: (last := wire.ask(ask)).is_over and last, timeout_s=60, what="the job is over")


def run(wire: Wire, verb: Any) -> JobStatus:
    """A job, to its end."""
    return over(wire, wire.ask(verb))


class Served:
    """A node that serves, as its clients see it."""

    address: str
    config: NodeConfig

    def status(self) -> NodeStatus:
        """Its status, seen by a client of its own."""
        with attached(self.address) as wire:
            return wire.status()

    def client(self) -> pdx.Node:
        """A client of its own."""
        return pdx.connect(self.address, timeout_s=10.0)

    def counter(self, name: str) -> int:
        """How far this counter has come."""
        return self.status().counters.get(name, 0)

    def degraded(self, reason: str) -> int:
        """How often something was done without PDX for this reason."""
        return self.counter(f"degraded_{reason}")

    def wait_sealed(self, count: int) -> None:
        """Until so many chunks are sealed."""
        wait_until(lambda: self.status().chunks.get("sealed", 0) == count, what=f"{count} chunks are sealed")

    def is_at_rest(self) -> bool:
        """Whether nobody holds anything, and nothing is under way."""
        status = self.status()
        held = status.leases or status.transfers or set(status.chunks) - {"sealed"}
        return not held and not any(peer.pushes or peer.landing for peer in status.peers)

    def wait_at_rest(self) -> None:
        """Until that is so."""
        wait_until(self.is_at_rest, what="nobody holds anything")

    def wait_stored(self, count: int) -> None:
        """Until so many chunks are in the tiers below memory."""
        wait_until(lambda: self.counter("disk_stored") + self.counter("remote_stored") >= count, what="all are stored")

    def forget(self) -> None:
        """Somebody takes all the room of what memory has, once nobody holds any of it."""
        self.wait_at_rest()
        wait_until(lambda: not any(tier.copies for tier in self.status().tiers), what="nothing is stored")
        with self.filled():
            assert "sealed" not in self.status().chunks

    @contextlib.contextmanager
    def filled(self, piece_bytes: int = 0) -> Iterator[None]:
        """Somebody has all the room of the arena: at once, or in pieces of so many bytes as far as there are any."""
        with pdx.connect(self.address) as client, contextlib.ExitStack() as held:
            with contextlib.suppress(*[ArenaFull] if piece_bytes else []):  # something is being written or stored
                for at in range(0, self.config.arena_bytes, piece_bytes or self.config.arena_bytes):
                    held.enter_context(client.reserve(f"filler {at}", piece_bytes or self.config.arena_bytes))
            yield


class NodeProcess(Served):
    """A real node in a process of its own."""

    def __init__(self, config: NodeConfig, program: Sequence[str] = ("-m", "pdx.node"), *more: str) -> None:
        """As `pdx.node.start.start`, forked. `program`: of Python, which gets the settings and what is `more`."""
        self.config = config
        self.address = config.address
        path = socket_path(config.address)
        private_folder(path.parent)
        arguments = ["-P", *program, msgspec.json.encode(config).decode(), *more]
        with open(f"{path}.log", "ab") as log:
            self.process = forked.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @classmethod
    def ready(cls, config: NodeConfig) -> NodeProcess:
        """One that serves."""
        made = cls(config)
        try:
            return made.wait_ready()
        except BaseException:
            made.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What it logged."""
        return Path(f"{self.address.removeprefix('ipc://')}.log").read_text()

    def wait_ready(self) -> NodeProcess:
        """Wait until it serves."""

        with Wire(self.address) as wire:
            wire.tell(Hello(VERSION, os.getpid(), "client"), reply=True)

            def serves() -> bool:
                if self.process.poll() is not None:
                    raise NodeUnavailable(self.log)
                return wire.answer(0.02) is not None

            wait_until(serves, what="the node serves")
            wire.ask(Bye())
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        """SIGTERM, and wait until it has cleaned up."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            assert self.process.wait(30) == 0, self.log
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class NodeThread(Served):
    """A node in a thread of this process: for what does not ask how a process starts, ends or logs."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.address = config.address
        self.pid = os.getpid()
        self._error: Exception | None = None
        self._is_ending = False
        self._is_ready = threading.Event()
        self.daemon: Daemon | None = None
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)
        self._thread.start()
        assert self._is_ready.wait(30)
        if self._error is not None:
            raise self._error

    def wait_ready(self) -> NodeThread:
        """It has been since it was made."""
        return self

    def _run(self) -> None:
        try:
            with Daemon(self.config) as self.daemon:
                self._is_ready.set()
                while not self._is_ending:
                    self.daemon.turn(TICK_S)
        except Exception as error:  # noqa: BLE001 - it is raised where it was started or ended
            self._error = error
            self._is_ready.set()

    def close(self) -> None:
        """End it, and wait until it has cleaned up. Idempotent."""
        self._is_ending = True
        if self.daemon is not None:
            self.daemon.env.mailbox.post(lambda: None)
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def refused_node(address: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """What came of starting a node that cannot be as it is told to; its arena is small where nothing else is said."""
    command = [sys.executable, "-m", "pdx.node", json.dumps({"address": address, "arena_bytes": 8 * MIB, **settings})]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


class Puppet:
    """A real client process that does what the test tells it, with `pdx.connect` (see node_puppet.py)."""

    def __init__(self, address: str, program: Path = _PUPPET, *arguments: str) -> None:
        self.process = forked.Popen([str(program), address, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.process.pid

    def send(self, verb: str, *arguments: Any) -> None:
        """Tell it to do something; it may be stopped."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """What became of the oldest `send`: a value, or the name of the error it raised."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client process died"
        return json.loads(line)

    def do(self, verb: str, *arguments: Any) -> Any:
        """Tell it and wait for the result."""
        self.send(verb, *arguments)
        return self.result()

    def stop(self) -> None:
        """SIGSTOP, and wait until it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(self.pid))

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End it, whatever state it is in. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
