"""A stand-in for an OpenAI server whose every byte is given by the test, in the same event loop as the client."""

from contextlib import asynccontextmanager

from aiohttp import web


class Script:
    """Answers each request with `chunks`, written one by one, then ends or (`breaks`) drops the connection."""

    def __init__(self, chunks=(), *, status=200, headers=None, breaks=False):
        self.chunks, self.status, self.headers, self.breaks = list(chunks), status, headers or {}, breaks
        self.bodies, self.request_ids = [], []

    async def complete(self, request):
        self.bodies.append(await request.json())
        self.request_ids.append(request.headers.get("X-Request-Id"))
        response = web.StreamResponse(status=self.status, headers=self.headers)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for chunk in self.chunks:
            await response.write(chunk)
        if self.breaks:
            request.transport.abort()
            return response
        await response.write_eof()
        return response


@asynccontextmanager
async def serving(script):
    """The URL of a server that follows `script`."""
    app = web.Application()
    app.router.add_post("/v1/completions", script.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()
