"""Verbs over HTTP with two real nodes behind a real proxy."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from cache_stage import SHAPE
from peers_harness import disk_pair
from proxy_harness import run, within
from raw_engine import CHUNK_BYTES, Engine

from pdx.proxy.app import Proxy
from pdx.proxy.config import ProxyConfig
from pdx.proxy.server import Server
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import Model

NUM, PER_CHUNK = 6, int(SHAPE["chunk_tokens"])
LAYOUT = b"l" * 16
ONE_SHARD = {**SHAPE, "num_shards": "1"}


@pytest.fixture(scope="module")
def pair():
    """Two nodes with a disk each, and an engine at each that tells how it names chunks."""
    with tempfile.TemporaryDirectory(prefix="pdxc") as name:
        folder = Path(name)
        control = f"ipc://{folder}/proxy/p.sock"
        with disk_pair(folder, proxy=control) as cluster:
            engines = {node: Engine(cluster.address(node), layout=LAYOUT, shape=ONE_SHARD) for node in "ab"}
            yield cluster, engines, control, folder
            for engine in engines.values():
                engine.close()


class Says:
    """A controller at the administrator's socket of a proxy."""

    def __init__(self, client):
        self.client = client

    async def post(self, verb, node=(), **body):
        nodes = [("node", each) for each in ([node] if isinstance(node, str) else node)]
        async with self.client.post(f"http://pdx/cache/{verb}", params=nodes, json=body) as response:
            return response.status, json.loads(await within(response.read()))

    async def ok(self, verb, node=(), **body):
        """By the names of nodes."""
        status, answer = await self.post(verb, node, **body)
        assert (status, answer.get("errors")) == (200, {}), answer
        return answer["nodes"]

    async def job(self, verb, node, **body):
        return (await self.ok(verb, node, **body))[node]

    async def finished(self, job):
        async with asyncio.timeout(20):
            while (status := await self.job("check_finish", job.partition(":")[0], job=job))["state"] == "running":
                await asyncio.sleep(0.01)
        return status


@asynccontextmanager
async def proxy(control, folder):
    made = Proxy(ProxyConfig(control=control, heartbeat_timeout_s=60.0))
    http, admin = (Server(app, made.env) for app in (made.app(), made.admin_app()))
    await http.start("127.0.0.1:0")
    await admin.start(f"{folder}/admin/s.sock")
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(f"{folder}/admin/s.sock")) as client:
        says = Says(client)
        async with asyncio.timeout(20):
            while sum(bool(each["models"]) for each in (await says.ok("models")).values()) < 2:
                await asyncio.sleep(0.01)
        yield says
    await admin.close()
    await http.close()


def prompt(seed):
    return [(seed * 7 + number) % 100 for number in range(NUM * PER_CHUNK)]


def save(engines, node, tokens):
    keys = chunk_keys(Model("", "", LAYOUT, ONE_SHARD), tokens)
    engines[node].save({key: os.urandom(CHUNK_BYTES) for key in keys})


def test_lookup_move_pin_and_clear_over_http(pair):
    _, engines, control, folder = pair
    tokens = prompt(1)
    save(engines, "a", tokens)
    what = {"tokens": tokens}

    async def main():
        async with proxy(control, folder) as says:

            async def where():
                return {name: each["tiers"] for name, each in (await says.ok("lookup", what=what)).items()}

            assert await where() == {"a": {"host": NUM, "disk": 0}, "b": {"host": 0, "disk": 0}}
            move = {"what": what, "source": "host", "target": "disk", "target_node": "b"}
            planned = await says.job("move", "a", **move, dry_run=True)
            assert (planned["state"], planned["job"], planned["chunks"]) == ("planned", "", NUM)
            job = await says.job("move", "a", **move)
            assert job["job"].startswith("a:")
            done = await says.finished(job["job"])
            assert (done["state"], done["chunks_done"], done["why"]) == ("done", NUM, "")
            assert await where() == {"a": {"host": 0, "disk": 0}, "b": {"host": 0, "disk": NUM}}

            some = {"tokens": tokens[: 2 * PER_CHUNK]}
            effect = (await says.ok("pin", "b", what=some, tier="disk"))["b"]
            assert effect["tiers"][0]["chunks"] == 2
            found = (await says.ok("lookup", what=what))["b"]
            assert (found["pinned"], found["chunk_tokens"]) == ({"disk": 2}, PER_CHUNK)
            status, answer = await says.post("move", "b", what=what, source="disk", target="host")
            assert (status, "pinned" in answer["error"]["message"]) == (409, True)
            await says.ok("pin", "b", what=what, tier="disk", pinned=False)

            would = await says.ok("clear", "*", what=what, dry_run=True)
            assert {name: each["type"] for name, each in would.items()} == {"a": "Effect", "b": "Effect"}
            assert (await where())["b"]["disk"] == NUM
            await says.ok("clear", "b", what=what)
            assert await where() == {"a": {"host": 0, "disk": 0}, "b": {"host": 0, "disk": 0}}

    run(main)


def test_what_two_nodes_say_of_themselves(pair):
    cluster, engines, control, folder = pair
    tokens = prompt(2)
    save(engines, "b", tokens)

    async def main():
        async with proxy(control, folder) as says:
            health = await says.ok("health")
            assert [health[name]["name"] for name in "ab"] == ["a", "b"]
            assert [tier["name"] for tier in health["b"]["tiers"]] == ["disk"]
            assert health["b"]["listen"] == f"{cluster.address('b')}.peers"
            listed = (await says.ok("ls", "b"))["b"]
            assert sum(model["chunks"] for model in listed["models"]) == NUM
            status, answer = await says.post("clear", "b", what={"tokens": tokens}, tier="tape")
            assert (status, answer["error"]["type"]) == (404, "TierUnknown")
            assert "'host', 'disk'" in answer["error"]["message"]
            status, answer = await says.post("check_finish", job="b:3f-1")
            assert (status, answer["error"]["type"]) == (404, "JobUnknown")
            assert (await says.ok("why", "b"))["b"]["type"] == "Explained"
            await says.ok("clear", "*", everything=True)
            found = await says.ok("lookup", what={"tokens": tokens})
            assert {name: each["hits"] for name, each in found.items()} == {"a": 0, "b": 0}

    run(main)


def test_a_job_outlives_the_proxy_that_it_was_asked_through(pair):
    _, engines, control, folder = pair
    tokens = prompt(3)
    save(engines, "a", tokens)

    async def main():
        async with proxy(control, folder) as says:
            job = (await says.job("move", "a", what={"tokens": tokens}, source="host", target="disk"))["job"]
        async with proxy(control, folder) as says:
            assert (await says.finished(job))["state"] == "done"
            assert job in [each["job"] for each in (await says.ok("jobs"))["a"]["jobs"]]
            found = (await says.ok("lookup", what={"tokens": tokens}))["a"]
            assert found["tiers"] == {"host": 0, "disk": NUM}

    run(main)
