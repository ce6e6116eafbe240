"""A control socket of a proxy, and nodes that dial it."""

import contextlib

from proxy_harness import Node

from pdx.proxy.control import Control
from pdx.security.curve_keys import secure_client
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

    def node(self, name, own=None, server_key=None):
        node = Node("inproc://nowhere-yet", name)
        node.socket.disconnect("inproc://nowhere-yet")
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
