"""The slow line to a store: what comes through is whole, and never faster than the line."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from pdx.bench.systems.line import Relay, bytes_per_s
from pdx.cli.ports import free_ports
from pdx.testing.waiting import wait_until

MB = 1_000_000


@pytest.fixture
def echo():
    """The port of a server that sends back what it gets."""
    with echoing() as port:
        yield port


@contextlib.contextmanager
def echoing(port=0):
    with socket.create_server(("127.0.0.1", port)) as listener:

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


@pytest.mark.long
def test_a_line_is_a_program_that_ends_when_told(echo):
    (port,) = free_ports(1)
    command = [sys.executable, "-P", "-m", "pdx.bench.systems.line", "--port", str(port), "--to", str(echo)]
    with subprocess.Popen([*command, "--gbit", "0.08"]) as line:
        try:
            wait_until(lambda: _listens(port), timeout_s=60)
            came, seconds = send(port, b"x" * MB)
            assert len(came) == MB
            assert seconds >= 0.99 * MB / bytes_per_s(0.08)
            line.send_signal(signal.SIGTERM)
            assert line.wait(60) == 0
        finally:
            line.kill()


def _listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
