"""The vLLM engines behind a service that is measured: where they found the tokens of prompts, and their own caches.

An engine tells all that by itself. Behind PDX's proxy there are several, and its metrics (`--admin`) name them.
"""

from __future__ import annotations

import asyncio
import re
import urllib.error
from collections.abc import Collection, Sequence

from pdx.bench.breakdown.records import Found
from pdx.bench.systems import engine_cache, engine_metrics
from pdx.bench.systems.engine_metrics import Sums

COUNTED_S = 5.0  # until engines have counted what they answered
LOOK_S = 0.1
_PROXIED = re.compile(r'^pdx_proxy_engine_in_flight\{.*\burl="([^"]+)".*\}', re.MULTILINE)

Counts = dict[str, Sums]  # by engine's URL


async def find(url: str) -> tuple[str, ...]:
    """URLs of the engines that the metrics at `url` name: its own, those of PDX's proxy, or none that are known."""
    try:
        page = await asyncio.to_thread(engine_metrics.page, url)
    except (OSError, urllib.error.HTTPError, ValueError):
        return ()
    if engine_metrics.BY_SOURCE in page:
        return (url,)
    return tuple(sorted(set(_PROXIED.findall(page))))


async def read(engines: Sequence[str]) -> Counts:
    """What each of them has counted so far; those that do not answer are left out."""
    counts: Counts = {}
    for url in engines:
        try:
            counts[url] = await asyncio.to_thread(engine_metrics.read, url)
        except OSError:
            continue
    return counts


async def found_since(before: Counts, prompt_tokens: int) -> dict[str, Found]:
    """Where each engine found the tokens of its prompts since `before`.

    Engines count a moment after they answer. So this waits until they have counted `prompt_tokens` in all, or more,
    and nothing was added between two looks; what they have counted after `COUNTED_S` is taken as it is.
    """
    deadline = asyncio.get_running_loop().time() + COUNTED_S
    earlier: dict[str, Found] = {}
    while True:
        now = await read(list(before))
        found = {url: sums.since(before[url]).found for url, sums in now.items()}
        has_counted = found == earlier and sum(each.prompt for each in found.values()) >= prompt_tokens
        if has_counted or not before or asyncio.get_running_loop().time() > deadline:
            return found
        earlier = found
        await asyncio.sleep(LOOK_S)


async def empty_caches(engines: Sequence[str]) -> None:
    """The own prefix cache of each engine; what a connector keeps stays.

    :raises CacheNotReset: an engine does not do it, or none is known.
    """
    if not engines:
        raise engine_cache.CacheNotReset(
            "--reset-cache empties the prefix caches of vLLM's engines, and none is known: the service is no engine; "
            "of PDX's proxy, say by --admin where it has its metrics"
        )
    for url in engines:
        await asyncio.to_thread(engine_cache.reset, url)


def total(found: Collection[Found]) -> Found:
    """All of them together."""
    return Found(
        sum(each.computed for each in found), sum(each.local for each in found), sum(each.external for each in found)
    )
