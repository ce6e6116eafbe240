"""A proxy with stand-in engines and a stand-in node around it, and a check that nothing of it stays behind."""

import asyncio
import collections
import functools
import inspect
import json
import shutil
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from engine_standin import Server, StandIn

from pdx.proxy import app, health, leg, status
from pdx.proxy.app import Proxy
from pdx.proxy.config import ProxyConfig
from pdx.proxy.server import Server as HttpServer
from pdx.telemetry.env import Env, WakingClock
from pdx.wire import messages
from pdx.wire.overview import Overview
from pdx.wire.proxy import Arriving, EngineReport, NodeReport, PeerList, Prefilled, decode_from_proxy

DEADLINE_S = 10.0
HANG_S = 3.0
PLAIN = Server().facts


async def within(awaitable, seconds=DEADLINE_S):
    """Everything in these tests has a deadline."""
    return await asyncio.wait_for(awaitable, seconds)


async def until(condition, seconds=DEADLINE_S):
    """Poll for something that has no event of its own, which may have to be awaited."""
    async with asyncio.timeout(seconds):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(0.005)


def put_ahead(seconds):
    """All that the running loop waits for comes so much earlier."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds


class Ahead(asyncio.SelectorEventLoop):
    """A loop whose clock goes to the next timer at once."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        timers = [each.when() for each in self._scheduled if not each.cancelled()]
        if not self._ready and timers:
            self.now = max(self.now, min(timers))
        super()._run_once()


class Clock(WakingClock):
    """A proxy's clock, which a test sets forward: by `ahead_s`, or by `stood_s`, as though the process stood still."""

    def __init__(self):
        self.ahead_s = self.stood_s = 0.0
        super().__init__(0.1, lambda: time.monotonic() + self.stood_s)

    def __call__(self):
        return super().__call__() + self.ahead_s


async def dial(url):
    """A connection of bytes: a reader and a writer."""
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def begin(url, length, *, path="/v1/completions", more=""):
    """A connection that has announced a body of so many bytes (None: chunked), and sent nothing of it."""
    reader, writer = await dial(url)
    framing = f"Content-Length: {length}" if length is not None else "Transfer-Encoding: chunked"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}{framing}\r\n\r\n"
    writer.write(head.encode())
    return reader, writer


class Node:
    """A stand-in for `pdx node` as the proxy sees it. `attend`ing, it takes in what it is told at once."""

    def __init__(self, address, name="node", epoch=1):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.address, self.name, self.epoch = address, name, epoch
        self.inbox, self.attending = asyncio.Queue(), None

    async def report(
        self, *engines, marks=(), version=messages.VERSION, facts=PLAIN, naming=(b"", {}), draining=(), **fields
    ):
        """`facts` and `naming`, how chunks are named: of each engine, or of one after the other. `draining`: names."""
        told = facts if isinstance(facts, list) else [facts] * len(engines)
        named = naming if isinstance(naming, list) else [naming] * len(engines)
        listed = [
            EngineReport(name, role, url, sum(running), known, *chunks, draining=name in draining)
            for (name, role, url, *running), known, chunks in zip(engines, told, named, strict=True)
        ]
        report = NodeReport(
            version=version,
            node=self.name,
            epoch=self.epoch,
            arena_bytes=1,
            free_bytes=1,
            engines=listed,
            marks=list(marks),
            **fields,
        )
        await self.socket.send(messages.encode(report))

    async def keep_reporting(self, *engines, **fields):
        while True:
            await self.report(*engines, **fields)
            await asyncio.sleep(0.1)

    async def cancelled(self):
        """The transfer named by the next Cancel."""
        return (await self.heard(messages.Cancel)).transfer

    async def prefilled(self):
        """The transfer named by the next Prefilled."""
        return (await self.heard(Prefilled)).transfer

    async def arriving(self):
        """The session named by the next Arriving."""
        return (await self.heard(Arriving)).session

    async def peers(self):
        """The names and addresses in the next PeerList."""
        return {peer.name: peer.address for peer in (await self.heard(PeerList)).peers}

    async def heard(self, kind, seconds=DEADLINE_S):
        """The next message of this kind; others are passed by."""
        while True:
            told = self._told() if self.attending is None else self.inbox.get()
            if isinstance(message := await within(told, seconds), kind):
                return message

    async def _told(self):
        return decode_from_proxy(await self.socket.recv())

    def attend(self, settled):
        """From now on its engines hear what became of transfers: they wait no more for their KV."""

        async def attend():
            while True:
                message = await self._told()
                if isinstance(message, messages.Cancel | Prefilled):
                    settled[message.transfer].set()
                self.inbox.put_nowait(message)

        self.attending = asyncio.create_task(attend())

    def close(self):
        if self.attending is not None:
            self.attending.cancel()
        self.socket.close(linger=0)
        self.context.term()


class Cluster:
    """What a test talks to."""

    def __init__(self, proxy, url, admin, client, node, prefills, decodes, settled):
        self.proxy, self.settled = proxy, settled
        self.url, self.admin, self.client, self.node, self.others = url, admin, client, node, []
        self.prefills, self.decodes = prefills, decodes
        node.attend(settled)

    def other_node(self, name="", kind=Node):
        """A second node of the same proxy."""
        self.others.append(kind(self.node.address, name or f"other{len(self.others)}"))
        self.others[-1].attend(self.settled)
        return self.others[-1]

    def close(self):
        for each in (self.node, *self.others):
            each.close()

    @property
    def prefill(self):
        return self.prefills[0]

    @property
    def decode(self):
        return self.decodes[0]

    def release(self):
        """End the fault "hold" of all engines."""
        for engine in (*self.prefills, *self.decodes):
            engine.released.set()

    async def post(self, path, body, base=None, **kwargs):
        """(status, headers, bytes)"""
        async with self.client.post((base or self.url) + path, json=body, **kwargs) as response:
            return response.status, response.headers, await within(response.read())

    def pass_time(self, seconds):
        """By the proxy's clock."""
        self.proxy.env.clock.ahead_s += seconds

    async def outlast(self, request):
        """What becomes of a request though an engine hangs: while one does, the proxy's clock goes past its limits,
        once no prefill engine is about to answer."""
        task, record = asyncio.create_task(request), self.proxy.engines.health.of
        async with asyncio.timeout(DEADLINE_S):
            while not task.done():
                await asyncio.sleep(0.02)
                answers = any(record(engine.url).in_flight > engine.hanging for engine in self.prefills)
                if not answers and any(engine.hanging for engine in (*self.prefills, *self.decodes)):
                    self.pass_time(HANG_S)
                    await asyncio.wait([task], timeout=0.3)
        return await task

    async def get(self, path, base=None):
        async with self.client.get((base or self.url) + path) as response:
            return response.status, await within(response.read())

    async def tell(self, path):
        """What the administrator is told."""
        return await self.get(path, self.admin)

    async def overview(self):
        """What the status page shows."""
        return msgspec.json.decode((await self.tell("/status.json"))[1], type=Overview)

    async def timeline(self, transfer):
        return json.loads((await self.tell(f"/pdx/requests/{transfer}"))[1])

    async def metric(self, name, **labels):
        """The sum of the series that have these labels; read where it lies, which is far quicker than /metrics."""
        metrics = self.proxy._metrics
        families = [*metrics.registry.restricted_registry([name]).collect()] or metrics.collect()
        found = [each for family in families for each in family.samples if each.name == name]
        return sum(each.value for each in found if labels.items() <= each.labels.items())

    async def metric_is(self, value, name, **labels):
        """Whether it is, now."""
        return await self.metric(name, **labels) == value

    async def metric_reaches(self, value, name, **labels):
        """Wait for a series to be at least `value`."""

        async def is_reached():
            return await self.metric(name, **labels) >= value

        await until(is_reached)


@asynccontextmanager
async def cluster(
    prefills=1,
    decodes=1,
    named=True,
    known=True,
    server=None,
    decode_server=None,
    probe_s=3600.0,
    connect_s=DEADLINE_S,
    served=(),
    node="node",
    kind=Node,
    models=None,
    servers=None,
    key="",
    **settings,
):
    """A proxy; unless `named`, its engines are known only once a node reports them. What is healthy has time.

    Named engines are `known`: a node has reported them, too, and its word is good for the whole test.
    `node`: the name of that node, of this `kind`. `models` and `servers`: by an engine's name. `key`: theirs.
    Engines are probed once at the start, then every `probe_s`, and when they are suspect.
    """
    folder = Path(tempfile.mkdtemp(prefix="pdxp"))
    prefill = [StandIn(f"p{index}", server) for index in range(prefills)]
    decode = [StandIn(f"d{index}", decode_server or server) for index in range(decodes)]
    settled = collections.defaultdict(asyncio.Event)
    for engine in (*prefill, *decode):
        engine.settled = settled
        engine.key = key
        engine.models_served = (models or {}).get(engine.name, engine.models_served)
        engine.server = (servers or {}).get(engine.name, engine.server)
        await engine.start()
    if named:
        settings["prefill"] = tuple(engine.url for engine in prefill)
        settings["decode"] = tuple(engine.url for engine in decode)
        settings.setdefault("heartbeat_timeout_s", 600.0)
    settings.setdefault("min_split_tokens", 0)
    settings.setdefault("debug_headers", True)
    address = f"ipc://{folder}/p.sock"
    patched = [mock.patch.object(health, "PROBE_S", probe_s), mock.patch.object(leg, "CONNECT_S", connect_s)]
    patched.append(mock.patch.object(app, "LOOK_S", 0.05))
    patched.append(mock.patch.object(status, "WAIT_S", 0.02))  # for nodes, which do not answer
    for each in patched:
        each.start()
    proxy = Proxy(ProxyConfig(port=0, control=address, **settings), Env(Clock(), log=app.log))
    http = HttpServer(proxy.app(), proxy.env, **dict(served))
    admin = HttpServer(proxy.admin_app(), proxy.env)
    for each in (http, admin):
        await each.start("127.0.0.1:0")
    node = kind(address, node)
    client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), max_field_size=1 << 20)
    made = Cluster(proxy, http.url, admin.url, client, node, prefill, decode, settled)
    try:
        pairs = [("prefill", each) for each in prefill] + [("decode", each) for each in decode]
        told = [(each.name, role, each.url) for role, each in pairs] if named and known else []
        await node.report(*told, facts=[each.server.facts for _, each in pairs[: len(told)]])
        await made.metric_reaches(1, "pdx_proxy_reports_total")
        for engine in (*prefill, *decode) if named else ():
            await made.metric_reaches(1, "pdx_proxy_engine_ready", url=engine.url)
        yield made
        assert counter_series(proxy) == first_series(), (
            "a counter without a series before its first event breaks rate()"
        )
    finally:
        for each in patched:
            each.stop()
        await client.close()
        await http.close()
        await admin.close()
        made.close()
        for engine in (*prefill, *decode):
            await engine.stop()
        shutil.rmtree(folder)


@functools.cache
def first_series():
    """Those of a proxy that has just begun."""
    return counter_series(Proxy(ProxyConfig(control="ipc:///nowhere/p.sock"), Env()))


def counter_series(proxy):
    """The series of all counters, except how verbs ended, of which there are as many ways as classes of errors."""
    families = (family for family in proxy._metrics.registry.collect() if family.type == "counter")
    samples = (sample for family in families for sample in family.samples if sample.name.endswith("_total"))
    return {(each.name, *each.labels.items()) for each in samples if each.name != "pdx_proxy_verbs_total"}


def run(main):
    """Run a test's coroutine function; afterwards no task may be left. A fixture looks for open files."""

    async def checked():
        await main()
        for _ in range(200):
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if not left:
                break
            await asyncio.sleep(0.01)
        assert not left, f"tasks left behind: {left}"

    asyncio.run(checked())


# Prompts after which the stand-in's first token can be forwarded, is half a character, and ends the text.
FORWARDED, HALF, ENDED = "beta", "p1", "prompt 17"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": FORWARDED, "temperature": 0, "max_tokens": 12}
TALK = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}


def events(raw):
    """The data of a stream's events; the stream must be whole."""
    assert raw.endswith(b"\n\n")
    data = [event[6:] for event in raw.decode().split("\n\n") if event.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def patience(fault):
    """Settings of a proxy: a leg's limit strikes healthy engines, too, so it is short only where nothing else ends."""
    limits = {"first_byte_timeout_s": HANG_S, "answer_timeout_s": HANG_S, "idle_timeout_s": HANG_S}
    return limits if fault in ("hang", "hang_mid") else {}


async def stream(made, until_end, path=COMPLETIONS):
    """The data of the events of a stream; `until_end` is set when the first one is there."""
    found = []
    async with made.client.post(made.url + path, json={**BODY, "stream": True}) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: "):
                found.append(line[6:].strip())
                until_end.set()
    return found
