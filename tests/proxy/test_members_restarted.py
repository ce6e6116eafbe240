"""Engines, nodes and a proxy are ended and started again in any order, and serve together within 5 s.

The nodes and the proxy with its two workers are real processes. Engines are stand-ins, whose links to their nodes are
those of real ones.
"""

import asyncio
import itertools
import os
import time
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from engine_standin import StandIn
from node_harness import MIB, NodeProcess
from proxy_harness import CHAT, DEADLINE_S, TALK, until, within
from proxy_process import started

from pdx.cli.ports import free_ports
from pdx.config import ConnectorConfig, NodeConfig
from pdx.engine.link import NodeLink
from pdx.wire.messages import VERSION, Hello

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

HEALED_S = 5.0
WORKERS = 2
START_S = 12 * DEADLINE_S


class Loaded(StandIn):
    """It has the KV of any prompt at once."""

    async def kv_of(self, body):
        return


class Engine:
    """A stand-in and its link to a node."""

    def __init__(self, role, node, port):
        self.role, self.node, self.port = role, node, port
        self.life = 0

    async def start(self):
        self.life += 1
        self.standin = Loaded(f"{self.role}-{self.life}")
        await self.standin.start(self.port)
        url = f"http://127.0.0.1:{self.port}"
        hello = Hello(VERSION, os.getpid(), "scheduler", engine=self.standin.name, role=self.role, url=url)
        self.link = NodeLink(ConnectorConfig(node=self.node, start_node=False), hello, starter=False)

    async def stop(self):
        await asyncio.to_thread(self.link.close)
        await self.standin.stop()

    close = stop


class RealNode:
    """A process."""

    def __init__(self, address, proxy):
        self.config = NodeConfig(address=address, arena_bytes=8 * MIB, proxy=proxy)

    async def start(self):
        self.process = await asyncio.to_thread(NodeProcess.ready, self.config)

    async def stop(self):
        await asyncio.to_thread(self.process.kill)

    async def close(self):
        await asyncio.to_thread(self.process.close)


class RealProxy:
    """Processes."""

    def __init__(self, log, port, control):
        self.log, self.control = log, control
        self.url = f"http://127.0.0.1:{port}"
        self.options = ["--port", str(port), "--workers", str(WORKERS), "--control", control, "--debug-headers"]
        self.options += ["--min-split-tokens", "0"]

    async def start(self):
        self.process = await started(self.log, self.options)
        await until(lambda: self.log.read_text().count("listening on") == WORKERS, START_S)

    async def stop(self):
        self.process.kill()
        await self.process.wait()
        await until(self._is_free, START_S)

    close = stop

    async def _is_free(self):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        except OSError:
            return True
        writer.close()
        return False


class Fleet:
    """All of them, by name."""

    def __init__(self, folder, num_proxies):
        ports = free_ports(2 + num_proxies)
        nodes = [f"ipc://{folder}/{name}/n.sock" for name in "ab"]
        self.proxies = [
            RealProxy(folder / f"log{number}", port, f"ipc://{folder}/control/{number}.sock")
            for number, port in enumerate(ports[2:])
        ]
        self.proxy = self.proxies[0]
        self.all = {"proxy": self.proxy} | {f"proxy {number}": each for number, each in enumerate(self.proxies[1:], 2)}
        control = ",".join(each.control for each in self.proxies)
        for name, role, address, port in zip("ab", ("prefill", "decode"), nodes, ports, strict=False):
            self.all[f"node {name}"] = RealNode(address, control)
            self.all[role] = Engine(role, address, port)

    async def fresh(self, path, body=None, proxy=None):
        """By a connection of its own."""
        url = (proxy or self.proxy).url
        async with (
            aiohttp.ClientSession() as session,
            session.request("POST" if body else "GET", url + path, json=body) as response,
        ):
            return response.status, response.headers, await within(response.json())

    async def is_whole(self, proxy=None):
        """Whether each worker has all engines and nodes, and gives a request to both engines."""
        try:
            for _ in range(4 * WORKERS):
                _, _, told = await self.fresh("/health", proxy=proxy)
                if [told[name] for name in ("decoders", "prefillers", "nodes", "pairs")] != [1, 1, 2, 1]:
                    return False
            status, headers, _ = await self.fresh(CHAT, TALK, proxy)
        except aiohttp.ClientError:
            return False
        return status == 200 and headers["x-pdx-mode"] == "sampled"


@asynccontextmanager
async def fleet(folder, num_proxies=1):
    made = Fleet(folder, num_proxies)
    async with AsyncExitStack() as undo:
        for each in made.all.values():
            await each.start()
            undo.push_async_callback(each.close)
        await until(made.is_whole, START_S)
        yield made


@pytest.mark.parametrize("member", ["prefill", "decode"])
async def test_whoever_is_started_again_in_any_order_serves_within_five_seconds(place, member):
    async with fleet(place) as made:
        node = "node a" if member == "prefill" else "node b"
        for order in itertools.permutations((member, node, "proxy")):
            for name in order:
                await made.all[name].stop()
            for name in order:
                await made.all[name].start()
            since = time.monotonic()
            await until(made.is_whole, START_S)
            assert time.monotonic() - since <= HEALED_S, order


async def test_two_proxies_share_nodes_and_engines_and_one_goes_on_without_the_other(place):
    async with fleet(place, num_proxies=2) as made:
        first, second = made.proxies
        await until(lambda: made.is_whole(second), START_S)
        await first.stop()
        for _ in range(10):
            assert await made.is_whole(second)
        await first.start()
        await until(lambda: made.is_whole(first), START_S)
        assert await made.is_whole(second)
