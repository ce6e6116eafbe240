"""One process's connection to its node: typed messages over a DEALER socket, and the node's arena mapped.

Any thread may use it; one lock guards the socket and the answers. Nothing here waits longer than it is told to.
A connection serves one node process: when that dies, `is_alive` turns False for good, and a new one is opened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType

import zmq

from pdx import errors
from pdx.errors import NodeError, NodeUnavailable, ProtocolError
from pdx.memory import Arena
from pdx.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Answer,
    Ask,
    Bye,
    Found,
    Hello,
    Ping,
    Refused,
    Release,
    Reserved,
    ToNode,
    Welcome,
    decode_from_node,
    encode,
)

log = logging.getLogger("pdx")

HEARTBEAT_S = 1.0
_FAREWELL_MS = 300


class Connection:
    """Opened at once, attached when `is_attached`: until then the node may not even run."""

    def __init__(self, address: str, hello: Hello) -> None:
        self.address = address
        self.running = 0  # told to the node with each heartbeat, as is what was counted since the last one
        self._degraded: Counter[str] = Counter()
        self._hello = hello
        self._context = zmq.Context()
        for cpu in range(os.cpu_count() or 1):  # the engine's thread may be pinned to cores that it keeps busy
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.connect(address)
        self._lock = threading.RLock()
        self._seq = 0
        self._answers: dict[int, Answer | None] = {}  # asked for: None until the answer is there
        self._welcome: Welcome | None = None
        self._arena: Arena | None = None
        self._pidfd = -1
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="pdx-heartbeat", daemon=True)
        self._hello_seq = self.ask(hello)

    def __repr__(self) -> str:
        state = "closed" if self._stop.is_set() else "attached" if self._welcome else "attaching"
        return f"<Connection {self.address} {state}>"

    # ---- attaching --------------------------------------------------------------------------

    def attach(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the node's welcome; whether this process is attached now.

        :raises ProtocolError: the node does not take this process.
        """
        if self._welcome is not None:
            return True
        answer = self.collect(self._hello_seq, timeout_s)
        if answer is None:
            return False
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the node at {self.address} answers {answer} to hello")
        self._arena = self._open(answer)
        try:
            self._pidfd = os.pidfd_open(answer.pid)
        except OSError as error:
            raise NodeUnavailable(f"the node at {self.address} died meanwhile: {error}") from error
        self._welcome = answer
        self._heart.start()
        return True

    def _open(self, welcome: Welcome) -> Arena:
        path = Path(welcome.arena_path)
        if not welcome.gpu:
            return Arena.open(path, welcome.arena_bytes)
        from pdx.cuda.arena import GpuArena

        handover = Path(welcome.handover)
        return GpuArena.open(
            path, welcome.arena_bytes, welcome.gpu, handover, welcome.ticket, is_node_alive=lambda: self.is_alive
        )

    @property
    def is_attached(self) -> bool:
        """Whether the node has welcomed this process."""
        return self._welcome is not None

    @property
    def is_alive(self) -> bool:
        """Whether the node process that welcomed this one still runs."""
        pidfd = self._pidfd
        if pidfd < 0:
            return False
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return not poller.poll(0) and self._pidfd == pidfd  # else `close` was faster, and this was any file

    @property
    def epoch(self) -> int:
        """The node's life that all slots of this connection belong to; 0 before it is attached."""
        return self._welcome.epoch if self._welcome else 0

    @property
    def arena(self) -> Arena:
        """The node's arena; only when attached. Of one on a GPU this maps the generations: who maps its data (a
        `pdx.cuda.arena.GpuArena`) also closes it."""
        if self._arena is None:
            raise NodeUnavailable(f"not attached to the node at {self.address}")
        return self._arena

    # ---- messages ---------------------------------------------------------------------------

    def tell(self, body: Ask) -> None:
        """Send a message that wants no answer; never waits, never fails. Lost if the node is gone."""
        with self._lock:
            if not self._stop.is_set():
                self._send(body, reply=False)

    def ask(self, body: Ask) -> int:
        """Send a message; returns the number to `collect` or `forget` its answer by."""
        with self._lock:
            seq = self._send(body, reply=True)
            self._answers[seq] = None
            return seq

    def collect(self, seq: int, timeout_s: float) -> Answer | None:
        """The answer to `seq`, or None if it has not come within `timeout_s`.

        :raises NodeError, ProtocolError: the node refused; the class says why.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._answers[seq] is None:
                self._check_open()
                left_ms = (deadline - time.monotonic()) * 1000
                if not self._socket.poll(max(0, round(left_ms))):
                    return None
                self._receive()
            answer = self._answers.pop(seq)
        if isinstance(answer, Refused):
            raise _error_of(answer)
        return answer

    def forget(self, seq: int) -> None:
        """Nobody will collect the answer to `seq`: what it grants is given back, now or when it comes."""
        with self._lock:
            answer = self._answers.pop(seq, None)
            if answer is not None:
                self._give_back(answer)

    def call(self, body: Ask, timeout_s: float) -> Answer:
        """Ask and wait for the answer.

        :raises NodeUnavailable: none came within `timeout_s`.
        :raises NodeError, ProtocolError: the node refused.
        """
        seq = self.ask(body)
        answer = self.collect(seq, timeout_s)
        if answer is None:
            self.forget(seq)
            raise NodeUnavailable(f"the node at {self.address} did not answer within {timeout_s} s")
        return answer

    def count(self, reason: str) -> None:
        """Something was done without PDX, or with less of it: the node's counters will say so."""
        with self._lock:
            self._degraded[reason] += 1

    def _heartbeat(self) -> None:
        degraded, self._degraded = self._degraded, Counter()
        self.tell(Ping(self.running, dict(degraded)))

    def _send(self, body: Ask, *, reply: bool) -> int:
        with self._lock:
            self._check_open()
            self._seq += 1
            try:
                self._socket.send(encode(ToNode(self._seq, reply, body)), zmq.NOBLOCK)
            except zmq.Again:  # a thousand messages unread: the node hangs; whoever waits will see its deadline
                log.warning("a message to the node at %s was dropped: it does not read", self.address)
            return self._seq

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise NodeUnavailable(f"{self!r}")

    def _receive(self) -> None:
        frame = self._socket.recv()
        try:
            envelope = decode_from_node(frame)
        except ProtocolError as error:
            log.warning("dropped an answer from the node at %s: %s", self.address, error)
            return
        if envelope.seq in self._answers:
            self._answers[envelope.seq] = envelope.body
        else:
            self._give_back(envelope.body)

    def _give_back(self, answer: Answer) -> None:
        """Nobody waits for this any more: what it grants is given back (by `close`, if that was called)."""
        if self._stop.is_set():
            return
        if isinstance(answer, Reserved) and answer.slots:
            self._send(Abort(answer.slots, unused=True), reply=False)
        elif isinstance(answer, Found) and answer.lease:
            self._send(Release(answer.lease), reply=False)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with self._lock:
                if self._stop.is_set():
                    return
                self._heartbeat()
                while self._socket.poll(0):
                    self._receive()

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Say bye and let go of everything; views of the arena stay valid as long as they live. Idempotent."""
        with self._lock:
            if self._stop.is_set():
                return
            # Not welcomed yet, the hello may still reach a node that is slow: then the bye must reach it, too.
            reachable = self.is_alive or self._welcome is None
            if reachable:
                self._heartbeat()
                self._say_bye()
            self._stop.set()
            self._socket.close(linger=_FAREWELL_MS if reachable else 0)
        if self._heart.is_alive():
            self._heart.join()
        self._context.term()
        self._arena = None  # unmapped when the last view of it is gone
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def _say_bye(self) -> None:
        if self._welcome is None:
            self.tell(Bye())
            return
        # Until it has read that, a node that sees this process end takes it for dead.
        with contextlib.suppress(NodeError, ProtocolError):
            self.collect(self.ask(Bye()), _FAREWELL_MS / 1000)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _error_of(refused: Refused) -> NodeError | ProtocolError:
    kind = getattr(errors, refused.error, None)
    if isinstance(kind, type) and issubclass(kind, (NodeError, ProtocolError)):
        return kind(refused.text)
    return NodeError(f"{refused.error}: {refused.text}")
