"""A Unix socket's path at which ZMQ gets no more connections than the process has descriptors for.

ZMQ aborts the whole process when it has no descriptor for a connection to a Unix socket, and a thread of its own
accepts as many as come. So ZMQ never listens at the path. Connections there wait in a queue of bounded length. Once
there are descriptors for all of it, the path gets a new queue, and ZMQ the old one, to which no path leads any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import zmq

from pdx.errors import ConfigError
from pdx.security import descriptors
from pdx.security.socket_lock import remove_socket

log = logging.getLogger(__name__)

_MOST_WAITING = 128
_TIMEOUT_S = 0.02  # that one call gives ZMQ's thread; it accepts the rest at the next call


class AcceptQueue:
    """The path, from construction to `close`, which removes it. Not thread-safe; no call waits much more than 20 ms."""

    def __init__(self, path: Path, router: zmq.Socket[bytes], counters: Counter[str]) -> None:
        """`path` must be free, and this process its owner (`socket_lock`). Close this before `router`.

        :raises ConfigError: it cannot be bound.
        """
        self._path = path
        self._counters = counters
        self._is_open = True
        self._queue: socket.socket | None = None  # handed to ZMQ, which has not accepted all of it
        with contextlib.ExitStack() as undo:
            undo.callback(path.unlink, missing_ok=True)
            try:
                # ZMQ watches this socket; when a connection comes here, it accepts from whatever `_handed` refers to.
                self._watched = undo.enter_context(self._listen())
                self._watched_at = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
                undo.callback(os.close, self._watched_at)
                self._listening = undo.enter_context(self._listen())
            except OSError as error:
                raise ConfigError(f"cannot listen at {path}: {error}") from error
            self.fd = self._listening.fileno()
            self._handed = os.dup(self._watched.fileno())
            router.setsockopt(zmq.USE_FD, self._handed)
            router.bind(f"ipc://{path}")
            undo.callback(os.dup2, self._watched.fileno(), self._handed, inheritable=False)  # ZMQ closes it
            with self._waking():  # ZMQ's thread may begin to watch after `bind` has returned
                while _is_waited_for(self._watched):
                    time.sleep(0.0001)
            self._undo = undo.pop_all()

    def admit_waiting(self) -> bool:
        """Admit waiting connections if there are descriptors for them; call it after any event, above all when `fd` is
        readable, which means a connection. True: ZMQ has not accepted all of them yet, so call it again soon.

        `fd` refers to another queue afterwards, so it must be registered anew with an epoll.

        :raises OSError: the path cannot be renewed; waiting connections were closed.
        """
        if self._queue is None and _is_waited_for(self._listening):
            self._look_at_descriptors()
            if self._is_open:
                self._queue = self._renewed()
            else:
                self._turn_away()
        if self._queue is not None and self._is_taken(self._queue):
            # This queue ends: a process that looked up the path before it was renewed is refused, and tries again.
            os.dup2(self._watched.fileno(), self._handed, inheritable=False)
            self._queue.close()
            self._queue = None
        return self._queue is not None

    def close(self) -> None:
        """Stop accepting. Idempotent."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        self._undo.close()

    def _listen(self) -> socket.socket:
        """A new socket that listens at the path, in place of the one that did."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        remove_socket(fresh)
        made = socket.socket(socket.AF_UNIX)
        try:
            made.setblocking(False)
            made.bind(str(fresh))
            fresh.chmod(0o600)  # before `listen`, nothing can connect
            made.listen(min(_MOST_WAITING, descriptors.reserve() // 4))
            fresh.rename(self._path)
        except OSError:
            made.close()
            raise
        return made

    def _renewed(self) -> socket.socket:
        """The queue of waiting connections; new ones wait in another queue from now on."""
        try:
            with self._listen() as fresh:
                queue = self._listening.dup()
                os.dup2(fresh.fileno(), self.fd, inheritable=False)
        except OSError:
            self._turn_away()
            raise
        return queue

    def _is_taken(self, queue: socket.socket) -> bool:
        """Have ZMQ accept these connections; return whether it has accepted all of them."""
        os.dup2(queue.fileno(), self._handed, inheritable=False)
        deadline = time.monotonic() + _TIMEOUT_S
        with self._waking():
            while _is_waited_for(queue):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.0001)
        return True

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Inside the block, ZMQ accepts connections from `_handed`."""
        with socket.socket(socket.AF_UNIX) as waker:
            waker.connect(f"/proc/self/fd/{self._watched_at}")
            try:
                yield
            finally:
                with contextlib.suppress(BlockingIOError):  # ZMQ has it if `_handed` is the watched one
                    self._watched.accept()[0].close()

    def _look_at_descriptors(self) -> None:
        left, reserve = descriptors.left(), descriptors.reserve()
        if self._is_open and left < reserve:
            self._is_open = False
            self._counters["descriptors_short"] += 1
            log.warning(
                "%d of %d file descriptors are left: no process is let in until there are more (ulimit -n)",
                left,
                descriptors.limit(),
            )
        elif not self._is_open and left > reserve + reserve // 4:
            self._is_open = True

    def _turn_away(self) -> None:
        """Close waiting connections, as many as a queue holds; their processes will try again."""
        for _ in range(_MOST_WAITING):
            try:
                self._listening.accept()[0].close()
            except OSError:
                return


def _is_waited_for(listening: socket.socket) -> bool:
    poller = select.poll()
    poller.register(listening, select.POLLIN)
    return bool(poller.poll(0))
