"""A proxy that may open few files, under floods of strangers: it lives, and honest clients and nodes are served.

And clients that go away, by the thousand: of their requests nothing is left a second later.
"""

import asyncio
import contextlib
import json
import random
import resource
import socket
import time

import aiohttp
import pytest
from control_stage import Members
from proxy_harness import BODY, Node, begin, until
from proxy_process import proxy_process

from pdx.cli.ports import free_ports
from pdx.security.curve_keys import secure_client

LIMIT = 256


def curve(folder):
    """The options of a proxy with keys, and what puts the keys of a node that it knows on a socket."""
    members = Members(folder)
    node, proxy = members.pairs["one"], members.pairs["proxy"]
    options = [word for name, file in members.files.items() for word in (f"--{name}", file)]
    return options, lambda socket: secure_client(socket, own=node, server_key=proxy.public)


def node_of(made, secure):
    node = Node("inproc://nowhere-yet", "one")
    node.socket.disconnect("inproc://nowhere-yet")
    secure(node.socket)
    node.socket.connect(made.control)
    return node


def said(made):
    """What the log says but for the line of each request that was served."""
    return "\n".join(line for line in made.log.splitlines() if " pdx.proxy.requests: " not in line)


async def honest_are_served(made):
    """Over connections that stand, and over a new one; and descriptors are left."""
    most = 0
    for _ in range(50):
        assert await made.ask() == 200
        most = max(most, made.num_files())
    assert most < LIMIT - 32
    async with aiohttp.ClientSession() as newcomer:
        assert await made.ask(newcomer) == 200


@pytest.mark.long
async def test_strangers_at_the_control_port_keep_nobody_out(tmp_path):
    """Once 400 connections took all descriptors: no client could connect, and the process used a core up."""
    options, secure = curve(tmp_path)
    (port,) = free_ports(1)
    async with proxy_process(tmp_path, *options, limit=LIMIT, control=f"tcp://127.0.0.1:{port}") as made:
        with contextlib.ExitStack() as flood:
            for _ in range(400):
                flood.enter_context(made.dial(port))
            await honest_are_served(made)
            with contextlib.closing(node_of(made, secure)) as node:
                await node.report()
                async with made.client.get(made.url + "/health") as response:
                    assert response.status == 200
                await known(made, 1)
        assert made.process.returncode is None
        assert len(said(made)) < 10_000


@pytest.mark.long
async def test_idle_connections_keep_nobody_out(tmp_path):
    """Once they took all descriptors: honest clients got 503, and a node that connected made ZMQ end the process."""
    async with proxy_process(tmp_path, limit=LIMIT) as made:
        with contextlib.ExitStack() as flood:
            for _ in range(600):
                flood.enter_context(made.dial())
            await honest_are_served(made)
            with contextlib.closing(node_of(made, lambda _: None)) as node:
                await node.report()
                await known(made, 1)
        assert made.process.returncode is None
        assert len(said(made)) < 10_000


@pytest.mark.long
async def test_without_a_descriptor_left_nobody_ends_the_proxy(tmp_path):
    """ZMQ ends the process where its accept at a Unix socket finds none."""
    async with proxy_process(tmp_path, limit=LIMIT) as made:
        path = made.control.removeprefix("ipc://")
        async with made.client.get(made.url + "/health") as response:
            assert response.status == 200
        resource.prlimit(made.pid, resource.RLIMIT_NOFILE, (made.num_files(), LIMIT))
        with contextlib.ExitStack() as flood, contextlib.closing(node_of(made, lambda _: None)) as node:
            for _ in range(64):
                stream = flood.enter_context(socket.socket(socket.AF_UNIX))
                stream.setblocking(False)
                stream.connect_ex(path)
                flood.enter_context(made.dial())
            await node.report()
            for _ in range(20):
                async with made.client.get(made.url + "/health") as response:
                    assert response.status in (200, 503)  # its probe of an engine may find no descriptor
            assert made.process.returncode is None
            resource.prlimit(made.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
            await known(made, 1)
            await healthy(made)
        assert await made.ask() == 200
        assert len(said(made)) < 10_000


async def test_with_many_engines_and_few_files_clients_are_still_let_in(tmp_path):
    """Descriptors are left for engines; once so many that none was for clients. The soft limit is raised."""
    engines = [f"--prefill=http://127.0.0.1:{port}" for port in range(1, 80)]
    async with proxy_process(tmp_path, *engines, limit=(LIMIT // 2, LIMIT)) as made:
        assert resource.prlimit(made.pid, resource.RLIMIT_NOFILE) == (LIMIT, LIMIT)
        with contextlib.ExitStack() as others:
            for _ in range(8):
                others.enter_context(made.dial())
            async with aiohttp.ClientSession() as newcomer:
                assert await made.ask(newcomer) == 200
            assert await made.ask() == 200


async def healthy(made):
    """Wait until engines are probed with success."""
    await until(lambda: health(made, lambda response, _: response.status == 200), 60)


async def known(made, count):
    """Wait until so many nodes have reported."""
    await until(lambda: health(made, lambda _, told: told["nodes"] >= count), 60)


async def health(made, condition):
    async with made.client.get(made.url + "/health") as response:
        return condition(response, await response.json())


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
