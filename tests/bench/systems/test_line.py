"""The slow line to a store: what comes through is whole, and never faster than the line."""

import socket
import threading
import time

import pytest

from pdx.bench.systems.line import Relay

MB = 1_000_000


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    while data := connection.recv(1 << 20):
                        connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def send(port, data):
    """What comes back, and after how many seconds."""
    came = bytearray()
    start_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        while len(came) < len(data):
            came += client.recv(1 << 20)
        sender.join()
    return bytes(came), time.monotonic() - start_s


@pytest.mark.parametrize("both_ways", [False, True])
def test_what_comes_back_takes_its_time(echo, both_ways):
    data = bytes(range(250)) * 8000
    relay = Relay(echo, rate=10 * MB, both_ways=both_ways)
    try:
        came, seconds = send(relay.port, data)
        assert came == data
        assert seconds >= 0.99 * len(data) / (10 * MB)
        assert relay.passed_bytes == len(data)
    finally:
        relay.close()
