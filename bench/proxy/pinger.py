"""How long events of one stream take to this process: `python -m pdx.bench.proxy.pinger URL`.

The stand-in engine behind URL says in each event when it sent it. Ends when its standard input does, and prints the
delays in ms.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

import aiohttp

from pdx.bench.proxy.stand_in_engine import MODEL

SENT_AT = re.compile(rb'"sent_at":([0-9.]+)')
ENDLESS = 1_000_000  # tokens


def delays_ms(part: bytes, now: float) -> list[float]:
    """Of the events in `part`, which came at `now`."""
    return [(now - float(found)) * 1e3 for found in SENT_AT.findall(part)]


async def ping(url: str) -> list[float]:
    """One stream, from its first event until standard input ends."""
    found: list[float] = []
    over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    question = "ping " * 20  # long enough for two legs
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": ENDLESS}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http, http.post(url, json=body) as response:
        response.raise_for_status()
        while not over.done():
            part = await response.content.readany()
            if not part:
                raise RuntimeError("the stream ended")
            if not found:
                print("first", flush=True)
            found += delays_ms(part, time.monotonic())
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ping(sys.argv[1] + "/v1/chat/completions"))))
