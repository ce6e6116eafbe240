"""The verbs of controllers: which nodes are told what, and what is made of their answers. No HTTP here.

A verb that one node answers has that outcome as its answer. All others have an entry for each node: what is wrong with
one node is in its entry, and the others are answered. The name of a job begins with that of its node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from pdx.errors import ConfigError, NodeUnavailable, PdxError, SelectionError, VerbRefused
from pdx.proxy.cache.bodies import (
    AdviseBody,
    ClearBody,
    EvictBody,
    JobBody,
    ListBody,
    Lookup,
    MoveBody,
    OfChunks,
    OfNodes,
    RecodeBody,
    VerifyBody,
    WhyBody,
)
from pdx.proxy.cache.instances import Instance, Instances, Place, model_of
from pdx.proxy.cache.orders import Orders
from pdx.proxy.cache.prompts import Prompts
from pdx.proxy.cache.shown import shown, split_job
from pdx.proxy.chunk_index import ANY
from pdx.proxy.hints import advice
from pdx.security.address import address_host
from pdx.wire.hints import Verdict
from pdx.wire.messages import Advise, Advised, Outcome, Refused, Status, Verb, Why
from pdx.wire.verbs import (
    Clear,
    EndJob,
    Evict,
    Find,
    Found,
    Jobs,
    List,
    ModelList,
    Move,
    PinIn,
    Recode,
    Selection,
    Verify,
)

_AGAIN_S = 0.02  # until a node is asked again whose tiers had not answered, then twice as long each time …
_MOST_AGAIN_S = 0.5  # … up to this
Index = Callable[[Sequence[bytes]], tuple[Mapping[str, Mapping[str, int]], bool]]
Json = dict[str, Any]


class Verbs:
    """All calls on one event loop. Each method raises what `pdx.errors` says of its body, its node, or its chunks."""

    def __init__(self, instances: Instances, orders: Orders, prompts: Prompts, *, index: Index | None = None) -> None:
        """`index`: of some keys, how many leading ones each tier of each node has, and whether that is known of all
        nodes; where it is not, and without an index, nodes are asked."""
        self._instances = instances
        self._orders = orders
        self._prompts = prompts
        self._index = index

    # ---- asked of several nodes ---------------------------------------------------------------

    async def lookup(self, body: Lookup) -> Json:
        """Where chunks are: hits in tokens by node and tier."""
        chosen = await self._prompts.choose(body)
        nodes = self._instances.named(body.instances)
        keys = chosen.selection.keys
        unit = chosen.chunk_tokens or 1
        answer: Json = {
            "chunks": len(keys),
            "tokens": len(keys) * chosen.chunk_tokens,
            "chunk_tokens": chosen.chunk_tokens,
            "unit": "tokens" if chosen.chunk_tokens else "chunks",
            "source": "nodes",
            "hits": {},
            "instances": {},
            "pinned": {},
            "asking": {},
            "errors": {},
        }
        if self._index is not None and keys and not body.ask:
            found, is_complete = self._index(keys)
            if is_complete:
                for name, instance in nodes.items():
                    if problem := self._instances.problem(instance):
                        text = f"node {name!r} {problem}"
                        answer["errors"][name] = {"type": NodeUnavailable.__name__, "message": text}
                        continue
                    tiers = _scaled(found.get(name, {}), unit)
                    answer["hits"][name] = tiers.pop(ANY, 0)
                    answer["instances"][name] = tiers
                return {**answer, "source": "index"}
        asked = {name: self._found(each, chosen.selection, body.wait_s) for name, each in nodes.items()}
        for name, outcome in (await _together(asked)).items():
            if isinstance(outcome, Refused):
                if len(body.instances) == 1:
                    raise VerbRefused(outcome.error, outcome.text)
                answer["errors"][name] = {"type": outcome.error, "message": outcome.text}
                continue
            assert isinstance(outcome, Found)
            answer["chunks"] = max(answer["chunks"], outcome.chunks)
            answer["hits"][name] = outcome.hits * unit
            answer["instances"][name] = _scaled(outcome.tiers, unit)
            if outcome.pinned:
                answer["pinned"][name] = _scaled(outcome.pinned, unit)
            if outcome.asking:
                answer["asking"][name] = outcome.asking
        return answer

    async def _found(self, instance: Instance, what: Selection, wait_s: float) -> Outcome:
        """What a node has, once all its tiers have answered, or what is known of it by then."""
        loop = asyncio.get_running_loop()
        until, pause_s, last = loop.time() + wait_s, _AGAIN_S, None
        while True:
            left_s = until - loop.time()
            try:
                found = await self._ask(instance, Find(what), max(left_s, 0.001))
            except NodeUnavailable:
                if last is None:
                    raise
                return last
            if not isinstance(found, Found) or not found.asking or until - loop.time() <= pause_s:
                return found
            last = found
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_AGAIN_S)

    async def query_ip(self, body: OfNodes) -> Json:
        """Where nodes are."""
        return _entries({name: _address(each) for name, each in self._instances.named(body.instances).items()})

    async def models(self, body: OfNodes) -> Json:
        """How the engines of nodes name chunks."""
        entries: Json = {}
        for name, each in self._instances.named(body.instances).items():
            engines = each.report.engines if each.report is not None else []
            told = [model_of(engine) for engine in engines if engine.layout and engine.shape]
            entries[name] = shown(ModelList(told), name)
        return _entries(entries)

    async def health(self, body: OfNodes) -> Json:
        """How nodes are. One that is not reachable is an entry as well, never an error."""
        nodes = self._instances.named(body.instances)
        asked = await _together({name: self._ask(each, Status(), body.wait_s) for name, each in nodes.items()})
        return _entries({name: self._health(each, asked[name]) for name, each in nodes.items()})

    def _health(self, instance: Instance, outcome: Outcome) -> Json:
        report, is_well = instance.report, not isinstance(outcome, Refused)
        return {
            "type": "Health",
            "reachable": is_well,
            "why": outcome.text if isinstance(outcome, Refused) else "",
            "epoch": f"{report.epoch:x}" if report is not None else "",
            "age_s": self._instances.age_s(instance) if report is not None else None,
            "engines": [engine.url for engine in report.engines] if report is not None else [],
            "status": shown(outcome, instance.name) if is_well else None,
        }

    async def ls(self, body: ListBody) -> Json:
        """What nodes have in memory."""
        return await self._named(body.instances, List(body.session, body.model), body.wait_s)

    async def why(self, body: WhyBody) -> Json:
        """Why chunks of requests were hits or not."""
        return await self._named(body.instances, Why(body.request), body.wait_s)

    async def jobs(self, body: OfNodes) -> Json:
        """All jobs that nodes know of."""
        return await self._named(body.instances, Jobs(), body.wait_s)

    async def advise(self, body: AdviseBody) -> Json:
        """Hints about what the last request of a session used. Each field has a verdict of each node."""
        envelope = advice(bytes(body.hints), body.cache_salt)
        answer = await self._named(body.instances, Advise(envelope.hints), body.wait_s)
        for entry in answer["instances"].values():
            if entry["type"] == Advised.__name__:
                verdicts = [Verdict(**verdict) for verdict in entry.pop("verdicts")]
                entry["fields"] = {each.field: each.told for each in envelope.answer(verdicts)}
        return answer

    # ---- done in one place, or in all --------------------------------------------------------

    async def clear(self, body: ClearBody) -> Json:
        """Forget chunks."""
        what = Selection() if body.everything and not body.said else await self._selection(body)
        place = self._instances.place(body.at)
        return await self._at(place, Clear(what, place.tier, body.everything, body.dry_run), body.wait_s)

    async def pin(self, body: OfChunks) -> Json:
        """Keep chunks in a tier."""
        return await self._pin(body, pinned=True)

    async def unpin(self, body: OfChunks) -> Json:
        """Undo that."""
        return await self._pin(body, pinned=False)

    async def _pin(self, body: OfChunks, *, pinned: bool) -> Json:
        what = await self._selection(body)
        place = self._instances.place(body.at)
        return await self._at(place, PinIn(what, place.tier, pinned, body.dry_run), body.wait_s)

    async def evict(self, body: EvictBody) -> Json:
        """Free an arena of what is worth least."""
        place = self._instances.place(body.at)
        return await self._at(place, Evict(body.below, body.nbytes, place.tier, body.dry_run), body.wait_s)

    # ---- jobs of one node --------------------------------------------------------------------

    async def move(self, body: MoveBody) -> Json:
        """Copy chunks to another tier, and drop them. The job is the node's that has them."""
        what = await self._selection(body)
        source, target = self._instances.tier(body.source, "source"), self._instances.tier(body.target, "target")
        (here,), (there,) = source.instances, target.instances
        self._instances.check_heard(there)
        goal = there.name if there.name != here.name else ""
        verb = Move(what, source.tier, target.tier, node=goal, keeps=body.keeps, dry_run=body.dry_run)
        return await self._one(here, verb, body.wait_s)

    async def compress(self, body: RecodeBody) -> Json:
        """Store chunks by another codec."""
        what = await self._selection(body)
        place = self._instances.tier(body.at, "at")
        new_keys = [bytes.fromhex(key) for key in body.new_keys or ()]
        if form := self._prompts.form(body, body.method):
            new_keys = (await self._selection(msgspec.structs.replace(body, codec=body.method))).keys
        verb = Recode(what, place.tier, form or body.method, new_keys, body.dry_run)
        return await self._one(place.instances[0], verb, body.wait_s)

    async def decompress(self, body: RecodeBody) -> Json:
        """Store chunks as they are."""
        if body.method != "none":
            raise SelectionError(f"decompress stores chunks as they are, not by {body.method!r}; that is compress")
        return await self.compress(body)

    async def verify(self, body: VerifyBody) -> Json:
        """Read a tier that is a disk, and compare digests."""
        place = self._instances.tier(body.at, "at")
        return await self._one(place.instances[0], Verify(place.tier, body.remove, body.dry_run), body.wait_s)

    async def check_finish(self, body: JobBody) -> Json:
        """How a job is doing."""
        node, job = split_job(body.job)
        return await self._one(self._instances.get(node), Jobs(job), body.wait_s)

    async def cancel(self, body: JobBody) -> Json:
        """End a job."""
        node, job = split_job(body.job)
        return await self._one(self._instances.get(node), EndJob(job), body.wait_s)

    # ---- what they have in common ------------------------------------------------------------

    async def _selection(self, body: OfChunks | MoveBody) -> Selection:
        return (await self._prompts.choose(body)).selection

    async def _ask(self, instance: Instance, verb: Verb, wait_s: float) -> Outcome:
        self._instances.check_heard(instance)
        return await self._orders.ask(instance.name, verb, wait_s)

    async def _one(self, instance: Instance, verb: Verb, wait_s: float) -> Json:
        outcome = await self._ask(instance, verb, wait_s)
        if isinstance(outcome, Refused):
            raise VerbRefused(outcome.error, outcome.text)
        return {**shown(outcome, instance.name), "instance": instance.name}

    async def _at(self, place: Place, verb: Verb, wait_s: float) -> Json:
        return await self._several(place.instances, verb, wait_s, is_one=place.is_one)

    async def _named(self, names: Collection[str], verb: Verb, wait_s: float) -> Json:
        instances = self._instances.named(names)
        return await self._several(instances.values(), verb, wait_s, is_one=len(names) == 1)

    async def _several(self, instances: Collection[Instance], verb: Verb, wait_s: float, *, is_one: bool) -> Json:
        """An entry for each. `is_one`: the only one was named, and what is wrong with it is an error."""
        if is_one:
            (instance,) = instances
            outcome = await self._ask(instance, verb, wait_s)
            if isinstance(outcome, Refused):
                raise VerbRefused(outcome.error, outcome.text)
            return _entries({instance.name: shown(outcome, instance.name)})
        outcomes = await _together({each.name: self._ask(each, verb, wait_s) for each in instances})
        return _entries({name: shown(outcome, name) for name, outcome in outcomes.items()})


async def _together(asked: Mapping[str, Coroutine[None, None, Outcome]]) -> dict[str, Outcome]:
    """What each of them answers; what is wrong with one is a `Refused` in its place."""
    outcomes = await asyncio.gather(*map(_settled, asked.values()))
    return dict(zip(asked, outcomes, strict=True))


async def _settled(asked: Coroutine[None, None, Outcome]) -> Outcome:
    try:
        return await asked
    except PdxError as error:
        return Refused.of(error)


def _entries(entries: Json) -> Json:
    return {"instances": entries}


def _scaled(counts: Mapping[str, int], unit: int) -> dict[str, int]:
    return {tier: count * unit for tier, count in counts.items()}


def _address(instance: Instance) -> Json:
    report = instance.report
    listen, ip = report.listen if report is not None else "", ""
    with contextlib.suppress(ConfigError):
        ip = address_host(listen) if listen else ""
    engines = [engine.url for engine in report.engines] if report is not None else []
    return {"type": "Address", "ip": ip, "address": listen, "engines": engines}
