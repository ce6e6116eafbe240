"""A stand-in of the Kubernetes API: EndpointSlices of one namespace, listed and watched by HTTPS with a token.

It does what discovery asks of the API, and what may happen to it: old versions are forgotten (410), tokens are renewed,
connections drop, and `answers` has it say anything at all. It checks nothing else.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from http_server import answering
from remote_bed import certificate

NAMESPACE, SERVICE = "llm", "pdx-peers"
LABEL = f"kubernetes.io/service-name={SERVICE}"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def endpoint(address: str, pod: str = "", host: str = "", **more: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": pod, "namespace": NAMESPACE}} if pod else {}
    return {"addresses": [address], "conditions": {"ready": True}, **target, "nodeName": host or None, **more}


class KubernetesStandIn(ThreadingHTTPServer):
    """`account`: the folder with the files that a pod has of its service account. `asked`: the queries that came."""

    daemon_threads = False

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        cert, key = certificate(folder)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(cert, key)
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"https://127.0.0.1:{self.server_port}"
        self.account = folder / "serviceaccount"
        self.account.mkdir()
        (self.account / "ca.crt").write_bytes(cert.read_bytes())
        (self.account / "namespace").write_text(NAMESPACE)
        self.renew("first")
        self.asked: list[dict[str, str]] = []
        self.answers: Callable[[_Handler, dict[str, str]], None] | None = None  # in its place
        self._changed = threading.Condition()
        self._slices: dict[str, dict[str, Any]] = {}
        self._log: list[dict[str, Any]] = []  # events; the one of version n is the nth behind those forgotten
        self._forgotten = 0
        self._generation = 0  # of connections: those of an older one are to end
        self._has_ended = False

    @property
    def version(self) -> int:
        return self._forgotten + len(self._log)

    def renew(self, token: str) -> None:
        """From now on this token counts alone."""
        self.token = token
        (self.account / "token").write_text(f"{token}\n")

    def put(self, name: str, *endpoints: dict[str, Any], kind: str = "IPv4", **ports: int) -> None:
        """A slice; `ports`: by name."""
        told = [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports.items()]
        with self._changed:
            event = "MODIFIED" if name in self._slices else "ADDED"
            meta = {"name": name, "namespace": NAMESPACE, "resourceVersion": str(self.version + 1)}
            self._slices[name] = {
                "kind": "EndpointSlice",
                "metadata": meta,
                "addressType": kind,
                "endpoints": list(endpoints) or None,
                "ports": told,
            }
            self._tell(event, self._slices[name])

    def delete(self, name: str) -> None:
        with self._changed:
            self._tell("DELETED", self._slices.pop(name))

    def _tell(self, event: str, about: dict[str, Any]) -> None:
        self._log.append({"type": event, "object": about})
        self._changed.notify_all()

    def forget(self) -> None:
        """Versions up to now cannot be watched from any more."""
        with self._changed:
            self._forgotten = self.version + 1
            self._log.clear()
        self.drop()

    def drop(self) -> None:
        """All watches end without a word."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def end(self) -> None:
        self._has_ended = True
        self.drop()

    # ---- the answers ------------------------------------------------------------------------

    def list(self, handler: _Handler) -> None:
        with self._changed:
            told = {"metadata": {"resourceVersion": str(self.version)}, "items": [*self._slices.values()]}
        handler.whole(200, {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", **told})

    def watch(self, handler: _Handler, seen: int) -> None:
        if seen < self._forgotten:
            handler.begin()
            handler.line(
                {"type": "ERROR", "object": {"kind": "Status", "metadata": {}, "code": 410, "reason": "Expired"}}
            )
            handler.end()
            return
        generation = self._generation
        handler.begin()
        while True:
            with self._changed:
                while self.version <= seen and self._generation == generation:
                    self._changed.wait()
                if self._generation != generation:
                    return
                events, seen = self._log[seen - self._forgotten :], self.version
            for event in events:
                handler.line(event)


class _Handler(BaseHTTPRequestHandler):
    server: KubernetesStandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.close_connection = True
        parts, server = urlsplit(self.path), self.server
        asked = dict(parse_qsl(parts.query))
        with contextlib.suppress(OSError):
            if self.headers["Authorization"] != f"Bearer {server.token}":
                self.whole(401, {"kind": "Status", "code": 401, "reason": "Unauthorized"})
            elif parts.path != PATH or asked.get("labelSelector") != LABEL:
                self.whole(404, {"kind": "Status", "code": 404, "reason": "NotFound"})
            else:
                server.asked.append(asked)
                if server.answers is not None:
                    server.answers(self, asked)
                elif "watch" in asked:
                    server.watch(self, int(asked["resourceVersion"]))
                else:
                    server.list(self)

    def whole(self, status: int, told: Any) -> None:
        self.raw(status, json.dumps(told).encode())

    def raw(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def line(self, told: Any) -> None:
        self.piece(json.dumps(told).encode() + b"\n")

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def kubernetes_standin(folder: Path) -> Iterator[KubernetesStandIn]:
    server = KubernetesStandIn(folder)
    with answering(server):
        try:
            yield server
        finally:
            server.end()
