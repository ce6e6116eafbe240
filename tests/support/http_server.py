"""A server of the standard library that answers while a test runs."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def answering(server: HTTPServer) -> Iterator[None]:
    """It answers on a thread of its own until this context is left, and is closed then."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class Canned(ThreadingHTTPServer):
    """Answers each POST with `status` and what `reply` makes of its JSON; `asked` has the paths."""

    daemon_threads = False

    def __init__(self, reply: Callable[[Any], bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.status = 200
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Canned

    def do_POST(self) -> None:
        said = self.server.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(said)))
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass
