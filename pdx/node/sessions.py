"""The processes attached to a node, and how it notices their death.

A process's death is known by its pidfd, never guessed from silence: a stopped process is silent, too, and goes on
writing when it is continued (docs/architecture.md, invariant 3).
"""

from __future__ import annotations

import errno
import hmac
import itertools
import math
import os
import secrets
import select
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdx.errors import NodeError, ProtocolError
from pdx.memory.apart import differing, fields_of_groups
from pdx.memory.layout import group_title
from pdx.security import descriptors
from pdx.wire.base import MAX_SHARDS
from pdx.wire.messages import Hello

TICKET_BYTES = 16
MAX_SESSIONS = 4096
MAX_OF_ONE_PROCESS = 256
MAX_GONE = 256  # models whose last engine is remembered
_SCHEDULER = -1  # an engine's scheduler half, beside the numbers of its shards


class Session:
    """One attached process. Owned by the node's control loop."""

    def __init__(self, number: int, route: bytes, hello: Hello, pidfd: int, now: float) -> None:
        self.number = number
        self.route = route
        self.hello = hello
        self.pidfd = pidfd
        self.is_near = True  # its process is in the node's PID namespace, so pids mean the same to both
        self.last_seen = now
        self.last_seq = 0
        self.running = 0
        self.chunk_s = 0.0  # how long its engine takes to compute a chunk; 0: unknown
        self.load_s = 0.0  # how long it takes to copy a chunk into its KV cache; 0: unknown
        self.layout = hello.layout  # fingerprint by which its engine makes keys; changes when its cache is reset
        self.home = 0  # the arena that its process reads and writes
        self.block_tokens = _number(hello.shape.get("block_tokens", ""))
        self.unshared = ""  # the engine of its model with which it cannot share chunks, and why …
        self.unshared_before = ""  # … and likewise an engine that has gone
        self.is_draining = False  # its engine is to get no more requests
        self.has_failed = False  # an internal error ended it; what its process holds stays until the process is gone
        self.ticket = secrets.token_bytes(TICKET_BYTES)  # its process shows it to map GPU memory

    def __repr__(self) -> str:
        return f"<Session {self.number} {self.hello.kind} {self.hello.engine!r} pid={self.hello.pid}>"

    @property
    def title(self) -> str:
        """The name of the engine or process, for explanations."""
        hello = self.hello
        return f"engine {hello.engine}" if hello.engine else f"{hello.kind} {hello.name or hello.pid}"

    @property
    def is_client(self) -> bool:
        """Whether its keys are names, not content, and it writes by itself what it reserves."""
        return self.hello.kind == "client"

    @property
    def groups(self) -> list[str]:
        """The cache groups of its engine, each in a few words."""
        return [group_title(fields) for fields in fields_of_groups(self.hello)] if self.hello.shape else []

    @property
    def shards(self) -> int:
        """For a worker, how many shards it writes; else how many a chunk of its engine has; 0: unknown."""
        hello = self.hello
        return hello.shards if hello.kind == "worker" else _number(hello.shape.get("num_shards", ""))

    @property
    def source(self) -> str:
        """The source of transfers: the process, which stays the same when it attaches again."""
        return f"process {self.hello.pid}"

    @property
    def is_dead(self) -> bool:
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


class Sessions:
    """All attached processes, by connection, by pidfd, and those of engines by engine and shard.

    `fd` is readable when a process has ended; waiting for it costs the same for any number of processes.
    """

    def __init__(self) -> None:
        self._by_route: dict[bytes, Session] = {}
        self._by_pidfd: dict[int, Session] = {}
        self._by_place: dict[tuple[str, int], Session] = {}  # see `_places`
        self._by_pid: Counter[int] = Counter()
        self._by_model: dict[str, Session] = {}  # the engine of each model that attached last
        self._gone: OrderedDict[str, Hello] = OrderedDict()  # by model, the last engine that has gone
        self.numbers = itertools.count(1)  # of peers, too
        self._deaths = select.epoll()
        self.fd = self._deaths.fileno()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_route.values()))

    def __len__(self) -> int:
        return len(self._by_route)

    def of_route(self, route: bytes) -> Session | None:
        return self._by_route.get(route)

    def ended(self) -> list[Session]:
        """Sessions whose process has ended, each once."""
        return [self._by_pidfd[pidfd] for pidfd, _ in self._deaths.poll(0)]

    def is_attached(self, pid: int) -> bool:
        return any(session.hello.pid == pid and not session.is_dead for session in self._by_route.values())

    def admits(self, pid: int, ticket: bytes) -> bool:
        sessions = [session for session in self._by_route.values() if session.hello.pid == pid]
        return any(hmac.compare_digest(session.ticket, ticket) and not session.is_dead for session in sessions)

    def workers(self, engine: str, shards: int, first: int = 0) -> list[Session] | None:
        """The writer of each shard of an engine's chunks, numbered from `first` on; None unless all are attached."""
        found = [self._by_place.get((engine, shard)) for shard in range(first, first + shards)]
        workers = [worker for worker in found if worker is not None]
        return workers if len(workers) == shards else None

    def chunk_s(self, session: Session, shards: int) -> float:
        """How long a session's engine takes to compute a chunk, by its slowest worker; infinity: unknown."""
        return max((worker.chunk_s for worker in self._every(session, shards)), default=0.0) or math.inf

    def load_s(self, session: Session, shards: int) -> float:
        """How long a session's engine takes to copy a chunk into its KV cache, by its slowest worker; 0: unknown."""
        known = [worker.load_s for worker in self._every(session, shards)]
        return max(known) if known and all(known) else 0.0

    def _every(self, session: Session, shards: int) -> list[Session]:
        """The workers of a session's engine in all pipeline stages; empty unless all of the first are attached."""
        found: list[Session] = []
        if not session.is_client:
            while more := self.workers(session.hello.engine, shards, len(found)):
                found += more
        return found

    def arenas(self, session: Session, shards: int) -> tuple[int, ...]:
        """The arenas of the shards that a session asks for: the homes of its engine's workers, or its own.

        Empty: all shards are in the first arena.
        """
        workers = None if session.is_client else self.workers(session.hello.engine, shards)
        homes = (session.home,) * shards if workers is None else tuple(worker.home for worker in workers)
        return homes if any(homes) else ()

    def attach(self, route: bytes, hello: Hello, pid: int, now: float) -> Session:
        """Add a session. `pid`: the process that sent the hello, as the kernel reports it.

        :raises ProtocolError: the process does not exist, is another user's, did not send this hello, or takes the
            place of another.
        :raises NodeError: there are too many sessions.
        """
        if route in self._by_route:
            raise ProtocolError(f"this connection is attached already: {self._by_route[route]!r}")
        if hello.shard + hello.shards > MAX_SHARDS:
            raise ProtocolError(
                f"shards {hello.shard} to {hello.shard + hello.shards}, where {MAX_SHARDS} are the most"
            )
        for place in _places(hello):
            if place in self._by_place:
                half = "a scheduler" if place[1] == _SCHEDULER else f"a worker of shard {place[1]}"
                raise ProtocolError(
                    f"engine {hello.engine!r} has {half} already: give each engine of this host an engine_id of its own"
                )
        if len(self._by_route) >= MAX_SESSIONS:
            raise NodeError(f"{MAX_SESSIONS} processes are attached already")
        if self._by_pid[pid] >= MAX_OF_ONE_PROCESS:
            raise NodeError(f"process {pid} is attached {MAX_OF_ONE_PROCESS} times already")
        pidfd, is_near = _watched(hello.pid, pid)
        hello = msgspec.structs.replace(hello, pid=pid)
        self._deaths.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)
        session = Session(next(self.numbers), route, hello, pidfd, now)
        session.is_near = is_near
        self._by_route[route] = session
        self._by_pidfd[pidfd] = session
        self._by_pid[hello.pid] += 1
        self._by_place |= dict.fromkeys(_places(hello), session)
        if hello.kind != "worker" and hello.shape.get("model"):
            self._compare(session, hello.shape["model"])
        return session

    def _compare(self, session: Session, model: str) -> None:
        other, gone = self._by_model.get(model), self._gone.get(model)
        self._by_model[model] = session
        if other is not None and (fields := differing(session.hello, other.hello)):
            session.unshared = f"with engine {other.hello.engine!r}: {fields}"
        elif other is None and gone is not None and (fields := differing(session.hello, gone)):
            session.unshared_before = f"with engine {gone.engine!r}, which has gone: {fields}"

    def detach(self, session: Session) -> None:
        """Forget a session and close its pidfd."""
        del self._by_route[session.route]
        del self._by_pidfd[session.pidfd]
        self._by_pid[session.hello.pid] -= 1
        if not self._by_pid[session.hello.pid]:
            del self._by_pid[session.hello.pid]
        self._deaths.unregister(session.pidfd)
        os.close(session.pidfd)
        for place in _places(session.hello):
            del self._by_place[place]
        model = session.hello.shape.get("model", "")
        if self._by_model.get(model) is session:
            del self._by_model[model]
            self._gone[model] = session.hello
            self._gone.move_to_end(model)
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)

    def close(self) -> None:
        for session in self:
            self.detach(session)
        self._deaths.close()


def _places(hello: Hello) -> list[tuple[str, int]]:
    """What one process of an engine has: the engine and number of each shard that it writes, or its scheduler half."""
    if hello.kind == "scheduler":
        return [(hello.engine, _SCHEDULER)]
    if hello.kind != "worker":
        return []
    return [(hello.engine, shard) for shard in range(hello.shard, hello.shard + hello.shards)]


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _watched(claimed: int, pid: int) -> tuple[int, bool]:
    """A pidfd of process `pid` (by the kernel), which claims to be `claimed`, and whether it is in our PID namespace.

    A process in a PID namespace below the node's has one pid here and another there (ADR 7).
    """
    if not pid:
        raise ProtocolError(
            f"process {claimed} is not seen from here: a node sees its own PID namespace and those below it. Give it "
            "the host's (hostPID: true, docker run --pid=host), or the one of its engines"
        )
    none_left = f"this node has no file descriptor left for process {claimed} (ulimit -n)"
    if descriptors.left() < descriptors.reserve() // 2:  # the rest is for the node itself
        raise NodeError(none_left)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise NodeError(none_left) from error
        raise ProtocolError(f"no process {pid} on this host: {error}") from error
    try:
        numbers, owner = _numbers(pid), os.stat(f"/proc/{pid}").st_uid
    except (OSError, ValueError):
        numbers, owner = [], -1
    if owner != os.getuid():
        why = f"process {pid} belongs to another user, or has just ended"
    elif numbers[-1] != claimed:  # else memory would be freed when another process than its writer dies
        why = f"process {claimed} did not send this hello; the sender is process {pid} here"
    else:
        return pidfd, len(numbers) == 1
    os.close(pidfd)
    raise ProtocolError(why)


def _numbers(pid: int) -> list[int]:
    """A process's pids, in our PID namespace and in those below it that it is in."""
    text = Path(f"/proc/{pid}/status").read_text()
    numbers = [int(number) for number in text.partition("\nNSpid:")[2].partition("\n")[0].split()]
    return numbers or [pid]  # a kernel without such namespaces
