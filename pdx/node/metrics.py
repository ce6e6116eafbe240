"""A node's Prometheus metrics and health over HTTP; each request asks the control loop.

One thread serves one connection at a time, so floods of connections cost metrics and nothing else. A connection has
SILENCE_S to send its request, and as long to take the answer.
"""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, TypeVar, get_args
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdx.errors import ConfigError
from pdx.node.peers.connection import ConnectionState
from pdx.security.address import check_address, is_loopback
from pdx.security.secret_file import Token
from pdx.store.lifecycle import State
from pdx.telemetry.env import Env
from pdx.telemetry.histogram import Timings
from pdx.telemetry.metrics import Values, alone, families_of, family, registry
from pdx.telemetry.names import COPIES, DEGRADED, METRICS, TIER_EVENTS, of_counter
from pdx.wire.base import Kind
from pdx.wire.hints import Outcome
from pdx.wire.status import NodeStatus, PeerStatus, TierStatus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger("pdx.node")

ANSWER_S = 2.0  # for the control loop to answer
SILENCE_S = 2.0  # for a connection to send its request
_MAX_HEAD_BYTES = 16 << 10  # of a request
PATH = "/metrics"
WELL = ("/healthz", "/readyz")  # for supervisors that restart nodes; no token is needed
_LOOK_S = 0.5  # between checks whether the server is to end
_PAUSE_S = 0.05  # after a failed accept, as without free descriptors, against a busy loop
_TIMED: list[tuple[str, ...]] = [
    *(("pdx_node_admit_seconds",), ("pdx_node_handoff_seconds",)),
    *(("pdx_node_copy_seconds", *each) for each in COPIES),
]
_GAUGES = ("arena_bytes", "free_bytes", "leases", "pins", "pinned_bytes", "transfers", "mapped")

T = TypeVar("T")


def zeros() -> dict[str, dict[tuple[str, ...], float]]:
    """All counters of a node by metric, each series at 0 from the start: else `rate` does not see the first event."""
    found: dict[str, dict[tuple[str, ...], float]] = {
        name: {} if each.labels else {(): 0}
        for name, each in METRICS.items()
        if name.startswith("pdx_node_") and each.kind == "counter" and each.labels[:1] not in (("peer",), ("tier",))
    }
    found["pdx_node_degraded"] = {(reason,): 0 for reason in (*DEGRADED, "others")}
    found["pdx_node_hints"] = {(outcome,): 0 for outcome in get_args(Outcome) if outcome != "accepted"}
    found["pdx_node_tier_events"] = {(kind, each): 0 for kind, events in TIER_EVENTS.items() for each in events}
    for name in ("pdx_node_copied_bytes", "pdx_node_copied_seconds"):
        found[name] = dict.fromkeys(COPIES, 0)
    return found


def families(status: NodeStatus, timings: Timings) -> Iterator[Metric]:
    """All metrics of a node."""
    counters = zeros()
    for name, count in status.counters.items():
        metric, labels = of_counter(name)
        counters[metric][labels] = count / 1e9 if name.endswith("_ns") else count
    for metric, values in counters.items():
        yield family(metric, values)
    yield alone("pdx_node_uptime_seconds", status.uptime_s)
    for name in _GAUGES:
        yield alone(f"pdx_node_{name}", getattr(status, name))
    for name, by_state in ("chunks", status.chunks), ("chunk_bytes", status.chunk_bytes):
        states = {(state.value,): by_state.get(state, 0) for state in State if state is not State.FREE}
        yield family(f"pdx_node_{name}", states)
    attached = {(kind,): sum(each.kind == kind for each in status.attached) for kind in get_args(Kind)[:3]}
    yield family("pdx_node_attached", attached)
    for label, told in ("peer", status.peers), ("tier", status.tiers):
        for metric, about in METRICS.items():
            if about.labels == (label,) and metric.startswith(f"pdx_node_{label}_"):
                yield family(metric, _by_name(told, metric.removeprefix(f"pdx_node_{label}_")))
    yield from families_of(timings)


def _by_name(told: Sequence[PeerStatus | TierStatus], name: str) -> Values:
    return {(each.name,): _value(each, name) for each in told}


def _value(told: PeerStatus | TierStatus, name: str) -> float:
    if name == "up":
        return told.is_up if isinstance(told, TierStatus) else told.state == ConnectionState.READY
    if name.endswith("_bytes_per_second"):
        return float(getattr(told, name.replace("bytes_per_second", "gb_s"))) * 1e9
    return float(getattr(told, name))


class _Node(Collector):
    def __init__(self, tell: Callable[[], tuple[NodeStatus, Timings]]) -> None:
        self._tell = tell

    def collect(self) -> Iterator[Metric]:
        return families(*self._tell())


def _head(connection: socket.socket) -> bytes:
    """A connection's request up to the empty line.

    :raises OSError: the client has not sent all of it in time.
    """
    deadline, data = time.monotonic() + SILENCE_S, b""
    while b"\r\n\r\n" not in data and b"\n\n" not in data and len(data) < _MAX_HEAD_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(4096)
        if not piece:
            break
        data += piece
    connection.settimeout(SILENCE_S)
    return data


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        """Read the whole request before parsing, so that a client that sends it byte by byte gains no time."""
        super().setup()
        self.rfile = io.BufferedReader(io.BytesIO(_head(self.connection)))

    def log_message(self, *_: Any) -> None:
        pass


class MetricsServer(WSGIServer):
    """Listens at `HOST:PORT` of this host until `close`."""

    timeout = _LOOK_S

    def __init__(
        self,
        address: str,
        env: Env,
        *,
        status: Callable[[], NodeStatus],
        token_file: str = "",
        has_keys: bool = False,
    ) -> None:
        """`status` is called on the control loop's thread. `token_file`: holds the token that clients must show for the
        metrics; without it, any client gets them. `has_keys`: the node has keys and a roster, so that it may serve
        other hosts without a token as well.

        :raises ConfigError: the address is invalid, beyond this host without a token or keys, or cannot be bound.
        """
        check_address(f"tcp://{address}", has_keys=True, listens=True)
        url = urlsplit(f"tcp://{address}")
        host = url.hostname or ""
        if not (token_file or has_keys or is_loopback(host)):
            text = "is beyond this host, which needs --metrics-token-file, or --keys and --roster"
            raise ConfigError(f"--metrics {address} {text}")
        for key in _TIMED:
            env.timings[key]  # creates its series
        self._env = env
        self._token = Token(token_file) if token_file else None
        told = registry(_Node(lambda: self._asked(lambda: (status(), env.timings.copy()))))
        self._metrics = make_wsgi_app(told)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, url.port or 0), _Handler)
        except OSError as error:
            raise ConfigError(f"--metrics {address}: {error.strerror or error}") from error
        self.set_app(self._answer)
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="pdx-metrics", daemon=True).start()
        whom = "everybody who gets there" if self._token is None else "whoever shows the token"
        log.info("metrics at http://%s:%d/metrics, for %s", *self.server_address[:2], whom)

    def close(self) -> None:
        """Accept no more connections. Does not wait for one that is being answered."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.handle_request()
        self.server_close()

    def _asked(self, ask: Callable[[], T]) -> T:
        """Call `ask` on the control loop's thread. :raises TimeoutError: no answer in time."""
        future: Future[T] = Future()
        self._env.mailbox.post(lambda: future.set_result(ask()))
        return future.result(ANSWER_S)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == PATH and self._is_let_in(environ.get("HTTP_AUTHORIZATION", "")):
            told: Iterable[bytes] = self._metrics(environ, start_response)
            return told
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if path == PATH:
            start_response("401 Unauthorized", [*headers, ("WWW-Authenticate", "Bearer")])
            return [b"a token is needed: Authorization: Bearer TOKEN\n"]
        if path in WELL:
            try:
                self._asked(lambda: None)
            except TimeoutError:
                start_response("503 Service Unavailable", headers)
                return [f"the control loop has not answered for {ANSWER_S:g} s\n".encode()]
            start_response("200 OK", headers)
            return [b"ok\n"]
        start_response("404 Not Found", headers)
        return [f"the metrics are at {PATH}\n".encode()]

    def _is_let_in(self, header: str) -> bool:
        scheme, _, token = header.partition(" ")
        try:
            return self._token is None or (scheme.lower() == "bearer" and self._token.is_shown(token.strip()))
        except ConfigError as error:
            log.warning("nobody is told the metrics: %s", error)
            return False

    # ---- as a WSGI server -------------------------------------------------------------------

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics were not told to %s", client_address, exc_info=True)

    def server_bind(self) -> None:
        """Bind without the base class's look-up of the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()
