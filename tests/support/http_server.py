"""A server of the standard library that answers while a test runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import HTTPServer


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
