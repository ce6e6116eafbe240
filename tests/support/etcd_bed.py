"""A real etcd (Debian's `etcd-server`), a process of its own."""

from __future__ import annotations

import json
import urllib.request
from base64 import b64decode, b64encode

import pytest
from remote_bed import Server, program

ETCD = program("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="no etcd: apt-get install etcd-server")


class EtcdServer(Server):
    """`call` asks it what discovery asks, by itself."""

    def __init__(self, folder, tls=None):
        super().__init__(folder)
        self.tls = tls
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    def command(self):
        more = []
        if self.tls:
            ca, cert, key = map(str, self.tls)
            more = ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth"]
        peers = f"http://127.0.0.1:{self.port + 10_000}"
        return [
            *(ETCD, "--data-dir", "data", *more),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        ]

    def is_up(self):
        if not super().is_up():
            return False
        log = (self.folder / "log").read_text()
        return "ready to serve client requests" in log or "serving" in log

    def call(self, method, **ask):
        request = urllib.request.Request(f"{self.url}/v3/{method}", json.dumps(ask).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def put(self, key, value):
        self.call("kv/put", key=_coded(key), value=_coded(value))

    def delete(self, key):
        self.call("kv/deleterange", key=_coded(key))

    def entries(self):
        told = self.call("kv/range", key=_coded("\0"), range_end=_coded("\0")).get("kvs", ())
        return {b64decode(each["key"]).decode(): b64decode(each["value"]).decode() for each in told}


def _coded(text):
    return b64encode(text.encode()).decode()
