"""The example proxy for prefill and decode engines in vLLM's documentation (`toy_proxy_server.py`), reimplemented from
its protocol with FastAPI, httpx and uvicorn: `python -m pdx.bench.proxy.example_proxy`.

It requests one token from the prefill engine, whose answer has the parameters for the decode engine; then it passes on
the decode engine's bytes. Like the original, it parses a request's JSON, serializes it anew for each leg, and keeps
connections open.
"""

from __future__ import annotations

import argparse
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

NIXL_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def prefill_leg(body: dict[str, Any]) -> dict[str, Any]:
    """The body of the prefill leg."""
    leg = {**body, "kv_transfer_params": NIXL_PREFILL, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    leg.pop("stream_options", None)
    return leg


def app_of(prefill: str, decode: str) -> FastAPI:
    """The application in front of these two engines."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(timeout=None, base_url=prefill, limits=limits) as first,
            httpx.AsyncClient(timeout=None, base_url=decode, limits=limits) as second,
        ):
            clients[:] = [first, second]
            yield

    async def serve(request: Request) -> StreamingResponse:
        path, body = request.url.path, await request.json()
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}", "X-Request-Id": str(uuid.uuid4())}
        answer = await clients[0].post(path, json=prefill_leg(body), headers=headers)
        answer.raise_for_status()
        if params := answer.json().get("kv_transfer_params"):
            body["kv_transfer_params"] = params

        async def pieces() -> AsyncIterator[bytes]:
            async with clients[1].stream("POST", path, json=body, headers=headers) as found:
                found.raise_for_status()
                async for piece in found.aiter_bytes():
                    yield piece

        return StreamingResponse(pieces(), media_type="application/json")

    async def healthy() -> dict[str, str]:
        return {"status": "ok"}

    clients: list[httpx.AsyncClient] = []
    app = FastAPI(lifespan=lifespan)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.add_api_route(path, serve, methods=["POST"], response_model=None)
    app.add_api_route("/health", healthy)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--prefill", "--decode"):
        parser.add_argument(name, required=True, metavar="URL")
    parser.add_argument("--port", required=True, type=int)
    options = parser.parse_args()
    uvicorn.run(app_of(options.prefill, options.decode), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
