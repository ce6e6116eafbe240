"""A status page of as many nodes, engines and requests as a test wants, of which nothing is real but the page.

`python tests/proxy/status_stage.py 127.0.0.1:8001` serves one, to be looked at.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from contextlib import asynccontextmanager
from unittest import mock

from aiohttp import web

from pdx.proxy import status
from pdx.proxy.admission import Admission
from pdx.proxy.cache.routes import CacheControl
from pdx.proxy.config import ProxyConfig
from pdx.proxy.engines import Engines
from pdx.proxy.exchange import Drain, Seat
from pdx.proxy.health import EngineState, Health
from pdx.proxy.leg import Legs
from pdx.proxy.metrics import Metrics
from pdx.proxy.plan import Mode
from pdx.proxy.routes import Route
from pdx.proxy.server import Server
from pdx.proxy.status import StatusPage
from pdx.proxy.timelines import Fallback, Timeline, Timelines
from pdx.telemetry.env import Env
from pdx.telemetry.timeline import Event, Moment
from pdx.wire import messages
from pdx.wire.proxy import EngineReport, NodeReport, Reply, decode_to_proxy
from pdx.wire.status import ArenaStatus, NodeStatus, PeerStatus, TierStatus

GIB, MS = 1 << 30, 10**6
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "\x1b[2J\x1b]0;owned\x07\x9b31m",
    "\u202egnp.exe\u2066",
    "</script><script>alert(1)</script>",
    "&lt;b&gt; \" ' ` ${1}",
    "x" * 250,
    "\u200b\u00ad\U000e0041",
)


def name_of(number, hostile):
    return f"{number:03}{HOSTILE[number % len(HOSTILE)]}"[:256] if hostile else f"node-{number:03}"


def url_of(number):
    return f"http://10.0.{number // 250}.{number % 250 + 1}:8000"


def node_status(number, nodes, *, hostile=False, chance=None):
    chance = chance or random.Random(number)
    used, said = chance.random(), HOSTILE[number % len(HOSTILE)]
    asked = chance.randrange(20_000)
    tiers = [
        TierStatus(
            said if hostile else "disk",
            said if hostile else "/var/cache/pdx",
            chunks=4000,
            used_bytes=int(340 * GIB * used),
            limit_bytes=400 * GIB,
            hits=asked // 3,
            misses=asked // 4,
            load_gb_s=2.31,
            state=said if hostile else "ok" if number % 9 else "paused: the disk is full",
        ),
        TierStatus("remote", "s3://kv/llama", used_bytes=0, hits=asked // 9, misses=asked // 6, load_gb_s=0.42),
    ]
    peers = [
        PeerStatus(
            name_of(each, hostile),
            "tcp://10.0.0.2:7700",
            "closed" if each == 5 and number % 10 == 3 else "ready",
            said if hostile else "nixl" if each % 5 else "tcp",
            {"nixl": 11.2, "tcp": 2.3},
            each % 2,
            0,
            3 * GIB,
            GIB,
            (said if hostile else "it was silent for 6 s") if each == 5 and number % 10 == 3 else "",
        )
        for each in range(nodes)
        if each != number
    ]
    counters = {"hit_chunks": int(asked * used), "looked_up_chunks": asked, "sealed": 5, "evicted": 3}
    counters |= {f"degraded_{said}" if hostile else "degraded_load_late": 3} if number % 7 == 0 else {}
    return NodeStatus(
        name=name_of(number, hostile),
        epoch=1,
        pid=100,
        uptime_s=3600.0 * number + 5,
        arena_bytes=64 * GIB,
        free_bytes=int(64 * GIB * (1 - used)),
        chunks={"sealed": 100},
        chunk_bytes={"sealed": GIB},
        leases=3,
        pins=0,
        transfers=number % 4,
        attached=[],
        counters=counters,
        peers=peers,
        arenas=[ArenaStatus("", 64 * GIB, int(64 * GIB * (1 - used)))],
        tiers=tiers,
    )


def timeline_of(number, nodes, now_ns, *, hostile=False, chance=None):
    """A request that has come as far as one of its age has."""
    chance = chance or random.Random(number)
    alone, tokens = number % 6 == 5, chance.randrange(200, 30_000)
    prefill, decode = chance.randrange(0, max(1, nodes), 2), chance.randrange(1, max(2, nodes), 2)
    first, last = (f"{name_of(each, True)}-engine"[:256] if hostile else f"llama-{each}" for each in (prefill, decode))
    steps = [(Event.RECEIVED, 0, "", 0)]
    if alone:
        steps += [(Event.DECODE_SENT, 0.4, last, 0), (Event.DECODE_FIRST, 30 + tokens / 40, "", 0)]
    else:
        steps += [(Event.PREFILL_SENT, 0.6, first, 0), (Event.DECODE_SENT, 0.1, last, 0)]
        steps += [(Event.ADMITTED, chance.choice([3, 20, 900]), "", 0), (Event.PREFILL_END, 50 + tokens / 20, "", 0)]
        steps += [(Event.LANDED, chance.choice([1, 30]), "", tokens * 1000), (Event.RUNNABLE, 5, "", 0)]
        steps += [(Event.DECODE_FIRST, 25, "", 0)]
    moments, at = [], 0
    for event, ms, engine, nbytes in steps:
        at += int(ms * MS)
        moments.append(Moment(event, at, engine, nbytes, tokens))
    age_ns = int(chance.random() ** 2 * (at + 9000 * MS))
    moments = [
        Moment(each.event, now_ns - age_ns + each.at_ns, each.engine, each.nbytes, each.tokens)
        for each in moments
        if each.at_ns <= age_ns
    ]
    mode, why = (Mode.ALONE, "short") if alone else (Mode.FORWARD, "greedy")
    return Timeline(
        transfer=f"a1b2c3d4{chance.getrandbits(160):x}"[:40],
        route=Route.COMPLETIONS,
        mode=mode,
        why=why,
        prompt_tokens=tokens,
        cached_tokens=tokens // 2,
        moments=moments,
    )


class Nodes:
    """In place of the control socket: nodes that have reported answer as through it, from bytes."""

    def __init__(self):
        self.replied = None
        self.asked = []
        self.answers = {}

    def members(self):
        return None

    def order(self, node, said):
        self.asked.append(node)
        if node not in self.answers:
            return "it is not connected"
        if (status := self.answers[node]) is not None:
            reply = decode_to_proxy(messages.encode(Reply(said.number, status)))
            asyncio.get_running_loop().call_soon(self.replied, node, reply)
        return ""


class Shown:
    """The page, and the parts of a proxy that it shows; `url` is where."""

    url = ""

    def __init__(self, **settings):
        config = ProxyConfig(**{"heartbeat_timeout_s": 1e6, **settings})
        self.now = 1e4
        self.env = Env(lambda: self.now)
        self.health = Health(self.env, silence_s=60.0)
        self.engines = Engines(
            self.env, self.health, prefill=(), decode=(), heartbeat_timeout_s=config.heartbeat_timeout_s
        )
        self.nodes = Nodes()
        self.cache = CacheControl(
            config,
            self.nodes,
            self.env,
            engines=self.engines,
            legs=Legs(self.health, config),
            metrics=Metrics(self.env, engines=self.engines, dropped={}),
            chunks=None,
        )
        self.nodes.replied = self.cache.orders.replied
        self.timelines = Timelines()
        seat = Seat.alone()
        self.page = StatusPage(
            config,
            self.env,
            engines=self.engines,
            timelines=self.timelines,
            cache=self.cache,
            admission=Admission(config, self.env, seat),
            drain=Drain(seat),
        )

    def populate(self, nodes, requests, *, hostile=False):
        chance = random.Random(7)
        for number in range(nodes):
            self._join(number, nodes, hostile=hostile)
        now_ns = time.monotonic_ns()
        made = [timeline_of(number, nodes, now_ns, hostile=hostile, chance=chance) for number in range(requests)]
        for each in sorted(made, key=lambda one: one.moments[0].at_ns):
            self.timelines.begin(each)
        for each in made[:12]:
            ended = timeline_of(chance.randrange(1000), nodes, now_ns - 5000 * MS, hostile=hostile, chance=chance)
            self.timelines.begin(ended)
            self.timelines.end(ended, "ok", now_ns - 5000 * MS)
            why = chance.choice(["prefill_timeout", "no_prefiller", "layouts"])
            self.timelines.fallbacks.appendleft(Fallback(each.transfer, why, now_ns - int(chance.random() * 1e11)))

    def _join(self, number, nodes, *, hostile):
        name, role = name_of(number, hostile), "prefill" if number % 2 == 0 else "decode"
        engine = f"{name}-engine"[:256] if hostile else f"llama-{number}"
        told = [EngineReport(engine, role, url_of(number), number % 3)]
        reaches = [name_of(each, hostile) for each in range(nodes)]
        report = NodeReport(messages.VERSION, name, 1, 64 * GIB, GIB, told, [], reaches=reaches)
        self.cache.report(report)
        self.engines.report(report)
        if number % 25 != 24:
            self.nodes.answers[name] = node_status(number, nodes, hostile=hostile)
        record = self.health.of(url_of(number))
        record.state = EngineState.SUSPECT if number % 31 == 30 else EngineState.WELL
        record.models = dict.fromkeys([HOSTILE[number % len(HOSTILE)]] if hostile else ["meta-llama/Llama-3.1-8B"])
        record.computing.moved(8000 + number, 0, 10**9)


@asynccontextmanager
async def serving(nodes=2, requests=3, *, hostile=False, address="127.0.0.1:0", **settings):
    """What is there has time to answer."""
    shown = Shown(**settings)
    shown.populate(nodes, requests, hostile=hostile)
    app = web.Application()
    shown.page.install(app)
    server = Server(app, shown.env)
    await server.start(address)
    shown.url = server.url
    try:
        with mock.patch.object(status, "WAIT_S", 60.0):
            yield shown
    finally:
        await server.close()


async def _main(address, nodes="4", requests="7", hostile=""):
    async with serving(int(nodes), int(requests), hostile=bool(hostile), address=address) as shown:
        sys.stdout.write(f"{shown.url}\n")
        sys.stdout.flush()
        while True:
            await asyncio.sleep(1)
            shown.now += 1


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
