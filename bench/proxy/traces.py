"""What a proxy that is scraped and traces SAMPLE of its requests serves, beside one that does neither, in turns:
`python -m pdx.bench.proxy.traces [SAMPLE]`.

As in `pdx.bench.proxy.workers`, chats go through both, each with SHARE of a core. The collector takes all, and looks at
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

from pdx.bench.harness.report import Figure, at_least, plain, publish
from pdx.bench.proxy.stage import stage
from pdx.bench.proxy.stand_in_engine import Pace
from pdx.bench.proxy.workers import Rounds

SAMPLE = 0.01
SHARE = 0.3
ROUNDS = 16
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
    """A collector, on threads of this process; where it is."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


@contextlib.contextmanager
def scraping(url: str) -> Iterator[None]:
    """Somebody asks for its metrics, more often than a Prometheus does."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(SCRAPE_S):
            with urlopen(f"{url}/metrics", timeout=60) as answer:
                answer.read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def measure(sample: float) -> list[Figure]:
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"  # of the proxies
    with collecting() as collector:
        traced = ("--otlp-traces-endpoint", collector, "--otlp-traces-sample", str(sample))
        with stage(Pace(0.0, 0.0), other=traced) as made:
            assert made.other is not None
            with scraping(made.other.admin_url):
                rounds = Rounds(made, SHARE, (OFF, ON), ROUNDS)
                await rounds.run()
    found = []
    for name in (OFF, ON):
        rate, cpu_ms = statistics.median(rounds.rates[name]), statistics.median(rounds.cpu_ms[name])
        found += [
            plain(f"metrics and traces {name}: requests", rate, "1/s"),
            plain(f"metrics and traces {name}: CPU of the proxy per request", cpu_ms, "ms"),
        ]
    # By CPU time, which other work on the machine moves less than it moves the rate: the share is the same.
    spent = [off / on for off, on in zip(rounds.cpu_ms[OFF], rounds.cpu_ms[ON], strict=True)]
    rates = [on / off for off, on in zip(rounds.rates[OFF], rounds.rates[ON], strict=True)]
    name = f"throughput with metrics and {sample:.0%} of requests traced, over without"
    return [*found, at_least(name, statistics.median(spent), "×", GOAL, f"requests: {statistics.median(rates):.3f}")]


if __name__ == "__main__":
    share_of_requests = float(sys.argv[1]) if len(sys.argv) > 1 else SAMPLE
    publish("traces", "a proxy with metrics and traces beside one without", asyncio.run(measure(share_of_requests)))
