"""A control socket of a proxy, and nodes that dial it."""

import contextlib

import zmq
from connection_stage import settled
from proxy_harness import Node

from pdx.proxy.control import Control
from pdx.security.curve_keys import KeyPair, secure_client
from pdx.telemetry.env import Env
from pdx.wire.proxy import NodeReport


class ControlStage:
    """`took`: what was heard of nodes, by their names."""

    def __init__(self, address, **files):
        self.env = Env()
        self.took = []
        self.control = Control(address, self.env, lambda node, message: self.take(node, message), **files)
        self.nodes = []

    def take(self, node, message):
        self.took.append((node, message))

    @property
    def reports(self):
        return [message for _, message in self.took if isinstance(message, NodeReport)]

    @property
    def drops(self):
        return list(self.control.dropped.elements())

    def node(self, name, own=None, server_key=None, *, route=b""):
        """`route`: by which ZMQ tells it from others, if not one of its own."""
        node = Node("inproc://nowhere-yet", name)
        node.socket.disconnect("inproc://nowhere-yet")
        if route:
            node.socket.setsockopt(zmq.IDENTITY, route)
        secure_client(node.socket, own=own, server_key=server_key)
        node.socket.connect(self.control.address)
        self.nodes.append(node)
        return node


@contextlib.contextmanager
def control_stage(address="tcp://127.0.0.1:0", kind=ControlStage, **files):
    made = kind(address, **files)
    made.control.start()
    try:
        yield made
    finally:
        for node in made.nodes:
            node.close()
        made.control.close()


class Members:
    """Key pairs of two nodes, the proxy and a stranger, and the settings of a proxy whose roster has the nodes."""

    def __init__(self, folder):
        self.pairs = {name: KeyPair.make() for name in ("one", "two", "proxy", "stranger")}
        secret, _ = self.pairs["proxy"].save(folder / "keys", "proxy")
        self.roster = folder / "roster.toml"
        self.files = {"keys": str(secret), "roster": str(self.roster)}
        self.write("one", "two")

    def write(self, *names, address="tcp://10.0.0.1:1", more=""):
        where = f'address = "{address}"\n{more}'
        entries = (f'[nodes.{name}]\n{where}\nkey = "{self.pairs[name].public}"\n' for name in names)
        self.roster.write_text("".join(entries))
        self.roster.chmod(0o600)
        settled(self.roster)
