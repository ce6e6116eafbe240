"""A proxy that may open few files, under floods of strangers: it lives, and honest clients and nodes are served."""

import contextlib
import resource
import socket

import aiohttp
import pytest
from control_stage import Members
from proxy_harness import Node, until
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
