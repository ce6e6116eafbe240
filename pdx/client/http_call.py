"""One HTTP request and its answer, over TCP or a Unix socket, without redirects or the system's proxy."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

MAX_ANSWER_BYTES = 256 << 20


def call(
    url: str, path: str, body: Any = None, *, timeout_s: float, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """GET, or POST `body` as JSON; return the answer's status and body. `url`: http(s)://… or a Unix socket's /path.

    :raises OSError, http.client.HTTPException: nothing answers there, or not in HTTP.
    :raises ValueError: the URL is invalid, or the answer is longer than MAX_ANSWER_BYTES.
    """
    connection, prefix = _connection(url, timeout_s)
    sent = {"Accept": "application/json", **(headers or {})}
    data = None
    if body is not None:
        data = msgspec.json.encode(body)
        sent["Content-Type"] = "application/json"
    try:
        connection.request("GET" if data is None else "POST", prefix + path, data, sent)
        answer = connection.getresponse()
        got = answer.read(MAX_ANSWER_BYTES + 1)
    finally:
        connection.close()
    if len(got) > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    if answer.length:  # `read(n)` does not raise if some are missing
        raise http.client.IncompleteRead(got, answer.length)
    return answer.status, got


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    if url.startswith("/"):
        connection = http.client.HTTPConnection("localhost", timeout=timeout_s)
        connection.sock = socket.socket(socket.AF_UNIX)  # else it would open a TCP socket
        connection.sock.settimeout(timeout_s)
        try:
            connection.sock.connect(url)
        except OSError:
            connection.close()
            raise
        return connection, ""
    parts = urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of HTTP")
    return kinds[parts.scheme](parts.hostname, parts.port, timeout=timeout_s), parts.path.rstrip("/")
