"""Verbs of controllers over HTTP: to which nodes they go, and what is made of the answers."""

from __future__ import annotations

import asyncio
import base64

from cache_stage import KEY, LAYOUT, SHAPE, refused, stage
from proxy_harness import put_ahead, until

from pdx.proxy.hints import digest
from pdx.wire.hints import Hints, Verdict, tenant
from pdx.wire.proxy import Run
from pdx.wire.status import Explained, NodeStatus
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import (
    VERBS,
    Advise,
    Advised,
    CheckFinish,
    Clear,
    Drain,
    Drained,
    Effect,
    EndJob,
    Evict,
    Find,
    Found,
    JobList,
    Jobs,
    JobStatus,
    Kept,
    List,
    Listing,
    Model,
    ModelList,
    Models,
    Move,
    PinIn,
    Prefetch,
    Recode,
    Selection,
    Status,
    Why,
)

KEYS = Selection([bytes.fromhex(KEY)], 2)
SAID = {"what": {"keys": [KEY], "shards": 2}}
RUNNING = JobStatus("a:3f-7", "move", "running", 4)
WELL = NodeStatus("a", 255, 1, 1.0, 1, 1, {}, {}, 0, 0, 0, [], {})
ENVELOPE = {"version": 1, "session": "mine", "prefetch": True, "lease_s": 5, "cache_salt": "s"}
ADVICE = {"hints": ENVELOPE, "keys": [base64.b64encode(bytes.fromhex(KEY)).decode()], "shards": 2}
# What is said, of which nodes (a and b, b is never asked), the verb that a is told, and an answer of its.
CASES = [
    ("lookup", SAID, Find(KEYS), Found(3, 2, {"memory": 1, "disk": 2}, {"memory": 1}, [], 9, 32)),
    (
        "move",
        {**SAID, "source": "memory", "target": "disk x", "target_node": "b", "keeps": True},
        Move(KEYS, "memory", "disk x", "b", keeps=True),
        RUNNING,
    ),
    ("move", {**SAID, "source": "memory", "target": "disk"}, Move(KEYS, "memory", "disk"), RUNNING),
    ("prefetch", {**SAID, "to": "gpu"}, Prefetch(KEYS, "gpu"), Effect([Kept("gpu", 2, 4)])),
    ("clear", {**SAID, "tier": "memory", "dry_run": True}, Clear(KEYS, "memory", dry_run=True), Effect([], True)),
    ("clear", {"everything": True}, Clear(Selection(), everything=True), RUNNING),
    ("clear", {"what": {"request": "r"}}, Clear(Selection(request="r")), Effect([])),
    ("pin", {**SAID, "tier": "memory"}, PinIn(KEYS, "memory"), Effect([Kept("memory", 1, 2)])),
    ("pin", {**SAID, "pinned": False}, PinIn(KEYS, pinned=False), Effect([])),
    ("compress", {**SAID, "tier": "disk", "codec": "lossless"}, Recode(KEYS, "disk", "lossless"), RUNNING),
    ("evict", {"below": 3, "nbytes": 9, "tier": "memory"}, Evict(3, 9, "memory"), Effect([])),
    ("ls", {"session": "s", "model": "m"}, List("s", "m"), Listing([Kept("m", 1, 2)], [], 3)),
    ("jobs", {}, Jobs(), JobList([RUNNING])),
    ("check_finish", {"job": "a:3f-7"}, CheckFinish("a:3f-7"), RUNNING),
    ("cancel", {"job": "a:3f-7"}, EndJob("a:3f-7"), RUNNING),
    ("drain", {"engine": "http://h", "draining": False}, Drain("http://h", draining=False), Drained("e", 3, False)),
    ("models", {}, Models(), ModelList([Model("e", "http://h", LAYOUT, SHAPE)])),
    ("health", {}, Status(), WELL),
    ("why", {"request": "r"}, Why("r"), Explained([], 3)),
    (
        "advise",
        ADVICE,
        Advise(Hints(digest("mine"), salt=tenant("s"), lease_s=5.0, prefetch=[""]), KEYS.keys, 2),
        Advised([Verdict("prefetch", "accepted")]),
    ),
]


def test_every_verb_is_among_the_cases():
    assert {verb for verb, *_ in CASES} == set(VERBS)
    assert {kind for *_, kind, _ in CASES for kind in type(kind).answers} >= {type(answer) for *_, answer in CASES}


async def test_each_verb_goes_to_the_node_that_is_named(two):
    a, b = two.nodes.values()
    for verb, body, order, answer in CASES:
        a.orders.clear()
        a.answers = lambda _, answer=answer: answer
        told = await two.ok(verb, node="a", **body)
        assert (a.verbs, b.verbs) == ([order], [])
        (entry,) = told["nodes"].values()
        assert (list(told["nodes"]), told["errors"], entry["type"]) == (["a"], {}, type(answer).__name__)
        if isinstance(answer, JobStatus):
            assert (entry["job"], entry["state"], entry["chunks"]) == ("a:3f-7", "running", 4)
        if isinstance(answer, Found):
            counts = {"chunks": 3, "hits": 2, "tiers": {"memory": 1, "disk": 2}, "pinned": {"memory": 1}}
            more = {"asking": [], "nbytes": 9, "chunk_tokens": 32, "by_index": False}
            assert entry == {"type": "Found", **counts, **more}
        if verb == "advise":
            verdicts = [(each["field"], each["outcome"]) for each in entry["verdicts"]]
            assert verdicts == [("session", "refused"), ("prefetch", "accepted"), ("lease_s", "refused")]


async def test_only_what_looks_goes_to_all_nodes_where_none_is_named(two):
    a, b = two.nodes.values()
    b.answers = lambda _: refused("TierUnknown", "no such tier")
    for verb, body, order, answer in CASES:
        kind = VERBS[verb]
        b.orders.clear()
        a.answers = lambda _, answer=answer: answer
        status, told = await two.post(verb, body)
        if verb in ("check_finish", "cancel"):
            assert (status, list(told["nodes"])) == (200, ["a"]), "a job's name says where it is"
            continue
        assert status == (200 if kind.only_looks() else 400), verb
        status, told = await two.post(verb, body, node="*")
        if kind.is_of_one_node():
            assert (status, told["error"]["message"]) == (400, "a job is of one node: name it")
            continue
        errors = {"b": {"type": "TierUnknown", "message": "no such tier"}}
        assert (list(told["nodes"]), told["errors"]) == (["a"], errors)
        assert set(map(str, b.verbs)) == {str(order)}


async def test_a_lookup_by_tokens_names_the_keys_that_the_engine_makes(one):
    await one.reported("a", ("engine", "http://127.0.0.1:9"))
    tokens = [number % 100 for number in range(3 * 32 + 5)]
    await one.ok("lookup", what={"tokens": tokens, "salt": "s"})
    keys = chunk_keys(Model("engine", "", LAYOUT, SHAPE), tokens, "s")
    assert (len(keys), one.nodes["a"].verbs) == (3, [Find(Selection(keys, 2, chunk_tokens=32))])


async def test_a_job_is_of_its_node_whatever_the_query_says(two):
    two.nodes["a"].answers = lambda _: refused("JobUnknown", "no such job")
    for nodes in ((), "a", "b", "*"):
        for verb in ("cancel", "check_finish"):
            assert await two.error(verb, node=nodes, job="a:1-1") == (404, "JobUnknown", "no such job")


async def test_tiers_that_have_not_answered_are_asked_again(one):
    node = one.nodes["a"]
    node.answers = lambda _: Found(1, 0, {}, asking=["remote"] if len(node.orders) < 3 else [])
    told = await one.answers("lookup", **SAID)
    assert (len(node.orders), told["a"]["asking"]) == (3, [])
    node.answers = lambda _: Found(1, 0, {}, asking=["remote"])
    asked = asyncio.create_task(one.answers("lookup", **SAID, wait_s=5))
    await until(lambda: len(node.orders) > 4)
    put_ahead(5)
    assert (await asked)["a"]["asking"] == ["remote"]


async def test_a_node_that_is_silent_has_an_error_and_the_others_are_answered(two):
    a, b = two.nodes.values()
    b.answers = lambda _: None

    async def answered(verb, body=None, asks=(a, b), **how):
        """When of the nodes that are asked only b has not answered."""
        seen = sum(len(each.orders) for each in asks)
        asked = asyncio.create_task(two.post(verb, body, wait_s=5, **how))
        await until(lambda: sum(len(each.orders) for each in asks) == seen + len(asks))
        await two.reported("a")
        put_ahead(5)
        return await asked

    status, told = await answered("lookup", SAID)
    assert (status, list(told["nodes"]), told["errors"]["b"]["type"]) == (200, ["a"], "NodeUnavailable")
    status, told = await answered("lookup", SAID, asks=[b], node="b")
    assert (status, told["error"]["type"]) == (504, "NodeUnavailable"), "it alone was named"
    _, listed = await answered("ls")
    assert listed["errors"]["a"]["type"] == "ProtocolError", "that was no Listing"


async def test_of_all_nodes_one_that_refuses_has_an_error_also_where_it_is_the_only_one(one):
    one.nodes["a"].answers = lambda _: refused("TierUnknown", "no such tier")
    for nodes in ((), "*"):
        told = await one.ok("lookup", **SAID, node=nodes)
        assert told == {"nodes": {}, "errors": {"a": {"type": "TierUnknown", "message": "no such tier"}}}


async def test_an_index_that_is_complete_is_asked_instead_of_the_nodes(tmp_path):
    async with stage(tmp_path, "a", "b", chunk_index=True) as two:
        a, b = two.nodes.values()
        keys = [KEY, "cd" * 16]
        said = {"what": {"keys": keys}}
        a.has = [Run("memory", True, bytes.fromhex(KEY)), Run("disk", True, bytes.fromhex("".join(keys)))]
        b.has = []
        for name in "ab":
            await two.reported(name)
        await until(lambda: two.made.proxy.chunks.is_complete)
        told = await two.answers("lookup", **said)
        assert [(each["tiers"], each["hits"], each["by_index"]) for each in told.values()] == [
            ({"memory": 1, "disk": 2}, 2, True),
            ({}, 0, True),
        ]
        assert a.verbs == []
        assert not (await two.answers("lookup", **said, ask=True))["a"]["by_index"]
        assert not (await two.answers("lookup", what={"request": "r"}))["a"]["by_index"]
        two.made.pass_time(601)
        await until(lambda: len(two.made.proxy.chunks.index) == 0)
        await two.reported("a")
        await until(lambda: two.made.proxy.chunks.is_complete)
        found = await two.ok("lookup", **said)
        assert (found["nodes"]["a"]["by_index"], found["errors"]["b"]["type"]) == (True, "NodeUnavailable")
        b.has = None
        await two.reported("b")
        assert not (await two.answers("lookup", **said))["a"]["by_index"], "not all of b's is known"
        assert len(a.verbs) == 3


async def test_a_node_that_was_started_again_fails_what_it_was_told_at_once(one):
    node = one.nodes["a"]
    node.answers = lambda _: None
    asked = asyncio.create_task(one.error("check_finish", job="a:3f-7", wait_s=60))
    await until(lambda: node.orders)
    await node.report(epoch=99)
    status, kind, text = await asked
    assert (status, kind) == (504, "NodeUnavailable")
    assert "was started again" in text


async def test_a_node_that_has_not_been_heard_of_is_not_asked(one):
    one.made.pass_time(601.0)
    await one.nodes["a"].reply(0, refused("NodeError"))  # which is no report
    status, kind, text = await one.error("move", node="a", **SAID, source="memory", target="disk", wait_s=60)
    assert (status, kind) == (504, "NodeUnavailable")
    assert "has not been heard of" in text
    assert one.nodes["a"].verbs == []


async def test_answers_late_twice_misplaced_or_of_another_type_are_dropped_and_counted(two):
    a, b = two.nodes.values()
    a.answers = lambda _: None
    asked = asyncio.create_task(two.answers("check_finish", job="a:3f-7", wait_s=60))
    await until(lambda: a.orders)
    number = a.orders[0].number
    await b.reply(number, RUNNING)
    await until(lambda: two.counters["replies_misplaced"] == 1)
    await a.reply(number, RUNNING)
    assert (await asked)["a"]["job"] == "a:3f-7"
    await a.reply(number, RUNNING)
    await a.reply(number + 1000, RUNNING)
    await until(lambda: two.counters["replies_late"] == 2)
    a.answers = lambda _: Effect([])
    status, kind, _ = await two.error("check_finish", job="a:3f-7")
    assert (status, kind) == (502, "ProtocolError")
    assert two.counters["replies_wrong"] == 1


async def test_a_text_is_made_tokens_by_an_engine_without_the_controllers_token(tmp_path):
    async with stage(tmp_path, "a", prefills=1) as made:
        engine = made.made.prefill
        await made.reported("a", ("e", engine.url))
        engine.tokens = list(range(70))
        await made.ok("lookup", what={"text": "a text"})
        (find,) = made.nodes["a"].verbs
        assert find.what.keys == chunk_keys(Model("e", "", LAYOUT, SHAPE), list(range(70)))
        body, headers = engine.tokenized[-1]
        assert body == {"prompt": "a text"}
        assert "Authorization" not in headers
        await made.ok("lookup", what={"messages": [{"role": "user", "content": "x"}]})
        assert engine.tokenized[-1][0] == {"messages": [{"role": "user", "content": "x"}]}
        engine.tokens = None
        status, kind, text = await made.error("lookup", what={"text": "a text"})
        assert (status, kind) == (503, "NoEngine")
        assert "give token ids" in text


async def test_advice_that_makes_no_sense_is_refused(one):
    for hints, said in (
        ({"version": 1}, "name no session"),
        ({"session": "s"}, "say which version"),
        ([1], "are refused"),
        ({"version": 1, "session": ["s"]}, "name no session"),
        ({"version": 1, "session": "s", "x": "y" * (16 << 10)}, "more than 16384 bytes"),
        ({**ENVELOPE, "cache_salt": 5}, "cache_salt of the hints is no text"),
    ):
        status, _, text = await one.error("advise", hints=hints)
        assert (status, said in text) == (400, True), text
    assert one.nodes["a"].verbs == []
