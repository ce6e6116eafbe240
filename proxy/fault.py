"""Errors as an OpenAI client expects them."""

from __future__ import annotations

import json
from http import HTTPStatus

from aiohttp import web


def body(status: int, message: str) -> bytes:
    """The error as JSON, in the shape vLLM uses."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error" if status < 500 else "InternalServerError"
    fault = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return json.dumps(fault, separators=(",", ":")).encode()


def response(status: int, message: str, *, retry_after_s: int | None = None) -> web.Response:
    """The error as an HTTP response. `retry_after_s`: when to ask again."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return web.Response(status=status, body=body(status, message), content_type="application/json", headers=headers)


def raw(status: int, message: str, *, retry_after_s: int) -> bytes:
    """The error as the bytes of an HTTP response, after which the connection is closed."""
    content = body(status, message)
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        f"Retry-After: {retry_after_s}",
        "Connection: close",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + content
