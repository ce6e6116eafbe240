"""A plain ROUTER where a node expects its proxy."""

import zmq

from pdx.testing.waiting import wait_until
from pdx.wire.messages import (
    encode,
)
from pdx.wire.proxy import Order, Reply, decode_to_proxy


class Proxy:
    def __init__(self, address):
        self.address = address
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(address)
        self.route = b""

    def report(self):
        assert self.router.poll(30_000), "no report"
        self.route, frame = self.router.recv_multipart()
        return decode_to_proxy(frame)

    def report_where(self, condition):
        """The first report that says what is awaited."""
        return wait_until(lambda: condition(report := self.report()) and report)

    def send(self, *frames):
        self.router.send_multipart([self.route, *frames])

    def order(self, verb, number=5):
        """The outcome of a verb."""
        self.send(encode(Order(number, verb)))
        reply = self.report_where(lambda said: isinstance(said, Reply))
        assert reply.number == number
        return reply.outcome
