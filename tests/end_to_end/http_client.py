"""A small HTTP client for the tests: JSON in, JSON or server-sent events out, connections that can be cut."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 120.0


def open_request(url: str, path: str, body: dict[str, Any], **headers: str) -> http.client.HTTPConnection:
    """Send the request and return the connection without waiting for the answer; close it to be gone."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
    return connection


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The answer with its status under "http_status" and PDX's headers under "pdx"."""
    connection = open_request(url, path, body, **headers)
    try:
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert isinstance(answer, dict)
        headers = {key.lower(): value for key, value in response.getheaders() if key.lower().startswith("x-pdx")}
        return {**answer, "http_status": response.status, "pdx": headers}
    finally:
        connection.close()


def stream(url: str, path: str, body: dict[str, Any], told: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer; leaving the loop early closes the connection. `told`: gets PDX's headers."""
    connection = open_request(url, path, {**body, "stream": True})
    try:
        response = connection.getresponse()
        if told is not None:
            told.update({key.lower(): value for key, value in response.getheaders()})
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line[6:])
    finally:
        connection.close()
