"""Requests that fail where one engine of four does: `python -m pdx.bench.proxy.faults [--before CHECKOUT]`.

Four prefill and four decode engines, stand-ins in this process, and a `pdx proxy` in its own. 32 clients ask one
request after the other, every second one streamed (all where one hangs). Then one engine fails in one way, whoever asks
it for tokens; its GET /health goes on to answer 200. What failed is counted by when a request was
sent: within 2 s, or later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.bench.proxy.stand_in_engine import MODEL, Pace, StandInEngine
from pdx.cli.ports import free_ports
from pdx.cli.processes import Processes, State
from pdx.cli.ready import answers_health

KINDS = ("500", "reset", "hang", "malformed")
LEGS = ("prefill", "decode")
EACH = 4
AT_ONCE = 32
FIRST_S = 2.0
PACE = Pace(first_ms=10.0, pace_ms=5.0)
TOKENS = 4
LIMIT_S = 2.0  # of the proxy, to the first byte of an answer
CLIENT_S = 60.0
START_S = 60.0


class Engines:
    """Stand-ins, of which one may fail."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.bad = ""
        self.kind = ""
        self.asked = 0  # the bad one, since it is bad

    @contextlib.asynccontextmanager
    async def started(self, count: int) -> AsyncIterator[None]:
        """All of them, until the context ends."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                app = StandInEngine(PACE).app()
                app.middlewares.append(self._fail)
                runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
                stack.push_async_callback(runner.cleanup)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            yield

    @web.middleware
    async def _fail(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method != "POST" or str(request.url.origin()) != self.bad:
            return await handler(request)
        self.asked += 1
        if self.kind == "500":
            return web.json_response({"error": {"message": "the engine is dead"}}, status=500)
        if self.kind == "malformed":
            return web.Response(body=b"\x00nonsense", content_type="text/event-stream")
        if self.kind == "reset" and request.transport is not None:
            request.transport.abort()
        await asyncio.Event().wait()  # until who asked gives up
        raise AssertionError


@dataclass(slots=True)
class Count:
    """What clients saw."""

    sent: int = 0
    failed: int = 0

    @property
    def percent(self) -> float:
        """That failed."""
        return 100 * self.failed / max(1, self.sent)


@dataclass(slots=True)
class Case:
    """One engine that fails in one way."""

    leg: str
    kind: str
    before: Count
    first: Count
    after: Count
    asked: int = 0  # requests that reached the bad engine, probes included
    longest_s: float = 0.0


class Clients:
    """They ask until they are told to stop."""

    def __init__(self, http: aiohttp.ClientSession, url: str, case: Case) -> None:
        self._http = http
        self._url = url
        self._case = case
        self.bad_at = float("inf")
        self.ended = False

    async def ask(self, name: int) -> None:
        """One client."""
        number = 0
        while not self.ended:
            number += 1
            text = f"client {name}, request {number}: " + "x" * 200
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
            sent_at = time.monotonic()
            since = sent_at - self.bad_at
            case = self._case
            count = case.before if since < 0 else case.first if since < FIRST_S else case.after
            count.sent += 1
            is_answered = await self._is_answered(body | {"stream": number % 2 == 0 or case.kind == "hang"})
            count.failed += not is_answered
            case.longest_s = max(case.longest_s, time.monotonic() - sent_at)

    async def _is_answered(self, body: dict[str, Any]) -> bool:
        try:
            async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return False
        end = b"data: [DONE]\n\n"
        return response.status == 200 and (raw.endswith(end) if body["stream"] else b'"choices"' in raw)


@contextlib.contextmanager
def _proxy(engines: list[str], checkout: Path | None) -> Any:
    """Its URL. :raises RuntimeError: it did not start."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder, Processes(Path(folder)) as processes:
        limit = "--first-byte-timeout" if checkout is None else "--read-timeout"
        options = ["--port", str(port), "--control", f"ipc://{folder}/p.sock", limit, str(LIMIT_S)]
        for leg, at in (("prefill", engines[:EACH]), ("decode", engines[EACH:])):
            options += [word for each in at for word in (f"--{leg}", each)]
        command = [sys.executable, "-P", "-m", "pdx.cli.main", "proxy", *options, "--log-level", "error"]
        env = {"PYTHONPATH": str(checkout)} if checkout is not None else None
        yield url, processes.start("proxy", command, is_ready=answers_health(url), env=env)


async def _run(http: aiohttp.ClientSession, leg: str, kind: str, seconds: float, checkout: Path | None) -> Case:
    case = Case(leg, kind, Count(), Count(), Count())
    engines = Engines()
    async with engines.started(2 * EACH):
        with _proxy(engines.urls, checkout) as (url, process):
            deadline = time.monotonic() + START_S
            while (await asyncio.to_thread(process.look)) is not State.READY:
                if process.state is State.DIED or time.monotonic() > deadline:
                    raise RuntimeError(f"the proxy is {process.state}:\n" + "\n".join(process.tail(10)))
                await asyncio.sleep(0.05)
            clients = Clients(http, url, case)
            tasks = [asyncio.create_task(clients.ask(number)) for number in range(AT_ONCE)]
            await asyncio.sleep(FIRST_S)
            engines.kind = kind
            engines.bad = engines.urls[0 if leg == "prefill" else EACH]
            clients.bad_at = time.monotonic()
            await asyncio.sleep(FIRST_S + seconds)
            clients.ended = True
            await asyncio.gather(*tasks)
            case.asked = engines.asked
    return case


async def _measure(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=CLIENT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        for kind in KINDS:
            for leg in LEGS:
                for name, checkout in (("before", options.before), ("now", None)):
                    if name == "before" and checkout is None:
                        continue
                    case = await _run(http, leg, kind, options.seconds, checkout)
                    details[f"{kind}, {leg}, {name}"] = asdict(case)
                    of = f"{leg} engine, {kind}, {name}"
                    note = f"of {case.first.sent} and {case.after.sent}; {case.asked} reached it"
                    if name == "before":
                        figures.append(plain(f"{of}: failed within 2 s", case.first.percent, "%", note))
                        figures.append(plain(f"{of}: failed afterwards", case.after.percent, "%"))
                    else:
                        figures.append(at_most(f"{of}: failed within 2 s", case.first.percent, "%", 1.0, note))
                        figures.append(at_most(f"{of}: failed afterwards", case.after.percent, "%", 0.0))
                    figures.append(plain(f"{of}: longest request", case.longest_s, "s"))
    return figures, details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, whose proxy has --read-timeout")
    parser.add_argument("--seconds", type=float, default=6.0, help="after the first two")
    options = parser.parse_args()
    figures, details = asyncio.run(_measure(options))
    publish("proxy_faults", "one engine of 4 + 4 fails, 32 requests at once", figures, details)


if __name__ == "__main__":
    main()
