"""Several processes of one proxy at one port."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import aiohttp
from proxy_harness import DEADLINE_S, until, within
from proxy_process import proxy_process

from pdx.security.address import worker_address

PATIENT_S = 6 * DEADLINE_S


class Workers:
    """What a test knows of a proxy with so many of them."""

    def __init__(self, made, folder, count):
        self.made, self.count = made, count
        self.admins = [worker_address(f"{folder}/admin/a.sock", number) for number in range(count)]

    @property
    def pids(self):
        return [int(each) for each in Path(f"/proc/{self.made.pid}/task/{self.made.pid}/children").read_text().split()]

    @property
    def num_starts(self):
        return self.made.log.count("listening on")

    async def told(self, number, path):
        """What one of them tells the administrator."""
        connector = aiohttp.UnixConnector(self.admins[number])
        async with aiohttp.ClientSession(connector=connector) as session, session.get(f"http://x{path}") as response:
            return await within(response.text())

    async def served(self):
        """How many requests each has served."""
        texts = [await self.told(number, "/metrics") for number in range(self.count)]
        return [sum(map(float, re.findall(r"^pdx_proxy_requests_total\{[^}]*\} (\S+)$", each, re.M))) for each in texts]

    async def fresh(self, path="/health"):
        """By a connection of its own, which the kernel gives to any of them."""
        async with aiohttp.ClientSession() as session, session.get(self.made.url + path) as response:
            return response.status, json.loads(await within(response.read()))

    async def held(self, count):
        """So many requests, each of which the engine holds."""
        before = len(self.made.engine.seen)  # that of who waited for the port
        self.made.engine.fault = "hold"
        under_way = [asyncio.create_task(self.ask()) for _ in range(count)]
        await until(lambda: len(self.made.engine.seen) == before + count)
        return under_way

    async def loaded(self, count):
        """Wait until so many requests are under way; clients hear of the end of theirs before it is counted."""

        async def is_told():
            return (await self.fresh("/load"))[1]["server_load"] == count

        await until(is_told)

    async def ask(self):
        async with aiohttp.ClientSession() as session:
            return await self.made.ask(session)


@contextlib.asynccontextmanager
async def workers(folder, *options, count=3, **more):
    options = ("--workers", str(count), "--admin", f"{folder}/admin/a.sock", *options)
    async with proxy_process(folder, *options, **more) as made:
        found = Workers(made, folder, count)
        await until(lambda: found.num_starts == count, PATIENT_S)
        yield found
