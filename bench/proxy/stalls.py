"""How large bodies of other clients delay a stream: `python -m pdx.bench.proxy.stalls`.

A stream goes from a stand-in engine through the proxy to a client in its own process, while others post bodies of up to
30 MB or leave them unfinished. A stall is the longest delay of one of its events; a second, direct stream shows how the
machine delays both. The median of three such measurements counts. `pdx bench proxy` measures the proxy's CPU time and
latency.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from pdx.bench.harness.nodes import Child
from pdx.bench.harness.report import Figure, at_most, publish
from pdx.bench.harness.timing import CpuClock
from pdx.bench.proxy.stage import Stage, stage
from pdx.bench.proxy.stand_in_engine import MODEL, Pace

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PINGS = Pace(0.0, 5.0)
STALL_MS, MEMORY_MB = 50.0, 256.0
UNFINISHED = 20
REPEATS = 3  # of each measurement: the median counts
BIG = 30_000_000  # size of a body above the limit
ALLOWED = (8 << 20) - 4096  # just below the limit
MILLION = 1_000_000
LONG = 128_000  # tokens of an ordinary long prompt
JSON = {"Content-Type": "application/json"}
SENT_AT = re.compile(rb'"sent_at":([0-9.]+)')
ENDLESS = 1_000_000  # tokens

Attack = Callable[[], Awaitable[str]]


class Bench:
    """A stage, and the attacks on its proxy."""

    def __init__(self, made: Stage, http: aiohttp.ClientSession) -> None:
        self._stage = made
        self._http = http
        self._clock = CpuClock(made.proxy.pid)

    def cases(self) -> dict[str, Attack]:
        ids = [random.Random(1).randrange(100_000, 128_000) for _ in range(LONG)]
        text = "".join(random.Random(0).choices("abcdefgh ", k=2 * LONG))
        big, million, allowed = (_ids(count) for count in (BIG // 7, MILLION - 1, ALLOWED // 7))
        return {
            "nothing": lambda: asyncio.sleep(1.0, ""),
            "one body of 30 MB of token ids": partial(self._post, COMPLETIONS, big, 1),
            "bodies of 1,000,000 token ids": partial(self._post, COMPLETIONS, million, 4),
            "bodies of 8 MiB of token ids": partial(self._post, COMPLETIONS, allowed, 4),
            "128k tokens as text, forward": partial(self._post, COMPLETIONS, _asked(prompt=text, stream=True), 8),
            "128k tokens as ids, forward": partial(self._post, COMPLETIONS, _asked(prompt=ids, stream=True), 8),
            "128k tokens as text, chat": partial(
                self._post, CHAT, _asked(messages=[{"role": "user", "content": text}]), 8
            ),
            "20 unfinished bodies of 30 MB": partial(self._unfinished, big),
            "20 unfinished bodies of 8 MiB": partial(self._unfinished, allowed),
        }

    async def figures(self) -> list[Figure]:
        found = []
        for name, attack in self.cases().items():
            runs = [await self._run(attack) for _ in range(REPEATS)]
            direct, through, peak_mb, cpu_ms = (
                statistics.median(each) for each in zip(*(run for run, _ in runs), strict=True)
            )
            note = f"{runs[-1][1]}; " if runs[-1][1] else ""
            note += f"a direct one: {direct:.1f}"
            found += [
                at_most(f"{name}: longest stall of a stream", through, "ms", STALL_MS, note),
                at_most(f"{name}: memory of the proxy, peak", peak_mb, "MB", MEMORY_MB, f"CPU {cpu_ms:.0f} ms in all"),
            ]
        return found

    async def _run(self, attack: Attack) -> tuple[tuple[float, float, float, float], str]:
        """The longest delays of a direct stream and of the proxy's, its memory and CPU time, and what happened."""
        pingers = [Child("pdx.bench.proxy.stalls", url) for url in (self._stage.decode_url, self._stage.proxy.url)]
        try:
            for pinger in pingers:
                await asyncio.to_thread(pinger.receive)
            await asyncio.sleep(0.5)
            folder = Path(f"/proc/{self._stage.proxy.pid}")
            (folder / "clear_refs").write_text("5")  # reset the peak
            before = self._clock.seconds()
            note = await attack()
            cpu_ms = (self._clock.seconds() - before) * 1e3
            lines = (folder / "status").read_text().splitlines()
            peak_mb = next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))
            await asyncio.sleep(0.2)
            direct, through = (max(pinger.finish()) for pinger in pingers)
        finally:
            for pinger in pingers:
                pinger.close()
        return (direct, through, peak_mb, cpu_ms), note

    async def _post(self, path: str, payload: bytes, count: int) -> str:
        """Post this many bodies one after the other; returns the statuses."""
        seen: set[str] = set()
        for _ in range(count):
            try:
                async with self._http.post(self._stage.proxy.url + path, data=payload, headers=JSON) as response:
                    await response.read()
                    seen.add(str(response.status))
            except aiohttp.ClientError as error:
                seen.add(type(error).__name__)
        return f"answers {', '.join(sorted(seen))}"

    async def _unfinished(self, payload: bytes) -> str:
        """Connections that send a body except for its end."""
        host, _, port = self._stage.proxy.url.removeprefix("http://").partition(":")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(UNFINISHED)]

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


def _ids(count: int) -> bytes:
    return b'{"prompt":[' + b"123456," * count + b'1],"max_tokens":2}'


def _asked(**prompt: Any) -> bytes:
    return json.dumps({"model": MODEL, "temperature": 0, "max_tokens": 2, **prompt}).encode()


async def ping(url: str) -> list[float]:
    """Delays of one stream's events in ms, from its first event until standard input ends.

    The stand-in engine puts its time of sending into each event.
    """
    found: list[float] = []
    over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    messages = [{"role": "user", "content": "ping " * 20}]  # long enough for two legs
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": ENDLESS}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http, http.post(url + CHAT, json=body) as response:
        response.raise_for_status()
        while not over.done():
            part = await response.content.readany()
            if not part:
                raise RuntimeError("the stream ended")
            if not found:
                print('"first"', flush=True)
            now = time.monotonic()
            found += [(now - float(sent_at)) * 1e3 for sent_at in SENT_AT.findall(part)]
    return found


async def measure() -> list[Figure]:
    with stage(PINGS) as made:
        timeout = aiohttp.ClientTimeout(total=300.0)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            return await Bench(made, http).figures()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(asyncio.run(ping(sys.argv[1]))))
    else:
        publish("stalls", "the longest stall of a stream through the proxy, beside bodies", asyncio.run(measure()))
