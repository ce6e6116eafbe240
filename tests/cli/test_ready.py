"""What `pdx up` makes of answers while processes start: whatever listens there, it is asked again or is ready."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from pdx.cli.processes import answers


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The URL of a server that gives one connection this answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client:
                client.recv(4096)
                client.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.join()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"HTTP/1.1 503 No\r\n\r\n"]
)
def test_what_is_no_whole_answer_is_not_ready(answer: bytes) -> None:
    with answering(answer) as url:
        assert not answers(url)


@pytest.mark.parametrize("body", [b"", b"<p>", b"{}", b'{"nodes": "many"}', b'{"nodes": 1}'])
def test_what_does_not_know_the_nodes_is_not_ready(body: bytes) -> None:
    """The port may be that of another server: one of vLLM's says nothing in its answer."""
    with answering(ok(body)) as url:
        assert not answers(url, 2)


def test_a_proxy_that_knows_the_nodes_is_ready() -> None:
    with answering(ok(b'{"nodes": 2}')) as url:
        assert answers(url, 2)
