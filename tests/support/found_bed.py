"""Nodes and a proxy whose roster has keys alone, and the clusters by which they find each other."""

from __future__ import annotations

import pytest
from etcd_bed import EtcdServer
from kubernetes_standin import kubernetes_standin

from pdx.security.curve_keys import KeyPair

ANY = "tcp://127.0.0.1:0"
NAMES = ("alpha", "beta", "proxy")


@pytest.fixture
def keys(place):
    """Of each name the settings of its key and of a roster that has the public keys, and no address."""
    pairs = {name: KeyPair.make() for name in NAMES}
    files = {name: str(pair.save(place / "keys", name)[0]) for name, pair in pairs.items()}
    text = "".join(f'[nodes.{name}]\nkey = "{pairs[name].public}"\n' for name in NAMES[:2])
    (place / "roster.toml").write_text(f'{text}[proxies.proxy]\nkey = "{pairs["proxy"].public}"\n')
    (place / "roster.toml").chmod(0o600)
    return {name: {"keys": file, "roster": str(place / "roster.toml")} for name, file in files.items()}


@pytest.fixture
def etcd(tmp_path):
    server = EtcdServer(tmp_path / "etcd")
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A stand-in of the Kubernetes API, and this process a pod."""
    with kubernetes_standin(tmp_path) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server_port))
        monkeypatch.setattr("pdx.discovery.kubernetes._ACCOUNT", api.account)
        yield api


def settings(place, keys, name, discover):
    """Of a node."""
    more = {"listen": ANY, "channels": ["tcp"], "peer_timeout_s": 60.0, "discover": discover}
    return {"address": f"ipc://{place}/{name}.sock", "name": name, **keys[name], **more}


def is_connected(node):
    return [each for each in node.status().peers if each.state == "ready"]


def crosses(one, other, name):
    """Whether a chunk that `one` pushes is read at `other`, the node beta."""
    data = name.encode() * 1000
    with one.client() as node, node.reserve(name, len(data), push_to="beta") as chunk:
        chunk.view[:] = data
        chunk.seal()
    with other.client() as node, node.get(name, wait_s=30) as arrived:
        return bytes(arrived.view) == data
