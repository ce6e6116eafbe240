"""Clients that go away, by the thousand: of their requests nothing is left a second later."""

import asyncio
import json
import random
import time

import aiohttp
import pytest
from proxy_harness import BODY, begin, until
from proxy_process import proxy_process

COUNT, AT_ONCE = 10_000, 100
LEFT_S = 1.0


async def cancel(made, chance):
    """One client, who leaves before the answer, or in its midst."""
    body = json.dumps({**BODY, "stream": True, "max_tokens": 200, "ignore_eos": True}).encode()
    reader, writer = await begin(made.url, len(body))
    writer.write(body)
    if chance.random() < 0.5:
        await reader.readline()
    else:
        await asyncio.sleep(chance.random() * 0.05)
    writer.transport.abort()


async def told(made, admin):
    """The requests that are under way, and the legs."""
    connector = aiohttp.UnixConnector(admin)
    async with aiohttp.ClientSession(connector=connector) as session, session.get("http://x/metrics") as response:
        lines = (await response.text()).splitlines()
    async with made.client.get(made.url + "/load") as response:
        load = (await response.json())["server_load"]
    legs = sum(float(line.split()[-1]) for line in lines if line.startswith("pdx_proxy_engine_in_flight{"))
    left = sum(float(line.split()[-1]) for line in lines if 'outcome="client_gone"' in line)
    return load, legs, left


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_of_many_requests_that_are_cancelled_nothing_is_left(tmp_path):
    admin = f"{tmp_path}/admin/a.sock"
    async with proxy_process(tmp_path, "--admin", admin) as made:
        made.engine.fault = "hang_mid"
        await asyncio.gather(*(cancel(made, random.Random(number)) for number in range(AT_ONCE)))
        await until(lambda: _is_idle(made, admin))
        files = made.num_files()
        chances = iter([random.Random(number) for number in range(COUNT)])

        async def client():
            for chance in chances:
                await cancel(made, chance)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        over_at = time.monotonic()
        await until(lambda: _is_idle(made, admin))
        assert time.monotonic() - over_at <= LEFT_S
        await until(lambda: made.num_files() <= files + 4)  # the engine closes its ends in its own time
        load, legs, left = await told(made, admin)
        assert (load, legs) == (0, 0)
        assert left >= 0.9 * COUNT
        made.engine.fault = None
        assert await made.ask() == 200


async def _is_idle(made, admin):
    load, legs, _ = await told(made, admin)
    return not load and not legs and made.engine.hanging == 0
