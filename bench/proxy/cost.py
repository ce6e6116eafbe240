"""CPU time of the proxy and the longest stall of a stream: `python -m pdx.bench.proxy.cost [--before CHECKOUT]`.

Stand-in engines, each in its own process, answer at once or every 20 ms. The same is asked directly, through the proxy
of another checkout (`--before`) and through this one's, in turns. A stream's stall is the longest time that one of its
events took from the engine to a client in a process of its own; beside it a stream that comes directly tells what the
machine does to both. Of three such measurements the middle one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdx.bench.harness.child import end_child
from pdx.bench.harness.cpu_clock import CpuClock
from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.bench.harness.timing import spread_ms
from pdx.bench.proxy.pinger import delays_ms
from pdx.bench.proxy.stage import Stage, stage
from pdx.bench.proxy.stand_in_engine import MODEL, Pace

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DIRECT, BEFORE, NOW = "direct", "before", "now"
AT_ONCE, PINGS, TOKENS = Pace(0.0, 0.0), Pace(0.0, 5.0), Pace(0.0, 20.0)
STREAMS = 32
AT_ONCE_TOO = 16  # requests, where CPU time is measured
ASIDE = {"suffix": ""}  # one engine serves such a completion alone
STALL_MS = 50.0
MEMORY_MB = 256.0
UNFINISHED = 20
REPEATS = 3  # of each measurement of stalls: the middle one counts
BIG = 30_000_000  # bytes of the body that nobody should send
ALLOWED = (8 << 20) - 4096  # just below the limit
MILLION = 1_000_000
LONG = 128_000  # tokens of an ordinary long prompt


@dataclass(frozen=True, slots=True)
class Target:
    """Who is asked."""

    name: str
    url: str
    pid: int | None  # of the proxy

    def cpu_s(self) -> float:
        """What its proxy computed so far."""
        return CpuClock(self.pid).seconds() if self.pid is not None else 0.0


class Bench:
    """A stage, and who is asked on it: in the order of turns."""

    def __init__(self, made: Stage, http: aiohttp.ClientSession, *, rounds: int) -> None:
        self._made = made
        self._http = http
        self._rounds = rounds
        self._text = "".join(random.Random(0).choices("abcdefgh ", k=4000))
        self.targets = [Target(DIRECT, made.decode_url, None)]
        if made.before is not None:
            self.targets.append(Target(BEFORE, made.before.url, made.before.pid))
        self.targets.append(Target(NOW, made.proxy_url, made.proxy_pid))
        self.details: dict[str, Any] = {}

    async def pace(self, pace: Pace) -> None:
        """Of both engines, from here on."""
        for url in (self._made.prefill_url, self._made.decode_url):
            async with self._http.post(f"{url}/pace", json=asdict(pace)) as response:
                response.raise_for_status()

    def _turns(self) -> list[Target]:
        return [*self.targets, *reversed(self.targets)] * self._rounds

    async def requests(self) -> list[Figure]:
        """One after the other: what is added to the time of each. Many at once: its CPU time."""
        figures = []
        await self.pace(AT_ONCE)
        for name, path, stream in (
            ("forward, whole", COMPLETIONS, False),
            ("forward, stream of 2", COMPLETIONS, True),
            ("chat, whole", CHAT, False),
            ("chat, stream of 2", CHAT, True),
        ):
            body = _asked(path, self._text) | {"max_tokens": 2, "stream": stream}
            times: dict[str, list[float]] = {target.name: [] for target in self.targets}
            cpu_s = dict.fromkeys(times, 0.0)
            for target in self.targets:
                await self._ask(target, path, body, 30, [])
            for target in self._turns():
                await self._ask(target, path, body, 100, times[target.name])
                before = target.cpu_s()
                await asyncio.gather(*(self._ask(target, path, body, 20, []) for _ in range(AT_ONCE_TOO)))
                cpu_s[target.name] += target.cpu_s() - before
            saturated = 20 * AT_ONCE_TOO * 2 * self._rounds
            spreads = {way: spread_ms(found) for way, found in times.items()}
            self.details[name] = {way: asdict(found) for way, found in spreads.items()}
            for target in self.targets[1:]:
                way, direct = target.name, spreads[DIRECT]
                of = f"{name}, {way}"
                figures += [
                    plain(f"{of}: CPU of the proxy per request", cpu_s[way] * 1e3 / saturated, "ms"),
                    plain(f"{of}: added, p50", spreads[way].p50_ms - direct.p50_ms, "ms", f"direct {direct.p50_ms}"),
                    plain(f"{of}: added, p99", spreads[way].p99_ms - direct.p99_ms, "ms", f"direct {direct.p99_ms}"),
                ]
        return figures

    async def _ask(self, target: Target, path: str, body: dict[str, Any], count: int, times: list[float]) -> None:
        payload = json.dumps(body).encode()
        for _ in range(count):
            began = time.perf_counter()
            async with self._http.post(
                target.url + path, data=payload, headers={"Content-Type": "application/json"}
            ) as response:
                response.raise_for_status()
                await response.read()
            times.append((time.perf_counter() - began) * 1e3)

    async def events(self, tokens: int) -> list[Figure]:
        """At a real pace: CPU time of each event, and how long it takes."""
        figures = []
        await self.pace(TOKENS)
        for name, path, extra in (
            ("forward", COMPLETIONS, {}),
            ("chat", CHAT, {}),
            ("alone", COMPLETIONS, ASIDE),
        ):
            delays: dict[str, list[float]] = {target.name: [] for target in self.targets}
            costs: dict[str, list[float]] = {target.name: [] for target in self.targets}
            for target in self._turns():
                body = _asked(path, "short") | extra | {"max_tokens": tokens, "stream": True}
                costs[target.name].append(await self._streams(target, path, body, delays[target.name]))
            spreads = {way: spread_ms(found) for way, found in delays.items()}
            self.details[f"{STREAMS} streams, {name}"] = {way: asdict(found) for way, found in spreads.items()}
            for target in self.targets[1:]:
                way, direct = target.name, spreads[DIRECT]
                of = f"{STREAMS} streams, {name}, {way}"
                figures += [
                    plain(f"{of}: CPU of the proxy per event", statistics.mean(costs[way]) * 1e6, "µs"),
                    plain(f"{of}: added per event, p50", spreads[way].p50_ms - direct.p50_ms, "ms"),
                    plain(f"{of}: added per event, p99", spreads[way].p99_ms - direct.p99_ms, "ms"),
                ]
        return figures

    async def _streams(self, target: Target, path: str, body: dict[str, Any], delays: list[float]) -> float:
        """CPU seconds of the proxy per event, while all streams are under way."""
        counts = [0] * STREAMS
        all_run, one_ends = asyncio.Event(), asyncio.Event()

        async def stream(number: int) -> None:
            await asyncio.sleep(number * TOKENS.pace_ms / STREAMS / 1e3)
            async with self._http.post(target.url + path, json=body) as response:
                response.raise_for_status()
                while part := await response.content.readany():
                    found = delays_ms(part, time.monotonic())
                    counts[number] += len(found)
                    if all_run.is_set() and not one_ends.is_set():
                        delays.extend(found)
                    if min(counts) > 10:
                        all_run.set()
                    if counts[number] > body["max_tokens"] - 10:
                        one_ends.set()

        async with asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(stream(number))
            await all_run.wait()
            cpu_s, seen = target.cpu_s(), sum(counts)
            await one_ends.wait()
            spent_s, count = target.cpu_s() - cpu_s, sum(counts) - seen
        return spent_s / count

    async def stalls(self) -> list[Figure]:
        """What a stream suffers from large bodies of others."""
        ids = [random.Random(1).randrange(100_000, 128_000) for _ in range(LONG)]
        text = (self._text * (2 * LONG // len(self._text) + 1))[: 2 * LONG]
        big = b'{"prompt":[' + b"123456," * (BIG // 7) + b'1],"max_tokens":2}'
        million = b'{"prompt":[' + b"123456," * (MILLION - 1) + b'1],"max_tokens":2}'
        allowed = b'{"prompt":[' + b"123456," * (ALLOWED // 7) + b'1],"max_tokens":2}'
        cases: list[tuple[str, Callable[[Target], Awaitable[str]]]] = [
            ("nothing", lambda target: asyncio.sleep(1.0, "")),
            ("one body of 30 MB of token ids", lambda target: self._post(target, COMPLETIONS, big, 1)),
            ("bodies of 1,000,000 token ids", lambda target: self._post(target, COMPLETIONS, million, 4)),
            ("bodies of 8 MiB of token ids", lambda target: self._post(target, COMPLETIONS, allowed, 4)),
            (
                "128k tokens as text, forward",
                lambda target: self._post(target, COMPLETIONS, _json(_asked(COMPLETIONS, text)), 8),
            ),
            (
                "128k tokens as ids, forward",
                lambda target: self._post(target, COMPLETIONS, _json(_asked(COMPLETIONS, ids)), 8),
            ),
            ("128k tokens as text, chat", lambda target: self._post(target, CHAT, _json(_asked(CHAT, text)), 8)),
            ("20 unfinished bodies of 30 MB", lambda target: self._unfinished(target, big)),
            ("20 unfinished bodies of 8 MiB", lambda target: self._unfinished(target, allowed)),
        ]
        figures = []
        await self.pace(PINGS)
        for name, attack in cases:
            for target in self.targets[1:]:
                figures += await self._beside(target, name, attack)
        return figures

    async def _beside(self, target: Target, name: str, attack: Callable[[Target], Awaitable[str]]) -> list[Figure]:
        runs = [await self._run(target, attack) for _ in range(REPEATS)]
        direct, through, peak_mb, cpu_ms = (
            statistics.median(each) for each in zip(*(run for run, _ in runs), strict=True)
        )
        of, note = f"{name}, {target.name}", runs[-1][1]
        note = f"{note}; " if note else ""
        if target.name != NOW:
            return [
                plain(f"{of}: longest stall of a stream", through, "ms", f"{note}a direct one: {direct:.1f}"),
                plain(f"{of}: memory of the proxy, peak", peak_mb, "MB", f"CPU {cpu_ms:.0f} ms in all"),
            ]
        return [
            at_most(f"{of}: longest stall of a stream", through, "ms", STALL_MS, f"{note}a direct one: {direct:.1f}"),
            at_most(f"{of}: memory of the proxy, peak", peak_mb, "MB", MEMORY_MB, f"CPU {cpu_ms:.0f} ms in all"),
        ]

    async def _run(
        self, target: Target, attack: Callable[[Target], Awaitable[str]]
    ) -> tuple[tuple[float, float, float, float], str]:
        """The longest delays of a direct stream and of the proxy's, its memory and CPU time, and what happened."""
        pingers = [_pinger(url) for url in (self._made.decode_url, target.url)]
        try:
            for pinger in pingers:
                assert pinger.stdout is not None
                await asyncio.to_thread(pinger.stdout.readline)
            await asyncio.sleep(0.5)
            _forget_peak(target)
            before = target.cpu_s()
            note = await attack(target)
            cpu_ms = (target.cpu_s() - before) * 1e3
            peak_mb = _peak_mb(target)
            await asyncio.sleep(0.2)
            found = [_delays(pinger) for pinger in pingers]
        finally:
            for pinger in pingers:
                end_child(pinger)
        direct, through = (max(each) for each in found)
        return (direct, through, peak_mb, cpu_ms), note

    async def _post(self, target: Target, path: str, payload: bytes, count: int) -> str:
        """So many, one after the other; the answers' statuses."""
        seen: list[str] = []
        for _ in range(count):
            try:
                async with self._http.post(
                    target.url + path, data=payload, headers={"Content-Type": "application/json"}
                ) as response:
                    await response.read()
                    seen.append(str(response.status))
            except aiohttp.ClientError as error:
                seen.append(type(error).__name__)
        return f"answers {', '.join(sorted(set(seen)))}"

    async def _unfinished(self, target: Target, payload: bytes) -> str:
        """Connections that send all of a body but the end of it."""
        host, _, port = target.url.removeprefix("http://").partition(":")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writers = []
        for _ in range(UNFINISHED):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)

        async def send(writer: asyncio.StreamWriter) -> bool:
            try:
                writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload))
                for at in range(0, len(payload) - 100, 1 << 16):
                    writer.write(payload[at : min(at + (1 << 16), len(payload) - 100)])
                    await writer.drain()
            except ConnectionError:
                return False
            return True

        sent = await asyncio.gather(*map(send, writers))
        await asyncio.sleep(1.0)
        for writer in writers:
            writer.close()
        return f"{sum(sent)} of {UNFINISHED} were read"


def _asked(path: str, prompt: str | list[int]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 2}
    return body | ({"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt})


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _pinger(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pdx.bench.proxy.pinger", url]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _delays(pinger: subprocess.Popen[str]) -> list[float]:
    assert pinger.stdin is not None
    assert pinger.stdout is not None
    pinger.stdin.close()
    found: list[float] = json.loads(pinger.stdout.readline())
    return found


def _forget_peak(target: Target) -> None:
    Path(f"/proc/{target.pid}/clear_refs").write_text("5")


def _peak_mb(target: Target) -> float:
    text = Path(f"/proc/{target.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines() if line.startswith("VmHWM"))


async def _measure(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    with stage(AT_ONCE, options.before) as made:
        timeout = aiohttp.ClientTimeout(total=300.0)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            bench = Bench(made, http, rounds=options.rounds)
            figures: list[Figure] = []
            if options.only in (None, "requests"):
                figures += await bench.requests()
            if options.only in (None, "events"):
                figures += await bench.events(options.tokens)
            if options.only in (None, "stalls"):
                figures += await bench.stalls()
            return figures, bench.details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=250, help="of each stream")
    parser.add_argument("--only", choices=("requests", "events", "stalls"))
    options = parser.parse_args()
    figures, details = asyncio.run(_measure(options))
    publish("proxy_cost", "the proxy's CPU time, and the longest stall of a stream", figures, details)


if __name__ == "__main__":
    main()
