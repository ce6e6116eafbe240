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
    """The error as an HTTP response."""
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else None
    return web.Response(status=status, body=body(status, message), content_type="application/json", headers=headers)
