"""A proxy with stand-in nodes that carry out verbs, and a controller that says them over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
from contextlib import asynccontextmanager

from proxy_harness import Node, cluster, within

from pdx.wire import messages
from pdx.wire.messages import Refused
from pdx.wire.proxy import Changes, EngineReport, Follow, NodeReport, Order, Reply
from pdx.wire.verbs import Found

TOKEN = secrets.token_hex(16)
LAYOUT = b"l" * 16
SHAPE = {
    "model": "m",
    "chunk_tokens": "32",
    "block_tokens": "16",
    "num_shards": "2",
    "hashing": "sha256_cbor",
    "root": "00" * 32,
    "salt_tag": "",
    "vocabulary": "100",
}
KEY = "ab" * 16


class Ruled(Node):
    """A stand-in node that carries out verbs: `answers` makes an outcome, or nothing, of each verb. Who asks what it
    `has`, runs of keys, is told that once; None: nothing."""

    def __init__(self, address, name):
        super().__init__(address, name)
        self.orders = []
        self.has = None
        self.answers = lambda _verb: Found(1, 1, {"memory": 1})
        self.task = asyncio.create_task(self._serve())

    @property
    def verbs(self):
        return [order.verb for order in self.orders]

    async def report(self, *engines, layout=LAYOUT, shape=SHAPE, listen="", epoch=None, facts=()):
        """`engines` by name and URL."""
        self.epoch = epoch or self.epoch
        told = [EngineReport(name, "both", url, 0, layout=layout, shape=shape) for name, url in engines]
        report = NodeReport(messages.VERSION, self.name, self.epoch, 1, 1, told, [], listen=listen)
        await self.socket.send(messages.encode(report))

    async def reply(self, number, outcome):
        await self.socket.send(messages.encode(Reply(number, outcome)))

    async def _serve(self):
        while True:
            asked = await self.heard(Order | Follow, seconds=None)
            if isinstance(asked, Order):
                self.orders.append(asked)
                if (outcome := self.answers(asked.verb)) is not None:
                    await self.reply(asked.number, outcome)
            elif self.has is not None:
                told = Changes(asked.stream, 1, asked.frame + 1, self.epoch, 1, self.has, first=True)
                await self.socket.send(messages.encode(told))


class Stage:
    """What a test talks to."""

    def __init__(self, made, nodes):
        self.made, self.nodes = made, nodes

    @property
    def counters(self):
        return self.made.proxy.env.counters

    async def post(self, verb, body=None, *, node=(), wait_s=None, token=TOKEN, raw=None, headers=None, query=()):
        """(status, answer) of a verb at the nodes of these names."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        if token:
            sent["Authorization"] = f"Bearer {token}"
        data = io.BytesIO(json.dumps(body or {}).encode() if raw is None else raw)
        nodes = [("node", each) for each in ([node] if isinstance(node, str) else node)]
        asked = [*nodes, *([("wait_s", str(wait_s))] if wait_s is not None else []), *query]
        url = f"{self.made.admin}/cache/{verb}"
        async with self.made.client.post(url, params=asked, data=data, headers=sent) as response:
            return response.status, json.loads(await within(response.read()))

    async def ok(self, verb, *, node=(), wait_s=None, **body):
        status, answer = await self.post(verb, body, node=node, wait_s=wait_s)
        assert status == 200, answer
        return answer

    async def answers(self, verb, **said):
        """What nodes have answered, by their names."""
        return (await self.ok(verb, **said))["nodes"]

    async def error(self, verb, *, node=(), wait_s=None, **body):
        """(status, class, text)"""
        status, answer = await self.post(verb, body, node=node, wait_s=wait_s)
        assert status != 200, answer
        return status, answer["error"]["type"], answer["error"]["message"]

    async def listed(self, token=TOKEN):
        """(status, answer) of what there is."""
        headers = {"Authorization": f"Bearer {token}"}
        async with self.made.client.get(f"{self.made.admin}/cache", headers=headers) as response:
            return response.status, json.loads(await within(response.read()))

    async def reported(self, node, *engines, **told):
        """The proxy has heard what this node reports, and all that it has said before."""
        count = await self.made.metric("pdx_proxy_reports_total")
        await self.nodes[node].report(*engines, **told)
        await self.made.metric_reaches(count + 1, "pdx_proxy_reports_total")


@asynccontextmanager
async def stage(folder, *names, **settings):
    """Nodes of these names, that have reported and have no engines."""
    token = folder / "token"
    if "cache_token_file" not in settings:
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        settings["cache_token_file"] = str(token)
    settings.setdefault("heartbeat_timeout_s", 600.0)
    async with cluster(named=False, node=names[0], kind=Ruled, **settings) as made:
        nodes = {names[0]: made.node} | {name: made.other_node(name, Ruled) for name in names[1:]}
        built = Stage(made, nodes)
        try:
            for name in names[1:]:
                await nodes[name].report()
            await made.metric_reaches(len(names), "pdx_proxy_reports_total")
            yield built
        finally:
            for node in nodes.values():
                node.task.cancel()
            await asyncio.gather(*(node.task for node in nodes.values()), return_exceptions=True)


def refused(error, text="why"):
    return Refused(error, text)
