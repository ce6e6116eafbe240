"""An engine process's link to its host's node: attaches in the background, and again when the node was replaced.

The engine's own threads only read `connection`: either attached to a living node, or None, and then they go on
without PDX. They never wait for an attach.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pdx.client.connection import Connection
from pdx.config import ConnectorConfig, NodeConfig, default_proxy
from pdx.errors import ConfigError, PdxError
from pdx.memory.arena import Arena
from pdx.memory.slot import Slot
from pdx.node.start import start_detached
from pdx.wire.messages import Abort, Hello

log = logging.getLogger("pdx.engine")

CHECK_S = 0.1
ANSWER_S = 0.3  # a node that runs answers within this; after it, this process starts one
START_AGAIN_S = 10.0


class NodeLink:
    """Keeps one process attached. `starter`: start a node when none answers.

    Only the scheduler half's link logs what happens to the node, because each rank has a link, too. `_lock` guards the
    arena's user (`_use`) and `_attached`, what is counted and what is given back; `_giving` is held while the arena is
    given to its user or taken away; the link's thread owns everything else.
    """

    def __init__(self, config: ConnectorConfig, hello: Hello, *, starter: bool) -> None:
        self._config = config
        self._hello = hello
        self._starter = starter and config.start_node
        self._connection: Connection | None = None
        self._uncounted: Counter[str] = Counter()  # what happened while there was no node to tell
        self._unsaid: tuple[int, list[Slot]] = 0, []  # room to give back to a life of the node, once attached
        self._keyed = b""  # see `Connection.key_by`
        self._lock = threading.Lock()
        self._giving = threading.Lock()
        self._use: Callable[[Arena | None], None] | None = None
        self._used: Connection | None = None  # the connection whose arena `_use` has
        self._attached = threading.Event()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._start_again_at = 0.0
        self._speaks = hello.kind == "scheduler"
        self._thread = threading.Thread(target=self._keep_attached, name="pdx-link", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<NodeLink {self._connection!r}>"

    @property
    def connection(self) -> Connection | None:
        """The connection to a living node whose arena is in use here; or None."""
        connection = self._connection
        if connection is None or (self._use is not None and self._used is not connection):
            return None
        return connection if connection.is_alive else None

    @property
    def is_attached(self) -> bool:
        return self.connection is not None

    def serve(self, use: Callable[[Arena | None], None]) -> None:
        """Call `use` with each node's arena before `connection` returns that node's, and with None when it is gone.

        `use` runs on the link's thread and may take long. Call it once before `wait_attached`, and again after
        `withdraw`.
        """
        with self._lock:
            self._attached.clear()
            self._use = use
        self._wake.set()

    def withdraw(self) -> None:
        """Take the arena from its user, who is called with None and never again. Idempotent."""
        with self._giving:
            with self._lock:
                use, self._use = self._use, None
            if use is not None and self._used is not None:
                use(None)
            self._used = None

    def count(self, reason: str, text: str = "", *args: object, times: int = 1) -> None:
        """Count something that was done without PDX, or with less of it. This node is told, or the next one; logged as
        by `Connection.count`."""
        with self._lock:
            connection = self._connection
            if connection is None:
                level = logging.DEBUG if reason in self._uncounted else logging.WARNING
                self._uncounted[reason] += times
        if connection is not None:
            connection.count(reason, text, *args, times=times)
        elif text:
            log.log(level, text, *args)

    def give_back(self, epoch: int, slots: Sequence[Slot]) -> None:
        """Give back room that the node's life `epoch` has promised and that nothing was ever copied to.

        The node may promise room before this process knows that it is attached, and the engine may have no further
        step: the node is told once this process knows.
        """
        with self._lock:
            connection = self._connection
            if connection is None or connection.epoch != epoch:
                self._unsaid = epoch, [*(self._unsaid[1] if self._unsaid[0] == epoch else ()), *slots]
                return
        connection.tell(Abort(list(slots)))

    def key_by(self, fingerprint: bytes) -> None:
        """`Connection.key_by`, for this node and every later one."""
        with self._lock:
            self._keyed = fingerprint
            if self._connection is not None:
                self._connection.key_by(fingerprint)

    def wait_attached(self, timeout_s: float) -> bool:
        """For start-up only: whether this process is attached within `timeout_s`. If not, it logs where to look."""
        if self._attached.wait(timeout_s):
            return True
        with contextlib.suppress(ConfigError):  # of the address, which the thread has logged
            address = self._config.node_address()
            log.warning(
                "not attached to the node at %s after %g s: running without PDX until one answers; a node that an "
                "engine has started logs to %s.log",
                address,
                timeout_s,
                address.removeprefix("ipc://"),
            )
        return False

    def close(self) -> None:
        """Detach. Idempotent."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        self._detach()
        self._use = None  # it leads back to the engine's tensors, which would stay until the next garbage collection

    def _keep_attached(self) -> None:
        while not self._stop.is_set():
            try:
                if self._connection is None or not self._connection.is_alive:
                    self._attached.clear()
                    self._attach()
                self._give_arena()
            except Exception as error:  # there may be a node, a descriptor or a thread to be had later
                text = "this process is not attached to a node: %s"
                log.warning(text, error, exc_info=not isinstance(error, PdxError))
                self._stop.wait(1.0)
            self._wake.wait(CHECK_S if self._attached.is_set() else 0.01)
            self._wake.clear()

    def _give_arena(self) -> None:
        connection = self._connection
        with self._giving:
            with self._lock:
                use = self._use
                if connection is None or use is None or self._used is connection:
                    if connection is not None:
                        self._attached.set()
                    return
            connection.arena.populate_in_background()  # for copiers: a scheduler half never touches it
            use(connection.arena)
            self._used = connection
            with self._lock:
                if self._use is use:
                    self._attached.set()

    def _detach(self) -> None:
        if self._connection is None:
            return
        with self._giving:
            if self._used is not None and self._use is not None:
                self._use(None)
            self._used = None
        self._connection.close()
        self._connection = None

    def _attach(self) -> None:
        if self._connection is not None:
            log.log(
                logging.WARNING if self._speaks else logging.DEBUG,
                "PDX has lost the node at %s (pid %d): this engine runs without it until the next one",
                self._connection.address,
                self._connection.node_pid,
            )
            self._detach()
        connection = Connection(self._config.node_address(), self._hello)
        try:
            if connection.attach(ANSWER_S):
                with self._lock:
                    uncounted, self._uncounted = self._uncounted, Counter()
                    (epoch, unsaid), self._unsaid = self._unsaid, (0, [])
                    self._connection = connection
                    if self._keyed:
                        connection.key_by(self._keyed)
                if unsaid and epoch == connection.epoch:
                    connection.tell(Abort(unsaid))
                for reason, times in uncounted.items():
                    connection.count(reason, times=times)
                self._log_attached(connection)
                return
        except Exception:
            connection.close()
            raise
        connection.close()
        if self._starter and time.monotonic() >= self._start_again_at:
            self._start_again_at = time.monotonic() + START_AGAIN_S
            start_detached(self._node_config())

    def _log_attached(self, connection: Connection) -> None:
        arena = connection.arena
        log.log(
            logging.INFO if self._speaks else logging.DEBUG,
            "PDX is attached to the node at %s (pid %d): %.1f GiB in %s, chunks of %d tokens",
            connection.address,
            connection.node_pid,
            arena.nbytes / 2**30,
            f"the memory of GPU {arena.gpu}" if arena.gpu else "host memory",
            self._config.chunk_tokens,
        )

    def _node_config(self) -> NodeConfig:
        return NodeConfig(
            address=self._config.node_address(),
            proxy=self._config.proxy or default_proxy(),
            trace=self._config.trace,
            **self._config.of_node,
        )
