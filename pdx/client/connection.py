"""One process's connection to its node: typed messages over a DEALER socket, and the node's arena mapped.

Any thread may use it; one lock guards the socket and the answers, and no thread waits for the node while holding it.
No call waits longer than its timeout. A message that gives something back (`pdx.client.outbox`) is kept until the node
has answered it, and a question until it is sent; any other message is dropped and counted while the node does not read.

A connection serves one node process: when that dies, `is_alive` turns False for good, and its owner opens another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TypeVar

import zmq

from pdx import errors
from pdx.client.outbox import Outbox, gives_back
from pdx.closing import Closing
from pdx.config import ALL_CPUS
from pdx.errors import NodeError, NodeUnavailable, PdxError, ProtocolError, ProxyError
from pdx.memory.arena import Arena
from pdx.security import descriptors
from pdx.security.unix_peer import pidfd_of_peer
from pdx.wire import messages
from pdx.wire.base import Kind

log = logging.getLogger("pdx.client")

HEARTBEAT_S = 1.0
_LINGER_MS = 300
_FILES = 16  # it needs eight, and ZMQ ends a process in which it gets only a part of its own
_LOOK_S = 0.2  # between two checks whether a node that has not answered is alive
_NOT_BY_NAME = frozenset({"RequestRefused", "LegFailed", "TierError", "Exhausted", "VerbRefused", "PdxError"})
_A = TypeVar("_A", bound=messages.Answer)


class Connection(Closing):
    """A connection that is opened at once and attached by `attach`; until then the node need not even run."""

    def __init__(self, address: str, hello: messages.Hello) -> None:
        """:raises NodeUnavailable: this process has hardly a file descriptor left."""
        if (left := descriptors.left()) < _FILES:
            raise NodeUnavailable(
                f"{left} of {descriptors.limit()} file descriptors are left, a connection to {address} needs {_FILES}; "
                "raise the limit (ulimit -n)"
            )
        self.address = address
        self.running = 0  # requests; sent to the node with each heartbeat, as are the counts since the last one
        self.chunk_s = 0.0  # likewise: how long this process takes to compute a chunk's tokens; 0: unknown
        self.load_s = 0.0  # likewise: how long this process takes to copy a chunk into its KV cache; 0: unknown
        self._keyed = b""  # likewise, see `key_by`
        self._degraded: Counter[str] = Counter()
        self._warned: set[str] = set()  # reasons whose first occurrence was logged
        self._context = zmq.Context()
        for cpu in ALL_CPUS:  # else ZMQ's threads share the cores of a busy, pinned engine thread
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # no limit: a node drops answers for which there is no room
        self._socket.connect(address)
        # Guards the socket and all below. Notified when answers come and when a thread has stopped polling.
        self._lock = threading.Condition()
        self._seq = 0
        self._answers: dict[int, messages.Answer | None] = {}  # to questions; None until the answer comes
        self._num_answers = 0  # answers to questions that have come so far
        self._owed_since = 0.0  # since when the node has owed an answer and sent nothing; 0: it owes none
        self._outbox = Outbox()
        # A socket may not be polled while another thread uses it, but its descriptor may. The descriptor becomes
        # readable once for all pending messages, so a thread that finds some while using the socket wakes the poller.
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._arrivals = select.poll()
        for fd in (int(self._socket.getsockopt(zmq.FD)), self._wake_fd):
            self._arrivals.register(fd, select.POLLIN)
        self._is_polled = False  # by one thread, without the lock; that thread notifies the other waiters
        self._is_closing = False
        self._welcome: messages.Welcome | None = None
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
        """Wait up to `timeout_s` for the node's welcome; return whether this process is attached now.

        :raises ProtocolError: the node does not accept this process.
        """
        if self._welcome is not None:
            return True
        answer = self.collect(self._hello_seq, timeout_s)
        if answer is None:
            return False
        if not isinstance(answer, messages.Welcome):
            raise ProtocolError(f"the node at {self.address} answers {answer} to hello")
        self._arena = self._open(answer)
        try:
            self._pidfd = os.pidfd_open(answer.pid) if answer.pid else self._pidfd_of_listener(timeout_s)
        except OSError as error:
            raise NodeUnavailable(f"the node at {self.address} died meanwhile: {error}") from error
        if not answer.pid:
            # Only one process at a time listens there, and only the one that welcomed us accepts this.
            self.call(messages.Ping(), timeout_s)
        self._welcome = answer
        self._heart.start()
        return True

    def _pidfd_of_listener(self, timeout_s: float) -> int:
        """A pidfd of the node, for a process in a PID namespace below the node's."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(timeout_s)
            probe.connect(self.address.removeprefix("ipc://"))
            try:
                return pidfd_of_peer(probe)
            except OSError as error:
                raise NodeUnavailable(
                    f"the node at {self.address} is in another PID namespace, where Linux before 6.5 does not tell "
                    f"whether it lives ({error}): give this process the node's (shareProcessNamespace, --pid=host)"
                ) from error

    def _open(self, welcome: messages.Welcome) -> Arena:
        path = Path(welcome.arena_path)
        if not welcome.gpu:
            return Arena.open(path, welcome.arena_bytes)
        from pdx.cuda.arena import GpuArena

        handover = Path(welcome.handover)
        return GpuArena.open(
            path, welcome.arena_bytes, welcome.gpu, handover, welcome.ticket, is_node_alive=lambda: self.is_alive
        )

    @property
    def is_alive(self) -> bool:
        """Whether the node process that welcomed this one still runs."""
        pidfd = self._pidfd
        if pidfd < 0:
            return False
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return not poller.poll(0) and self._pidfd == pidfd  # else `close` was faster, and this may be any file

    def pidfd(self) -> int:
        """A pidfd of the node, which the caller closes; only when attached. The pid may be another process's here."""
        return os.dup(self._pidfd)

    @property
    def epoch(self) -> int:
        """The node's epoch, to which all slots of this connection belong; 0 before it is attached."""
        return self._welcome.epoch if self._welcome else 0

    @property
    def node_pid(self) -> int:
        """The process id of the node that welcomed this process; 0 before that."""
        return self._welcome.pid if self._welcome else 0

    @property
    def node_name(self) -> str:
        """The name by which peers know the node; empty before the node has welcomed this process."""
        return self._welcome.name if self._welcome else ""

    @property
    def arena(self) -> Arena:
        """The node's arena; only when attached. Of a GPU arena (`pdx.cuda.arena.GpuArena`) only the generations are
        mapped: a caller that maps its data unmaps it."""
        if self._arena is None:
            raise NodeUnavailable(f"not attached to the node at {self.address}")
        return self._arena

    # ---- messages ---------------------------------------------------------------------------

    def tell(self, body: messages.Ask) -> None:
        """Send a message that needs no answer; never waits, never fails.

        Lost if the node is gone. While the node does not read, what gives something back is kept, the rest dropped.
        """
        with self._lock:
            if not self._stop.is_set():
                self._dispatch(body)

    def ask(self, body: messages.Ask) -> int:
        """Send a message; return the number by which to `collect` or `forget` its answer.

        :raises NodeUnavailable: the connection is closed.
        """
        with self._lock:
            self._check_open()
            self._owe()
            seq = self._dispatch(body, is_asked=True)
            self._answers[seq] = None
            return seq

    def collect(self, seq: int, timeout_s: float, *, or_another: bool = False) -> messages.Answer | None:
        """Return the answer to `seq`, or None if it does not come within `timeout_s`. Other threads go on meanwhile.

        `or_another`: also return None as soon as an answer to another question comes.

        :raises NodeError, ProtocolError: the node refused; the class says why.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            before = self._num_answers
            while self._answers[seq] is None:
                self._check_open()
                self._flush()  # the question itself may wait for room
                self._receive()
                if self._answers[seq] is not None:
                    break
                left_ms = round((deadline - time.monotonic()) * 1000)
                if left_ms <= 0 or (or_another and self._num_answers > before):
                    return None
                self._wait(left_ms)
            answer = self._answers.pop(seq)
        if isinstance(answer, messages.Refused):
            raise error_of(answer, NodeError, ProtocolError)
        return answer

    def forget(self, seq: int) -> None:
        """Give up the answer to `seq`: what it grants is given back, now or when it comes."""
        with self._lock:
            self._outbox.forget(seq)
            answer = self._answers.pop(seq, None)
            if answer is not None:
                self._give_back(answer)

    def silent_s(self) -> float:
        """How long the node has been silent although it owes an answer; 0 if it owes none. Never waits."""
        with self._lock:
            if self._owed_since and not self._stop.is_set():
                self._receive()
            return time.monotonic() - self._owed_since if self._owed_since else 0.0

    def call(self, body: messages.Ask, timeout_s: float) -> messages.Answer:
        """Ask and wait for the answer.

        :raises NodeUnavailable: none came within `timeout_s`, or the node has died.
        :raises NodeError, ProtocolError: the node refused.
        """
        if not self.is_alive and not self._stop.is_set():  # a later node there does not know this process
            raise NodeUnavailable(f"the node at {self.address} has died")
        until = time.monotonic() + timeout_s
        seq = self.ask(body)
        while (answer := self.collect(seq, min(_LOOK_S, until - time.monotonic()))) is None:
            is_late = time.monotonic() >= until
            if is_late or not self.is_alive:
                self.forget(seq)
                why = f"does not answer within {timeout_s:g} s" if is_late else "has died"
                raise NodeUnavailable(f"the node at {self.address} {why}")
        return answer

    def call_for(self, body: messages.Ask, timeout_s: float, *kinds: type[_A]) -> _A:
        """As `call`, for a message with a user's input, which may be out of bounds, and an answer of one of `kinds`.

        :raises ProtocolError: the node would drop this message, or its answer is of another kind.
        """
        messages.decode_to_node(messages.encode(messages.ToNode(1, True, body)))
        answer = self.call(body, timeout_s)
        if not isinstance(answer, kinds):
            raise ProtocolError(f"the node answers {type(answer).__name__} to {type(body).__name__}")
        return answer

    def count(self, reason: str, text: str = "", *args: object, times: int = 1) -> None:
        """Count something that was done without PDX, or with less of it, for the node's counters.

        `text` with `args` is logged: as a warning the first time for this reason, then for debugging only.
        """
        with self._lock:
            self._degraded[reason] += times
            is_known = reason in self._warned
            self._warned.update([reason] if text else ())
        if text:
            log.log(logging.DEBUG if is_known else logging.WARNING, text, *args)

    def key_by(self, fingerprint: bytes) -> None:
        """Tell the node, at once and with each heartbeat, by which fingerprint this engine makes its keys."""
        with self._lock:
            self._keyed = fingerprint
            if not self._stop.is_set():
                self._heartbeat()

    def _heartbeat(self) -> None:
        """Send a heartbeat. Its answer shows which earlier messages were lost."""
        degraded, self._degraded = self._degraded, Counter()
        self._flush()
        ping = messages.Ping(self.running, dict(degraded), self.chunk_s, self.load_s, self._keyed)
        self._owe()
        if not self._send(self._number(), ping, reply=True):
            self._degraded.update(degraded)

    def _owe(self) -> None:
        """Note that the node owes an answer from now on."""
        self._owed_since = self._owed_since or time.monotonic()

    def _dispatch(self, body: messages.Ask, *, is_asked: bool = False) -> int:
        """Send a message as soon as there is room, or now or never if it may be dropped; return its number."""
        seq = self._number()
        is_kept = (is_asked or gives_back(body)) and self._outbox.add(seq, body, is_asked=is_asked)
        self._flush()
        if not is_kept and (self._outbox.next is not None or not self._send(seq, body, reply=False)):
            self.count(
                "message_dropped",
                "%s for the node at %s was dropped: it does not read",
                type(body).__name__,
                self.address,
            )
        return seq

    def _flush(self) -> None:
        """Send waiting messages as long as there is room."""
        while (waiting := self._outbox.next) is not None:
            if not self._send(*waiting, reply=True):
                return
            self._outbox.sent(waiting[0])

    def _number(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, seq: int, body: messages.Ask, *, reply: bool) -> bool:
        """Send one message. False: a thousand messages are unread, so the node hangs."""
        try:
            self._socket.send(messages.encode(messages.ToNode(seq, reply, body)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            if self._is_polled and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                os.eventfd_write(self._wake_fd, 1)
        return True

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise NodeUnavailable(f"{self!r}")

    def _wait(self, timeout_ms: int) -> None:
        """Wait without the lock until something may have come; the caller holds the lock once, and looks again."""
        if self._is_polled:
            self._lock.wait(timeout_ms / 1000)
            return
        self._is_polled = True
        self._lock.release()
        ready: list[tuple[int, int]] = []
        try:
            ready = self._arrivals.poll(timeout_ms)
        finally:
            self._lock.acquire()
            self._is_polled = False
            if any(fd == self._wake_fd for fd, _ in ready):
                os.eventfd_read(self._wake_fd)
            self._lock.notify_all()  # one of them polls next

    def _receive(self) -> None:
        """Take in all messages that have come."""
        is_news = False
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than an exception at the end
            is_news = True
            self._owed_since = 0.0
            try:
                envelope = messages.decode_from_node(self._socket.recv(zmq.NOBLOCK))
            except ProtocolError as error:
                log.warning("dropped an answer from the node at %s: %s", self.address, error)
            else:
                self._take(envelope.seq, envelope.body)
        if is_news:
            self._flush()
            self._lock.notify_all()
            if self._is_polled:
                os.eventfd_write(self._wake_fd, 1)

    def _take(self, seq: int, answer: messages.Answer) -> None:
        owed = self._outbox.answered(seq)
        for lost in self._outbox.lost(seq):
            if not self._outbox.again(self._number(), lost):
                self.count("message_dropped", "%s was given up: the node never answers it", type(lost.body).__name__)
        if owed is not None:
            seq = owed.asked
        if seq in self._answers:
            self._answers[seq] = answer
            self._num_answers += 1
        elif owed is not None and isinstance(owed.body, messages.Fill) and isinstance(answer, messages.Refused):
            # The caller was done with these slots and will not write there any more.
            self.count("seal_refused", "a seal was refused, its room is given back: %s", answer.text)
            self._outbox.add(self._number(), messages.Abort(owed.body.slots), is_asked=False)
        else:
            self._give_back(answer)

    def _give_back(self, answer: messages.Answer) -> None:
        """Give back what an answer grants that no caller waits for (no-op after `close`, which gives back all)."""
        if self._stop.is_set():
            return
        if isinstance(answer, messages.Admitted):
            if answer.granted_slots:
                self._dispatch(messages.Abort(answer.granted_slots, unused=True))
            if answer.lease:
                self._dispatch(messages.Release(answer.lease))

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with self._lock:
                if self._stop.is_set():
                    return
                self._receive()
                self._heartbeat()

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Say bye and release everything; views of the arena stay valid as long as they live. Idempotent."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            # Before the welcome, the hello may still reach a slow node; then the bye must reach it, too.
            reachable = self.is_alive or self._welcome is None
            if reachable:
                self._heartbeat()
        try:
            if reachable:
                self._say_bye()
        finally:
            self._end(_LINGER_MS if reachable else 0)

    def _say_bye(self) -> None:
        if self._welcome is None:
            self.tell(messages.Bye())
            return
        # A node that sees this process end before it has read the bye takes it for dead.
        with contextlib.suppress(NodeError, ProtocolError):
            self.collect(self.ask(messages.Bye()), _LINGER_MS / 1000)

    def _end(self, linger_ms: int) -> None:
        with self._lock:
            self._stop.set()
            self._lock.notify_all()
            os.eventfd_write(self._wake_fd, 1)
            self._lock.wait_for(lambda: not self._is_polled)
            self._socket.close(linger=linger_ms)
            os.close(self._wake_fd)
        if self._heart.is_alive():
            self._heart.join()
        self._context.term()
        self._arena = None  # unmapped when the last view of it is gone
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def attached(address: str, timeout_s: float, kind: Kind = "client", name: str = "") -> Connection:
    """Attach this process to the node at `address`, under `name` (default: its program's).

    :raises NodeUnavailable: no node answers within `timeout_s`.
    """
    with contextlib.ExitStack() as undo:
        hello = messages.Hello(messages.VERSION, os.getpid(), kind, name=name or os.path.basename(sys.argv[0]))
        made = undo.enter_context(Connection(address, hello))
        if not made.attach(timeout_s):
            raise NodeUnavailable(f"no node answers at {address} within {timeout_s:g} s; start one with: pdx node")
        undo.pop_all()
    return made


def error_of(refused: messages.Refused, *kinds: type[PdxError]) -> PdxError:
    """The error that a refusal names by its class. A class that is none of `kinds` becomes a `NodeError`, and one with
    a constructor of its own, as errors inside a proxy, a `ProxyError`."""
    kind = getattr(errors, refused.error, None)
    if not isinstance(kind, type) or not issubclass(kind, kinds or PdxError):
        return NodeError(f"{refused.error}: {refused.text}")
    return ProxyError(refused.text) if refused.error in _NOT_BY_NAME else kind(refused.text)
