"""A slow line to a server on this host: `python -m pdx.bench.systems.line --port PORT --to PORT --gbit 15`.

The rate limit works in user space: it needs no privileges, but takes processor time to copy each byte.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable

PIECE_BYTES = 1 << 20
UNLIMITED = 1e12  # bytes per second


class Relay:
    """Relays TCP connections to a server on this host at a limited rate, on threads of its own.

    `rate`: bytes per second from the server, over all connections; with `both_ways`, also to the server, each direction
    by itself. The caller may change it at any time. `passed_bytes`: bytes that have come from the server.
    """

    def __init__(self, to: int, *, rate: float = UNLIMITED, port: int = 0, both_ways: bool = False) -> None:
        self.rate = rate
        self.passed_bytes = 0
        self._to = to
        self._both_ways = both_ways
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._free_at = {False: 0.0, True: 0.0}  # when the line is free again: to the server, and from it
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._to))
                except OSError:  # the next connection may reach it
                    client.close()
                    continue
                self._sockets = [each for each in (*self._sockets, client, server) if each.fileno() >= 0]
                self._threads = [each for each in self._threads if each.is_alive()]
                self._start(self._carry, client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            there = threading.Thread(target=self._forward, args=(client, server, False), daemon=True)
            there.start()
            self._forward(server, client, True)
            there.join()

    def _forward(self, source: socket.socket, to: socket.socket, is_back: bool) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                if is_back or self._both_ways:
                    with self._lock:
                        self.passed_bytes += count * is_back
                        self._free_at[is_back] = max(self._free_at[is_back], time.monotonic()) + count / self.rate
                        wait_s = self._free_at[is_back] - time.monotonic()
                    if wait_s > 0.0005:
                        time.sleep(wait_s)
                to.sendall(buffer[:count])
        for each in (source, to):
            _shut(each)

    def close(self) -> None:
        """End all connections and threads. Waits while bytes are still on the line."""
        _shut(self._listener)
        self._threads[0].join()  # from here on there is no new connection
        for each in self._sockets:
            _shut(each)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def bytes_per_s(gbit: float) -> float:
    """Convert a rate from 10⁹ bits per second."""
    return gbit * 1e9 / 8


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.systems.line", description="A slow line.")
    parser.add_argument("--port", type=int, required=True, help="on 127.0.0.1")
    parser.add_argument("--to", type=int, required=True, help="the server's port on 127.0.0.1")
    parser.add_argument("--gbit", type=float, required=True, help="10⁹ bits a second, each way")
    chosen = parser.parse_args(arguments)
    numbers = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # before the threads start, because they inherit the mask
    relay = Relay(chosen.to, rate=bytes_per_s(chosen.gbit), port=chosen.port, both_ways=True)
    signal.sigwait(numbers)
    relay.close()


if __name__ == "__main__":
    main()
