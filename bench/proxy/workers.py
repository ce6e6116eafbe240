"""How many requests several workers of a proxy serve, compared with one: `python -m pdx.bench.proxy.workers [SHARE]`.

Engines are stand-ins that answer at once; chats go through a proxy of one process and through one of WORKERS, in turns,
with enough concurrency to keep all of them busy. Each proxy process is limited to SHARE of a core by being stopped when
it has used that up, so that a client and two engines also fit on a machine with few cores. The ratio shows the cost of
what workers share, a port and engines, but not that of shared caches and memory bandwidth.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

from pdx.bench.harness.ask import ask, completion, session
from pdx.bench.harness.report import Figure, at_least, plain, publish
from pdx.bench.harness.timing import CpuClock
from pdx.bench.proxy.stage import Front, Stage, stage
from pdx.bench.proxy.stand_in_engine import MODEL, Pace

WORKERS = 4
SHARE = 0.1
LOOK_S, SPARE_S = 0.002, 0.02  # between two checks of its usage, and the most unused time it may save up
ROUNDS, ROUND_S = 7, 6.0
CLIENTS = 64
GOAL = 3.0
_PROMPT = "a" * 2000


def processes(front: Front) -> list[int]:
    """The processes of a proxy that serve."""
    children = Path(f"/proc/{front.pid}/task/{front.pid}/children").read_text().split()
    return [int(each) for each in children] or [front.pid]


@contextlib.contextmanager
def cpu_limited(pids: Sequence[int], share: float) -> Iterator[None]:
    """Limit the CPU share of these processes by stopping them when it is used up. A whole core: no limit."""
    ended = threading.Event()

    def hold(pid: int) -> None:
        clock, spare = CpuClock(pid), 0.0
        looked_at, used = time.monotonic(), clock.seconds()
        while not ended.wait(LOOK_S):
            now, using = time.monotonic(), clock.seconds()
            spare = min(spare + share * (now - looked_at) - (using - used), SPARE_S)
            looked_at, used = now, using
            os.kill(pid, signal.SIGCONT if spare > 0 else signal.SIGSTOP)

    threads = [threading.Thread(target=hold, args=(pid,), daemon=True) for pid in (pids if share < 1 else ())]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        ended.set()
        for each in threads:
            each.join()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def chats(http: aiohttp.ClientSession, url: str, numbers: Iterator[int]) -> None:
    """Send chats one after the other, without end; each takes a number."""
    body = completion(MODEL, "", 4)
    del body["prompt"]
    for number in numbers:
        body["messages"] = [{"role": "user", "content": f"{number}{_PROMPT}"}]
        await ask(http, url, body, f"workers-{number}", path="/v1/chat/completions")


class _Rounds:
    def __init__(self, made: Stage, share: float) -> None:
        assert made.other is not None
        self._ways = {1: made.proxy, WORKERS: made.other}
        self._share = share
        self._numbers = itertools.count()
        self.rates: dict[int, list[float]] = {1: [], WORKERS: []}
        self.cpu_ms: dict[int, list[float]] = {1: [], WORKERS: []}
        self.cores: dict[int, list[float]] = {1: [], WORKERS: []}

    async def run(self) -> None:
        for number in range(ROUNDS):
            for count in sorted(self._ways, reverse=bool(number % 2)):
                await self._round(count, self._ways[count], counts=number > 0)

    async def _round(self, count: int, front: Front, *, counts: bool) -> None:
        pids = processes(front)
        assert len(pids) == count
        clocks = [CpuClock(pid) for pid in pids]
        with cpu_limited(pids, self._share):
            async with session() as http:
                tasks = [asyncio.create_task(chats(http, front.url, self._numbers)) for _ in range(CLIENTS)]
                await asyncio.sleep(ROUND_S / 4)
                done, since, spent = next(self._numbers), time.monotonic(), sum(each.seconds() for each in clocks)
                await asyncio.sleep(ROUND_S)
                served, took_s = next(self._numbers) - done - 1, time.monotonic() - since
                spent = sum(each.seconds() for each in clocks) - spent
                for each in tasks:
                    if each.done():
                        each.result()
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if counts:
            self.rates[count].append(served / took_s)
            self.cpu_ms[count].append(spent * 1e3 / served)
            self.cores[count].append(spent / took_s)


async def measure(share: float) -> list[Figure]:
    with stage(Pace(0.0, 0.0), other=("--workers", str(WORKERS)), workers=WORKERS) as made:
        rounds = _Rounds(made, share)
        await rounds.run()
    ratios = [many / one for one, many in zip(rounds.rates[1], rounds.rates[WORKERS], strict=True)]
    found = []
    for count in (1, WORKERS):
        name = f"workers: {count}"
        cores = f"{statistics.median(rounds.cores[count]):.2f} cores in all"
        found += [
            plain(f"{name}: requests", statistics.median(rounds.rates[count]), "1/s", cores),
            plain(f"{name}: CPU of the proxy per request", statistics.median(rounds.cpu_ms[count]), "ms"),
        ]
    name = f"requests of {WORKERS} workers / of one, {share:g} of a core each"
    return [*found, at_least(name, statistics.median(ratios), "×", GOAL)]


if __name__ == "__main__":
    share_of_each = float(sys.argv[1]) if len(sys.argv) > 1 else SHARE
    title = "a proxy of several workers beside one of one process"
    publish("workers", title, asyncio.run(measure(share_of_each)))
