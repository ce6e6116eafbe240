"""The throughput of a proxy that is scraped and traces SAMPLE of its requests, compared with one without both: `python
-m pdx.bench.proxy.traces [SAMPLE]`. With 0, both are without.

As in `pdx.bench.proxy.workers`, chats go through both, each limited to SHARE of a core; here at the same time, so that
disturbances of the machine affect both. The collector accepts everything and inspects nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

import aiohttp

from pdx.bench.harness.ask import session
from pdx.bench.harness.report import Figure, at_least, plain, publish
from pdx.bench.harness.timing import CpuClock
from pdx.bench.proxy.stage import Front, stage
from pdx.bench.proxy.stand_in_engine import Pace
from pdx.bench.proxy.workers import chats, cpu_limited

SAMPLE = 0.01
SHARE = 0.3
WINDOWS, WINDOW_S = 60, 3.0
CLIENTS = 16
SCRAPE_S = 5.0
GOAL = 0.98
OFF, ON = "off", "on"


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """The address of a collector on threads of this process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


@contextlib.contextmanager
def scraping(url: str) -> Iterator[None]:
    """Scrape its metrics, more often than a Prometheus would. Empty: do not."""
    ended = threading.Event()

    def scrape() -> None:
        while url and not ended.wait(SCRAPE_S):
            with urlopen(f"{url}/metrics", timeout=60) as answer:
                answer.read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Way:
    """Clients of one of the proxies, and what they and it have done since the last look."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self._clock = CpuClock(front.pid)
        self._numbers = itertools.count()
        self._spent_s, self._served = 0.0, 0

    def clients(self, http: aiohttp.ClientSession) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(chats(http, self.front.url, self._numbers)) for _ in range(CLIENTS)]

    def since_last(self) -> tuple[int, float]:
        """Requests, and seconds of CPU time."""
        served, spent_s = next(self._numbers), self._clock.seconds()
        found = served - self._served - 1, spent_s - self._spent_s
        self._served, self._spent_s = served, spent_s
        return found


async def _windows(ways: Mapping[str, _Way]) -> list[dict[str, tuple[int, float]]]:
    found = []
    with cpu_limited([way.front.pid for way in ways.values()], SHARE):
        async with session() as http:
            tasks = [task for way in ways.values() for task in way.clients(http)]
            for _ in range(1 + WINDOWS):  # the first window warms up
                await asyncio.sleep(WINDOW_S)
                found.append({name: way.since_last() for name, way in ways.items()})
            for each in tasks:
                if each.done():
                    each.result()
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return found[1:]


async def measure(sample: float) -> list[Figure]:
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"  # of the proxies
    with collecting() as collector:
        endpoint = ["--otlp-traces-endpoint", collector] if sample else []
        with stage(Pace(0.0, 0.0), other=[*endpoint, "--otlp-traces-sample", str(sample)]) as made:
            assert made.other is not None
            with scraping(made.other.admin_url if sample else ""):
                windows = await _windows({OFF: _Way(made.proxy), ON: _Way(made.other)})
    of_each = []
    total = {OFF: (0, 0.0), ON: (0, 0.0)}
    for window in windows:
        (off, off_s), (on, on_s) = window[OFF], window[ON]
        total = {name: (total[name][0] + window[name][0], total[name][1] + window[name][1]) for name in total}
        if off and on:  # the machine was not suspended
            of_each.append(off_s / off / (on_s / on))
    found = [
        plain(f"metrics and traces {name}: CPU of the proxy per request", spent_s * 1e3 / served, "ms")
        for name, (served, spent_s) in total.items()
    ]
    # Both have the same share of a core: throughput is that share divided by the CPU time per request.
    name = f"throughput with metrics and {sample:.0%} of requests traced, over without"
    note = f"windows {min(of_each):.2f} to {max(of_each):.2f}"
    return [*found, at_least(name, statistics.median(of_each), "×", GOAL, note)]


if __name__ == "__main__":
    share_of_requests = float(sys.argv[1]) if len(sys.argv) > 1 else SAMPLE
    publish("traces", "a proxy with metrics and traces beside one without", asyncio.run(measure(share_of_requests)))
