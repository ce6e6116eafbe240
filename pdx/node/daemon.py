"""`pdx node`: the daemon's control loop. One thread, one ROUTER socket for processes, one DEALER to each proxy.

The lock beside the socket is held as long as the node lives, so there is one node per socket, and the next node can
remove what a killed one left behind.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import math
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import zmq

from pdx.closing import Closing
from pdx.config import NodeConfig, handover_path, private_folder, socket_path
from pdx.cuda.arena import GpuArena
from pdx.cuda.gpu import Gpu
from pdx.errors import GpuUnavailable, NodeError, NodeRunning, ProtocolError
from pdx.memory.arena import FIRST_GENERATIONS, Arena, round_up
from pdx.node.events.publisher import Publisher, Readers
from pdx.node.handover import HandoverServer
from pdx.node.metrics import MetricsServer
from pdx.node.numa import choose, memory_on, run_on
from pdx.node.process_socket import ProcessSocket, sender_pid
from pdx.node.proxies import Proxies, proxies_of
from pdx.node.reports import node_status
from pdx.node.service import PROBE_BYTES, Service
from pdx.security import descriptors
from pdx.security.address import check_address
from pdx.security.socket_lock import owned, remove_socket
from pdx.telemetry.env import Env, WakingClock
from pdx.telemetry.trace import trace_folder
from pdx.wire.burst import burst
from pdx.wire.messages import (
    Answer,
    Bye,
    FromNode,
    Hello,
    Refused,
    ToNode,
    decode_to_node,
    encode,
)

log = logging.getLogger("pdx.node")

SHM = Path("/dev/shm")
TICK_S = 0.2
CHANGES_S = 0.05  # between two batches of changes
TOUCH_S = 3600.0  # between two touches of the lock: cleaners of /tmp remove files untouched for days

_FAILED = Refused(NodeError.__name__, "an internal error ended this session; see the node's log, and attach again")


def run(config: NodeConfig) -> None:
    """Serve until SIGINT or SIGTERM.

    :raises NodeRunning: another node owns the address.
    :raises ArenaTooSmall: /dev/shm, or the GPU, cannot hold the arena.
    :raises GpuError: there is no such GPU, or its memory cannot be shared.
    """
    stop = False
    env = Env(log=log)
    descriptors.raise_limit()
    near = choose(config.numa, config.gpu)
    run_on(near)  # before there are other threads

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        stop = True
        env.mailbox.post(lambda: None)  # the turn ends at once

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    with Daemon(config, env, near=near) as daemon:
        place = f" on GPU {config.gpu}" if config.gpu else ""
        log.info("node at %s with %d MiB%s", config.address, config.arena_bytes >> 20, place)
        gc.freeze()  # the index lives as long as the node; Python's collector would take 0.1 s and more to scan it
        while not stop and not daemon.is_idle_too_long():
            daemon.turn(TICK_S)


class Daemon(Closing):
    """The sockets, the lock, the arena and the loop around a `Service`."""

    def __init__(self, config: NodeConfig, env: Env | None = None, *, near: int | None = None) -> None:
        """`env`: the control loop's. `near`: the preferred NUMA node of an arena in host memory; None: any."""
        path = socket_path(config.address)
        for address in proxies_of(config):
            check_address(address, has_keys=bool(config.keys), is_control=True)
        trace_folder(config.trace)  # before anything is opened
        private_folder(path.parent)
        self._config = config
        epoch = secrets.randbits(62)
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(owned(path, lambda owner: _running(path, owner)))
            gpus = [config.gpu, *config.more_gpus]
            for left in (path, *(handover_path(config.address, number) for number in range(len(gpus)))):
                remove_socket(left)  # left by a killed node
            arenas: list[Arena] = []
            _remove_left(config)
            for number, gpu in enumerate(gpus):
                arena = _fresh_arena(config, epoch, near, number, gpu)
                arenas.append(arena)
                arena.begin_generations(secrets.randbelow(FIRST_GENERATIONS))
                undo.callback(arena.close)
                undo.callback(arena.path.unlink, missing_ok=True)
            self._context = undo.enter_context(zmq.Context())
            self.env = env = env or Env(log=log)
            self._clock, self._faults = env.clock, env.faults
            undo.callback(env.mailbox.close)
            self._poller = zmq.Poller()
            self.service = Service(config, arenas, epoch, env, context=self._context, poller=self._poller)
            self._peers = self.service.peers
            undo.callback(self.service.sessions.close)
            undo.callback(self.service.copies.close)
            undo.callback(self._peers.close)
            self._process_socket = ProcessSocket(self._context, path, self.env.counters)
            undo.callback(self._process_socket.close)
            self._own: dict[object, Callable[[], None]] = {
                self._process_socket.socket: self._serve_burst,
                self._process_socket.queue.fd: lambda: None,  # a process connects: `admit_waiting` has dealt with it
                self.service.sessions.fd: self._end_dead,
                env.mailbox.fd: env.mailbox.deliver,
            }
            for source in self._own:
                self._poller.register(source, zmq.POLLIN)
            self._handovers = []
            for number, arena in enumerate(arenas):
                if isinstance(arena, GpuArena):
                    handover = handover_path(config.address, number)
                    made = HandoverServer(handover, self.service.sessions, arena.device, self._poller, env)
                    self._handovers.append(made)
                    undo.callback(made.close)
            undo.callback(self.service.tiers.close)
            self.service.open_tiers()
            undo.callback(self.service.controls.jobs.close)
            if config.metrics:
                undo.callback(
                    MetricsServer(
                        config.metrics,
                        env,
                        status=lambda: node_status(self.service),
                        token_file=config.metrics_token_file,
                        has_keys=bool(config.keys and config.roster),
                    ).close
                )
            self._publisher: Publisher | None = None
            connections = self._peers.connections
            if config.events:
                self._publisher = Publisher(
                    self.service.events,
                    address=config.events,
                    replay=config.events_replay,
                    topic=config.events_topic,
                    as_bytes=config.events_hashes == "bytes",
                    places=self.service.events.places() if config.events_media == "vllm" else {},
                    readers=Readers(
                        connections.own,
                        lambda: connections.roster.listeners,
                        config.events_open,
                        config.peer_timeout_s,
                    ),
                )
                undo.callback(self._publisher.close)
            self._proxies = Proxies(proxies_of(config), self.service, self._context, self._poller)
            undo.callback(self._proxies.close)
            self._undo = undo.pop_all()
        self._next_tick = self._next_changes = self._clock()  # when the next tick and the next changes are due
        self._next_touch = self._next_tick + TOUCH_S
        self._waking = WakingClock(2 * TICK_S, self._clock)
        self._last_busy = self._waking()

    def turn(self, timeout_s: float) -> None:
        """Wait for messages, deaths and deadlines once, and deal with them."""
        now = self._clock()
        timeout_s = min(timeout_s, self.service.due_in(now))
        if self.service.events.has_news:
            timeout_s = min(timeout_s, max(0.0, self._next_changes - now))
        ready = self._poller.poll(math.ceil(timeout_s * 1000))
        with self._faults.contain("letting processes in"):
            self._process_socket.queue.admit_waiting()
        for source, _ in ready:
            with self._faults.contain("serving a socket") as failures:
                self._serve_source(source)
            if failures and isinstance(source, int) and source not in self._own:
                with contextlib.suppress(KeyError):
                    self._poller.unregister(source)  # else it would fail at once again, forever
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)
        self.service.turn()
        with self._faults.contain("late answers"):
            for session, seq, answer in self.service.admissions.late_answers():
                self._send(session.route, seq, answer)
            self.service.copies.pump()  # starts copies that the answers have asked for
        with self._faults.contain("what is told of chunks"):
            self._tell_changes(now)
        with self._faults.contain("the report to the proxy"):
            self._proxies.report(now)

    def _serve_source(self, source: object) -> None:
        if source in self._own:
            self._own[source]()
        elif not (self._proxies.serve(source) or self._peers.connections.serve(source)) and isinstance(source, int):
            any(handover.serve(source) for handover in self._handovers)

    def _tell_changes(self, now: float) -> None:
        """Publish changes, but not on each turn: a batch costs as much as some hundred of the chunks in it."""
        batch = None
        if now >= self._next_changes:
            batch = self.service.events.turn()
            if batch is not None:
                self._next_changes = now + CHANGES_S
        if self._publisher is not None:
            if batch is not None:
                self._publisher.put(batch)
            self._publisher.turn()
        self._proxies.tell_changes()

    def _tick(self, now: float) -> None:
        self.service.tick()
        with self._faults.contain("the look at proxies"):
            self._proxies.look()
        for handover in self._handovers:
            with self._faults.contain("the tick of the handover"):
                handover.tick()
        if now >= self._next_touch:
            self._next_touch = now + TOUCH_S
            with self._faults.contain("the lock of the node"):
                self._lock.touch()

    def is_idle_too_long(self) -> bool:
        """Whether nothing has been attached for `exit_when_idle_s`; call it after each turn."""
        now = self._waking()  # no process could attach while the machine stood still
        if len(self.service.sessions):
            self._last_busy = now
        return now - self._last_busy > self._config.exit_when_idle_s > 0

    # ---- messages ---------------------------------------------------------------------------

    def _serve_burst(self) -> None:
        for _ in burst(self._clock):
            delivery = self._process_socket.receive()
            if delivery is None:
                return
            self._serve(*delivery)

    def _serve(self, route: bytes, frames: list[zmq.Frame]) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames instead of one")
            envelope = decode_to_node(frames[0].bytes)
        except ProtocolError as error:
            self._faults.dropped(self._sender(route), error)
            return
        try:
            kind = type(envelope.body).__name__
            with self._faults.contain(f"a {kind}", passing=(NodeError, ProtocolError)) as failures:
                answer = self._answer(route, envelope, frames)
            if failures:
                answer = self._end_failed(route)
        except (NodeError, ProtocolError) as error:
            self.env.counters["refused"] += 1
            answer = Refused.of(error)
        if answer is not None and envelope.reply:
            self._send(route, envelope.seq, answer)

    def _send(self, route: bytes, seq: int, answer: Answer) -> None:
        if self._process_socket.send(route, encode(FromNode(seq, answer))):
            return
        session = self.service.sessions.of_route(route)
        if session is not None:
            self.service.take_back(session, answer)

    def _answer(self, route: bytes, envelope: ToNode, frames: list[zmq.Frame]) -> Answer | None:
        session = self.service.sessions.of_route(route)
        if isinstance(envelope.body, Hello) and session is None:
            session, welcome = self.service.attach(route, envelope.body, sender_pid(frames))
            session.last_seq = envelope.seq
            return welcome
        if session is None:
            return Refused(NodeError.__name__, "say hello first")
        if envelope.seq <= session.last_seq:
            self._faults.dropped(self._sender(route), ProtocolError(f"message {envelope.seq} was replayed"))
            return None
        session.last_seq = envelope.seq
        if session.has_failed and not isinstance(envelope.body, Bye):
            return _FAILED
        return self.service.handle(session, envelope.body)

    def _end_failed(self, route: bytes) -> Refused:
        """End a session after an internal error. Its process may be writing: what it holds stays until bye or death."""
        session = self.service.sessions.of_route(route)
        if session is not None:
            session.has_failed = True
            log.error("%s is over: its process must attach again", repr(session))
        return _FAILED

    def _sender(self, route: bytes) -> str:
        session = self.service.sessions.of_route(route)
        return repr(session) if session is not None else "a process that is not attached"

    def _end_dead(self) -> None:
        for session in self.service.sessions.ended():
            log.warning("%s died; what it held is given back", repr(session))
            self.env.counters["deaths"] += 1
            with self._faults.contain("the end of a session"):
                self.service.end(session)

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop serving, remove the socket and the arena, give the lock back. Idempotent."""
        self._undo.close()


def _running(path: Path, owner: str) -> NodeRunning:
    return NodeRunning(f"a node (process {owner}) already owns {path}; use it, or give this one another --node")


def _prefix(config: NodeConfig) -> str:
    """The prefix of the names of this address's arenas, and of no others."""
    return "pdx-" + hashlib.blake2b(config.address.encode(), digest_size=8).hexdigest()


def _remove_left(config: NodeConfig) -> None:
    """Remove the arenas that a killed node of this address has left."""
    for left in SHM.glob(f"{_prefix(config)}-*.arena"):
        Arena.remove_left(left)


def _fresh_arena(config: NodeConfig, epoch: int, near: int | None, number: int, gpu: str) -> Arena:
    """Create arena `number` on this GPU or in host memory; the first has room after its chunks for peers' probes."""
    path = SHM / f"{_prefix(config)}-{epoch:016x}{f'-{number}' if number else ''}.arena"
    nbytes = round_up(config.gpu_arena_bytes) if number else round_up(config.arena_bytes) + PROBE_BYTES
    if gpu:
        try:
            return GpuArena.create(path, nbytes, Gpu.find(gpu))
        except GpuUnavailable as error:
            raise GpuUnavailable(f"--gpu {gpu}: {error}; without --gpu chunks lie in host memory") from error
    with memory_on(near):
        return Arena.create(path, nbytes)
