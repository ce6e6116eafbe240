"""Emptying an engine's prefix cache: asked once, asked again while blocks are in use, and what a refusal says."""

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from http_server import answering

from pdx.bench.systems.engine_metrics import CacheNotReset, reset


@contextmanager
def engine(*answers):
    """A server that gives these (status, body), the last one for ever; yields its URL and the paths asked for."""
    left, asked = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    with answering(server):
        yield f"http://127.0.0.1:{server.server_address[1]}", asked


DONE, BUSY = (200, b'{"success":true}'), (200, b'{"success":false}')


def test_the_cache_is_emptied_and_the_connectors_is_not():
    with engine(DONE) as (url, asked):
        reset(url)
    assert asked == ["/reset_prefix_cache"]  # reset_external is off by default


def test_it_is_asked_again_while_blocks_are_in_use():
    pauses = []
    with engine(BUSY, BUSY, DONE) as (url, asked):
        reset(url, sleep=pauses.append)
    assert (len(asked), len(pauses)) == (3, 2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, b"Not Found"), "VLLM_SERVER_DEV_MODE=1"),
        ((500, b"the engine is dead"), "HTTP 500: the engine is dead"),
        ((200, b"[]"), "as vLLM does"),
        ((200, b"hello"), "as vLLM does"),
    ],
)
def test_a_refusal_says_what_to_do(answer, words):
    with engine(answer) as (url, asked), pytest.raises(CacheNotReset, match=words) as told:
        reset(url)
    assert url in str(told.value)
    assert len(asked) == 1
