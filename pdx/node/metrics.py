"""A node's Prometheus metrics over HTTP: each number of its status, asked of the control loop when somebody scrapes.

One thread serves one connection at a time, so floods of connections cost metrics and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdx.errors import ConfigError
from pdx.node.peers.connection import ConnectionState
from pdx.security.address import check_listen
from pdx.store.tier import Tally
from pdx.wire.status import NodeStatus, PeerStatus, TierStatus

log = logging.getLogger("pdx.node")

ANSWER_S = 2.0  # for the control loop to tell its status
SILENCE_S = 2.0  # of a connection
_LOOK_S = 0.5  # between looks whether the server is to end
_PAUSE_S = 0.05  # after an accept that failed, as without free descriptors: no busy loop
_IDENTITY = {"epoch", "pid"}


class _Status(Collector):
    def __init__(self, ask: Callable[[], NodeStatus]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        status = self._ask()
        for name, value in msgspec.structs.asdict(status).items():
            text = f"{name} of pdx node --status --json"
            if isinstance(value, int | float) and name not in _IDENTITY:
                yield GaugeMetricFamily(f"pdx_node_{name}", text, value=value)
            elif isinstance(value, dict):
                family, label = (CounterMetricFamily, "name") if name == "counters" else (GaugeMetricFamily, "state")
                counted = family(f"pdx_node_{name}", text, labels=[label])
                for key, count in sorted(value.items()):
                    counted.add_metric([key], count)
                yield counted
        yield _by_peer(status.peers, "up", "1: the connection to the peer is up.")
        for name in ("pushes", "landing", "sent_bytes", "landed_bytes"):
            yield _by_peer(status.peers, name, f"{name} of the peers in pdx node --status --json")
        for name in (
            "chunks",
            "used_bytes",
            "limit_bytes",
            "copies",
            "load_gb_s",
            "store_gb_s",
            *Tally.__struct_fields__,
        ):
            yield _by_tier(status.tiers, name, name, f"{name} of the tiers in pdx node --status --json")
        yield _by_tier(status.tiers, "up", "is_up", "1: the tier answers.")


def _by_tier(tiers: list[TierStatus], name: str, field: str, text: str) -> Metric:
    family = CounterMetricFamily if name in Tally.__struct_fields__ else GaugeMetricFamily
    found = family(f"pdx_node_tier_{name}", text, labels=["tier"])
    for tier in tiers:
        found.add_metric([tier.name], float(getattr(tier, field)))
    return found


def _by_peer(peers: list[PeerStatus], name: str, text: str) -> Metric:
    family = CounterMetricFamily if name.endswith("_bytes") else GaugeMetricFamily
    found = family(f"pdx_node_peer_{name}", text, labels=["peer"])
    for peer in peers:
        found.add_metric(
            [peer.name], float(peer.state == ConnectionState.READY if name == "up" else getattr(peer, name))
        )
    return found


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, *_: Any) -> None:
        pass


class _Server(WSGIServer):
    timeout = _LOOK_S

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


class MetricsServer:
    """Listens at `HOST:PORT` of this host until `close`."""

    def __init__(
        self, address: str, *, post: Callable[[Callable[[], None]], None], status: Callable[[], NodeStatus]
    ) -> None:
        """`post` has the control loop call something; `status` is for the control loop's thread.

        :raises ConfigError: the address is none, leads beyond this host, or cannot be had.
        """
        check_listen(f"tcp://{address}", has_keys=False)
        url = urlsplit(f"tcp://{address}")

        def ask() -> NodeStatus:
            future: Future[NodeStatus] = Future()
            post(lambda: future.set_result(status()))
            return future.result(ANSWER_S)

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Status(ask))
        try:
            self._server = _Server((url.hostname or "", url.port or 0), _Handler)
        except OSError as error:
            raise ConfigError(f"--metrics {address}: {error.strerror or error}") from error
        self._server.set_app(make_wsgi_app(registry))
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="pdx-metrics", daemon=True).start()
        log.info("metrics at http://%s:%d/metrics, for everybody on this host", *self._server.server_address[:2])

    def close(self) -> None:
        """Answer nobody who comes from now on. Does not wait for a connection that is being answered."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._server.handle_request()
        self._server.server_close()
