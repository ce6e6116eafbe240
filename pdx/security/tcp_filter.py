"""The TCP port that peers dial, in front of ZMQ: it limits connections per address and passes on only ZMQ's.

ZMQ accepts every connection before it knows a key, has no limit on their number, and some of its calls end the process
when no descriptor is left. So connections arrive here. A connection is passed on, byte for byte, to a private Unix
socket of ZMQ's once it has sent the ten bytes with which each ZMQ connection begins; CURVE passes through unread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq

from pdx.security import descriptors
from pdx.telemetry.faults import Faults

log = logging.getLogger(__name__)

MAX_YOUNG = 512  # connections that have not proved to be a peer's yet
MAX_YOUNG_OF_ADDRESS = 64
MAX_CONNECTIONS = 2048
SILENT_S = 2.0  # for a connection to begin to speak ZMQ
UNREAD_S = 30.0  # after which a reader that reads nothing is closed
LINGER_S = 0.5  # for ZMQ's last messages to leave at the end
_GREETING_BYTES = 10
_PIECE_BYTES = 1 << 16
_BACKLOG = 1024  # a flood waits here, with honest peers among it: a peer without a place would wait for seconds
_ZMQ_BACKLOG = 4  # small, because connections that ZMQ has not accepted yet are not counted as descriptors in use
_ROUND_S = 0.1
BATCH = 16  # connections accepted at once
PACE_S = 0.01  # before the next batch
_QUIET_S = 60.0
_NO_DESCRIPTOR = "no file descriptor is left for it (ulimit -n)"


class _Flow:
    """One direction of a connection: bytes read from `source` that `sink` has not accepted yet. `most_bytes`: the limit
    for all bytes of this direction; 0: none."""

    def __init__(self, source: socket.socket, sink: socket.socket, most_bytes: int = 0) -> None:
        self.most_bytes = most_bytes
        self.source = source
        self.sink = sink
        self.pending = b""
        self.waits_since: float | None = None  # when `waits_s` first saw `pending`
        self.nbytes = 0  # read so far
        self.has_ended = False

    def move(self) -> bool:
        """Pass on available bytes; False: this direction is over."""
        try:
            if not self.pending and not self.has_ended:
                room = self.most_bytes - self.nbytes if self.most_bytes else _PIECE_BYTES
                self.pending = self.source.recv(min(room + 1, _PIECE_BYTES))
                self.has_ended = not self.pending
                self.nbytes += len(self.pending)
                if self.is_too_much:
                    return False
            if self.pending:
                self.pending = self.pending[self.sink.send(self.pending) :]
                self.waits_since = None
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return False
        return bool(self.pending) or not self.has_ended

    def waits_s(self, now: float) -> float:
        """For how many seconds the sink has accepted none of the pending bytes."""
        if not self.pending:
            return 0.0
        if self.waits_since is None:
            self.waits_since = now
        return now - self.waits_since

    @property
    def is_too_much(self) -> bool:
        return 0 < self.most_bytes < self.nbytes


class _Connection:
    """One connection from outside, and the one to ZMQ once it is passed on."""

    def __init__(self, outer: socket.socket, address: str, born: float) -> None:
        self.outer = outer
        self.address = address
        self.born = born
        self.greeting = b""
        self.inner: socket.socket | None = None
        self.flows: tuple[_Flow, ...] = ()

    def begin(self, inner: socket.socket, most_bytes: int) -> None:
        """Pass the connection on to ZMQ, with at most `most_bytes` from outside."""
        self.inner = inner
        self.flows = (_Flow(self.outer, inner, most_bytes), _Flow(inner, self.outer))
        self.flows[0].pending = self.greeting
        self.flows[0].nbytes = len(self.greeting)

    def wanted(self, end: socket.socket) -> int:
        """The events to wait for at one end."""
        if not self.flows:
            return select.EPOLLIN
        read, write = self.flows if end is self.outer else reversed(self.flows)
        reads = not read.pending and not read.has_ended
        return (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if write.pending else 0)


class TcpFilter:
    """A listening TCP socket and the thread that serves it, from `start` to `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        young_s: float,
        counters: Counter[str],
        most_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`young_s`: after which ZMQ closes a connection without a finished handshake; port 0 is any free one.
        `most_bytes`: limit for all bytes that a connection may send, if clients only listen; 0: none.

        :raises OSError: the address cannot be bound.
        """
        self._young_s = young_s
        self._most_bytes = most_bytes
        self._counters = counters
        self._faults = Faults(counters)
        self._clock = clock
        most = max(32, (descriptors.limit() - descriptors.reserve()) // 4)  # each needs three when passed on
        self._max_connections = min(MAX_CONNECTIONS, most)
        self._max_young = min(MAX_YOUNG, max(16, most // 2))
        self._connections: dict[int, _Connection] = {}  # by descriptor of either end
        self._count = 0
        self._young: dict[str, dict[_Connection, None]] = {}  # by address, oldest first
        self._quiet_until = 0.0
        self._num_young = 0
        self._next_look = 0.0
        self._rests_until: float | None = None  # before which no connection is accepted
        self._target = -1
        self._is_closing = False
        self._drops = False
        self._has_unbound = threading.Event()  # the port is free again
        self._folder = tempfile.TemporaryDirectory(prefix="pdx-tcp-filter-")
        self.inner = f"ipc://{self._folder.name}/zmq"  # to be bound before `start`
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._release()
            raise
        self._listener.setblocking(False)
        bound = self._listener.getsockname()
        self.address = f"tcp://[{bound[0]}]:{bound[1]}" if ":" in host else f"tcp://{bound[0]}:{bound[1]}"
        self._thread = threading.Thread(target=self._run, name="pdx-tcp-filter")

    def bind(self, taker: zmq.Socket[bytes]) -> None:
        """Have a ZMQ socket accept the connections passed on, and `start`. Call it again after a change of the socket's
        options, which then hold for new connections. Present ones stay as they are, which costs a descriptor: ZMQ would
        end them if their endpoint were unbound.

        :raises OSError, zmq.ZMQError: it cannot be bound.
        """
        if self._target >= 0:
            self._folder = tempfile.TemporaryDirectory(prefix="pdx-tcp-filter-")
            self.inner = f"ipc://{self._folder.name}/zmq"
        try:
            taker.setsockopt(zmq.BACKLOG, _ZMQ_BACKLOG)
            taker.bind(self.inner)  # in a folder of this user's alone
        except zmq.ZMQError:
            self._folder.cleanup()
            raise
        self.start()

    def start(self) -> None:
        """Accept connections. The socket bound at `inner` loses its name now, so that no other process finds it."""
        with self._folder:
            target = os.open(self.inner.removeprefix("ipc://"), os.O_PATH | os.O_CLOEXEC)
        if self._target >= 0:
            os.dup2(target, self._target, inheritable=False)  # atomic for the thread, which may be using it
            os.close(target)
            return
        self._target = target
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._thread.start()

    def drop(self) -> None:
        """End all connections; peers that are admitted will dial again. Thread-safe."""
        self._drops = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def newcomers(self) -> list[str]:
        """The addresses of connections that have not proved to be a peer's yet. Thread-safe."""
        return sorted(self._young)

    def close(self) -> None:
        """Stop listening; ZMQ's last messages have LINGER_S to leave, in the background. Idempotent."""
        self._is_closing = True
        if self._thread.ident is None:
            self._release()
        elif not self._has_unbound.is_set():
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)
            self._has_unbound.wait()

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._round()
            self._listener.close()
            self._has_unbound.set()
            deadline = time.monotonic() + LINGER_S
            while self._connections and time.monotonic() < deadline:
                self._round()
        except Exception:
            log.exception("the TCP port for peers is closed by an internal error")
            self._counters["internal_errors"] += 1
        finally:
            self._has_unbound.set()
            for connection in set(self._connections.values()):
                self._end(connection)
            self._release()

    def _release(self) -> None:
        self._listener.close()
        self._epoll.close()
        self._folder.cleanup()
        for fd in (self._wake, self._target):
            if fd >= 0:
                os.close(fd)
        self._wake = self._target = -1

    def _round(self) -> None:
        wait_s = 0.02 if self._is_closing else _ROUND_S if self._rests_until is None else PACE_S
        for fd, _ in self._epoll.poll(wait_s):
            connection = self._connections.get(fd)
            with self._faults.contain("a connection to the TCP port for peers") as failures:
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd == self._listener.fileno():
                    self._accept()
                elif connection is not None:
                    self._serve(connection)
            if failures and connection is not None and self._connections.get(fd) is connection:
                self._end(connection)
        if self._drops:
            self._drops = False
            for connection in set(self._connections.values()):
                self._end(connection)
        now = self._clock()
        if self._rests_until is not None and now >= self._rests_until and not self._is_closing:
            self._rests_until = None
            self._epoll.modify(self._listener, select.EPOLLIN)
        if now >= self._next_look:
            self._next_look = now + _ROUND_S
            with self._faults.contain("the look at young connections"):
                self._grow_up(now)
                if self._most_bytes:
                    self._drop_unread(now)

    def _accept(self) -> None:
        now = self._clock()
        for _ in range(BATCH):
            try:
                outer, where = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the client has left, or there is no free descriptor
                self._rest(_ROUND_S)
                return
            try:
                self._take(outer, str(where[0]), now)
            except BaseException:
                taken = self._connections.get(outer.fileno())
                if taken is not None:
                    self._end(taken)
                outer.close()
                raise
        self._rest(PACE_S)

    def _rest(self, seconds: float) -> None:
        """Accept no connection for so long, for lack of descriptors, or so that many do not delay other work."""
        self._rests_until = self._clock() + seconds
        self._epoll.modify(self._listener, 0)

    def _take(self, outer: socket.socket, address: str, now: float) -> None:
        why = ""
        if self._count >= self._max_connections:
            why = f"{self._count} connections are here already"
        elif descriptors.left() < descriptors.reserve() // 2:
            why = _NO_DESCRIPTOR
        else:
            try:
                outer.setblocking(False)
                outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self._epoll.register(outer, select.EPOLLIN)
            except OSError as error:
                why = str(error)
        if why:
            self._refuse(address, why)
            outer.close()
            return
        connection = _Connection(outer, address, now)
        self._count += 1
        self._connections[outer.fileno()] = connection
        self._young.setdefault(address, {})[connection] = None
        self._num_young += 1
        if len(self._young[address]) > MAX_YOUNG_OF_ADDRESS:
            self._drop_oldest({address: self._young[address]})
        elif self._num_young > self._max_young:
            self._drop_oldest(self._young)

    def _serve(self, connection: _Connection) -> None:
        if connection.inner is None and not self._greeted(connection):
            return
        if all([flow.move() for flow in connection.flows]):
            self._watch(connection)
            return
        if connection.flows[0].is_too_much:
            self._refuse(connection.address, f"it has sent more than {self._most_bytes} bytes")
        self._end(connection)

    def _greeted(self, connection: _Connection) -> bool:
        """If a connection has begun as ZMQ's do, pass it on; return whether it was."""
        try:
            data = connection.outer.recv(_GREETING_BYTES - len(connection.greeting))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        connection.greeting += data
        if not data or not _is_greeting(connection.greeting):
            self._end(connection)
            return False
        if len(connection.greeting) < _GREETING_BYTES:
            return False
        try:
            # ZMQ's side needs a descriptor, too, and so do connections that ZMQ has not accepted yet.
            if descriptors.left() < descriptors.reserve() // 2 + self._num_young:
                raise OSError(_NO_DESCRIPTOR)
            inner = self._to_zmq()
        except OSError as error:  # also if ZMQ is behind with accepting: the peer dials again
            self._refuse(connection.address, str(error))
            self._end(connection)
            return False
        connection.begin(inner, self._most_bytes)
        self._connections[inner.fileno()] = connection
        return True

    def _to_zmq(self) -> socket.socket:
        """A connection to ZMQ. :raises OSError: it cannot be made now."""
        with contextlib.ExitStack() as undo:
            inner = undo.enter_context(socket.socket(socket.AF_UNIX))
            inner.setblocking(False)
            inner.connect(f"/proc/self/fd/{self._target}")
            self._epoll.register(inner, select.EPOLLIN)
            undo.pop_all()
        return inner

    def _watch(self, connection: _Connection) -> None:
        assert connection.inner is not None
        for end in (connection.outer, connection.inner):
            self._epoll.modify(end, connection.wanted(end))

    def _grow_up(self, now: float) -> None:
        """Close connections that said nothing in time; those that ZMQ has not closed by `young_s` are a peer's."""
        for connection in [one for young in self._young.values() for one in young]:
            if connection.inner is None and now - connection.born > SILENT_S:
                self._refuse(connection.address, f"it did not begin to speak ZMQ for {SILENT_S:g} s")
                self._end(connection)
            elif connection.inner is not None and now - connection.born > self._young_s:
                self._grown(connection)

    def _drop_unread(self, now: float) -> None:
        """Close readers that do not read, for which ZMQ would keep messages as long as they are connected."""
        for connection in set(self._connections.values()):
            if connection.flows and connection.flows[1].waits_s(now) > UNREAD_S:
                self._refuse(connection.address, f"it has read nothing for {UNREAD_S:g} s")
                self._end(connection)

    def _drop_oldest(self, young: dict[str, dict[_Connection, None]]) -> None:
        """Close one connection of the address with the most: the oldest that was not passed on, else the oldest."""
        if not young:
            return
        crowd = max(young.values(), key=len)
        victim = next((one for one in crowd if one.inner is None), next(iter(crowd)))
        self._refuse(victim.address, f"{len(crowd)} connections from there at once")
        self._end(victim)

    def _refuse(self, address: str, why: str) -> None:
        self._counters["strangers_dropped"] += 1
        now = self._clock()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            log.warning("a connection from %s was closed: %s (others are counted)", address, why)

    def _grown(self, connection: _Connection) -> None:
        young = self._young.get(connection.address)
        if young is not None and connection in young:
            del young[connection]
            self._num_young -= 1
            if not young:
                del self._young[connection.address]

    def _end(self, connection: _Connection) -> None:
        self._grown(connection)
        self._count -= 1
        for end in (connection.outer, connection.inner):
            if end is not None:
                self._connections.pop(end.fileno(), None)
                end.close()  # takes it from the epoll, too


def _is_greeting(data: bytes) -> bool:
    """Whether a ZMQ connection can begin so: 0xFF, eight bytes of anything, an odd byte."""
    return data[:1] == b"\xff" and (len(data) < _GREETING_BYTES or bool(data[9] & 1))
