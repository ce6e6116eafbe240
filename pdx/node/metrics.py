"""A node's Prometheus metrics over HTTP: each number of its status, asked of the control loop when somebody scrapes.

One thread serves one connection at a time, so floods of connections cost metrics and nothing else. A connection has
SILENCE_S to say what it wants, and as long to take the answer.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdx.errors import ConfigError
from pdx.node.peers.connection import ConnectionState
from pdx.security.address import check_address
from pdx.store.lifecycle import State
from pdx.store.tier import Tally
from pdx.telemetry.env import Env
from pdx.wire.status import NodeStatus, PeerStatus, TierStatus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger("pdx.node")

ANSWER_S = 2.0  # for the control loop to tell its status
SILENCE_S = 2.0  # for a connection to have asked
_MAX_HEAD_BYTES = 16 << 10  # of what it asks
PATH = "/metrics"
_LOOK_S = 0.5  # between looks whether the server is to end
_PAUSE_S = 0.05  # after an accept that failed, as without free descriptors: no busy loop
_IDENTITY = {"epoch", "pid"}


_HELP = {
    "uptime_s": "Seconds since the node started.",
    "arena_bytes": "Bytes of the arenas.",
    "free_bytes": "Bytes of the arenas that no chunk has.",
    "chunks": "Chunks in the arenas, each shard counted, by state.",
    "chunk_bytes": "Bytes of the chunks in the arenas, by state.",
    "leases": "Leases that engines and clients hold.",
    "pins": "Chunks in the arenas that are pinned.",
    "pinned_bytes": "Bytes of the chunks in the arenas that are pinned.",
    "transfers": "Transfers between engines that are under way.",
    "counters": "What happened since the node started, by name; the documentation lists the names.",
    "mapped": "Blocks of device memory that the node's process has mapped.",
}
_PEER_HELP = {
    "up": "1: the connection to the peer is up.",
    "pushes": "Pushes to the peer that are under way.",
    "landing": "Pushes from the peer that are under way.",
    "sent_bytes": "Bytes sent to the peer.",
    "landed_bytes": "Bytes that came from the peer.",
}
_TIER_HELP = {
    "up": "1: the tier answers.",
    "chunks": "Chunks in the tier, each shard counted.",
    "used_bytes": "Bytes in the tier, with what is being written or removed.",
    "limit_bytes": "Bytes that the tier may have.",
    "copies": "Copies to and from the tier that are under way, or wait for their turn.",
    "load_gb_s": "Rate of loads as last measured, GB/s; 0: not yet.",
    "store_gb_s": "Rate of stores as last measured, GB/s; 0: not yet.",
    "hits": "Chunks that a request found for the first time since they came from the tier.",
    "misses": "First chunks that a request lacked, or got from a tier below.",
    "loads": "Chunks that were loaded, each shard counted.",
    "stores": "Chunks that were stored, each shard counted.",
    "loaded_bytes": "Bytes of the chunks that were loaded.",
    "stored_bytes": "Bytes of the chunks that were stored.",
    "dropped": "Chunks that were not stored: the tier did not keep up, or took none.",
    "errors": "Calls that failed, and what was not the chunk that it should be.",
    "read_bytes": "Bytes read for the loads: fewer where chunks are encoded.",
    "written_bytes": "Bytes written for the stores: fewer where chunks are encoded.",
}


class _Status(Collector):
    def __init__(self, ask: Callable[[], NodeStatus]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        status = self._ask()
        for name, value in msgspec.structs.asdict(status).items():
            text = _HELP.get(name, "")
            if isinstance(value, int | float) and name not in _IDENTITY:
                yield GaugeMetricFamily(f"pdx_node_{name}", text, value=value)
            elif name == "counters":
                counters = CounterMetricFamily(f"pdx_node_{name}", text, labels=["name"])
                for key, count in sorted(value.items()):
                    counters.add_metric([key], count)
                yield counters
            elif isinstance(value, dict):
                states = GaugeMetricFamily(f"pdx_node_{name}", text, labels=["state"])
                for state in State:
                    if state is not State.FREE:  # there are no such chunks
                        states.add_metric([state], value.get(state, 0))
                yield states
        for label, told, helps in ("peer", status.peers, _PEER_HELP), ("tier", status.tiers, _TIER_HELP):
            yield from (_by_name(label, told, name, text) for name, text in helps.items())


def _by_name(label: str, told: Sequence[PeerStatus | TierStatus], name: str, text: str) -> Metric:
    is_counter = name in Tally.__struct_fields__ or label == "peer" and name.endswith("_bytes")
    found = (CounterMetricFamily if is_counter else GaugeMetricFamily)(f"pdx_node_{label}_{name}", text, labels=[label])
    for each in told:
        is_up = each.is_up if isinstance(each, TierStatus) else each.state == ConnectionState.READY
        found.add_metric([each.name], float(is_up if name == "up" else getattr(each, name)))
    return found


def _head(connection: socket.socket) -> bytes:
    """What a connection asks, up to the empty line.

    :raises OSError: it has not said all of that in time.
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
        """What was asked is read before anything is made of it, so that a byte now and then gains no time."""
        super().setup()
        self.rfile = io.BufferedReader(io.BytesIO(_head(self.connection)))

    def log_message(self, *_: Any) -> None:
        pass


def _at_its_path(tell: WSGIApplication) -> WSGIApplication:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == PATH:
            return tell(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"the metrics are at {PATH}\n".encode()]

    return app


class MetricsServer(WSGIServer):
    """Listens at `HOST:PORT` of this host until `close`."""

    timeout = _LOOK_S

    def __init__(self, address: str, env: Env, *, status: Callable[[], NodeStatus], has_keys: bool = False) -> None:
        """`status` is for the control loop's thread. `has_keys`: the node
        has keys and a roster, so that it may be seen from other hosts; whoever gets there is told the metrics.

        :raises ConfigError: the address is none, leads beyond this host without keys, or cannot be had.
        """
        check_address(f"tcp://{address}", has_keys=has_keys, listens=True)
        url = urlsplit(f"tcp://{address}")

        def ask() -> NodeStatus:
            future: Future[NodeStatus] = Future()
            env.mailbox.post(lambda: future.set_result(status()))
            return future.result(ANSWER_S)

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Status(ask))
        try:
            super().__init__((url.hostname or "", url.port or 0), _Handler)
        except OSError as error:
            raise ConfigError(f"--metrics {address}: {error.strerror or error}") from error
        self.set_app(_at_its_path(make_wsgi_app(registry)))
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="pdx-metrics", daemon=True).start()
        log.info("metrics at http://%s:%d/metrics, for everybody who gets there", *self.server_address[:2])

    def close(self) -> None:
        """Answer nobody who comes from now on. Does not wait for a connection that is being answered."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.handle_request()
        self.server_close()

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
        """Without the base class's look-up of the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()
