"""Verbs of controllers over HTTP: to which nodes they go, and what is made of the answers."""

from __future__ import annotations

import asyncio

import pytest
from cache_stage import KEY, LAYOUT, SHAPE, refused, stage
from proxy_harness import run, until

from pdx.proxy.hints import digest
from pdx.wire.hints import Hints, Verdict, tenant
from pdx.wire.messages import Advise, Advised, Explained, Why
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import (
    Clear,
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
    Move,
    PinIn,
    Recode,
    Selection,
    Verify,
)

KEYS = Selection([bytes.fromhex(KEY)], 2)
SAID = {"keys": [KEY], "shards": 2}
RUNNING = JobStatus("3f-7", "move", "running", 4)


def test_a_lookup_asks_all_nodes_and_tells_tokens_by_node_and_tier(tmp_path):
    async def main():
        async with stage(tmp_path, "a", "b") as made:
            await made.nodes["a"].report(("engine", "http://127.0.0.1:9"))
            await made.nodes["b"].report()
            made.nodes["a"].answers = lambda _: Found(3, 2, {"memory": 1, "disk": 2}, pinned={"memory": 1})
            made.nodes["b"].answers = lambda _: Found(3, 0, {"memory": 0})
            tokens = [number % 100 for number in range(3 * 32 + 5)]
            await until_told(made)
            told = await made.ok("lookup", tokens=tokens, salt="s")
            assert told["instances"] == {"a": {"memory": 32, "disk": 64}, "b": {"memory": 0}}
            assert told["hits"] == {"a": 64, "b": 0}
            assert told["pinned"] == {"a": {"memory": 32}}
            assert (told["chunks"], told["tokens"], told["unit"], told["source"]) == (3, 96, "tokens", "nodes")
            keys = chunk_keys(Model("engine", "", LAYOUT, SHAPE), tokens, "s")
            assert len(keys) == 3
            for node in made.nodes.values():
                assert node.verbs == [Find(Selection(keys, 2))]

    run(main)


async def until_told(made):
    """Until some engine has told how it names chunks."""
    async with asyncio.timeout(10):
        while not any(each["models"] for each in (await made.ok("models"))["instances"].values()):
            await asyncio.sleep(0.005)


def test_a_node_that_is_silent_has_an_entry_that_says_so_and_the_others_are_answered(tmp_path):
    async def main():
        async with stage(tmp_path, "a", "b", "c") as made:
            made.nodes["b"].answers = lambda _: None
            made.nodes["c"].answers = lambda _: refused("TierUnknown", "no such tier")
            told = await made.ok("lookup", **SAID, wait_s=0.2)
            assert told["instances"] == {"a": {"memory": 1}}
            assert told["unit"] == "chunks"
            assert told["errors"]["b"]["type"] == "NodeUnavailable"
            assert told["errors"]["c"] == {"type": "TierUnknown", "message": "no such tier"}
            listed = await made.ok("ls", wait_s=0.2)
            assert listed["instances"]["b"]["error"] == "NodeUnavailable"
            assert listed["instances"]["a"]["error"] == "ProtocolError", "that was no Listing"

    run(main)


def test_tiers_that_have_not_answered_are_asked_again(tmp_path):
    async def main():
        async with stage(tmp_path, "a") as made:
            node = made.nodes["a"]
            node.answers = lambda _: Found(1, 0, {}, asking=["remote"] if len(node.orders) < 3 else [])
            told = await made.ok("lookup", **SAID)
            assert (len(node.orders), told["asking"]) == (3, {})
            node.answers = lambda _: Found(1, 0, {}, asking=["remote"])
            told = await made.ok("lookup", **SAID, wait_s=0.2)
            assert told["asking"] == {"a": ["remote"]}

    run(main)


def test_an_index_that_is_complete_is_asked_instead_of_the_nodes(tmp_path):
    async def main():
        async with stage(tmp_path, "a", "b") as made:
            verbs = made.made.proxy._cache._verbs
            known = {"a": {"any": 2, "memory": 1, "disk": 2}}
            verbs._index = lambda keys: (known if keys == KEYS.keys else {}, True)
            told = await made.ok("lookup", **SAID)
            assert told["instances"] == {"a": {"memory": 1, "disk": 2}, "b": {}}
            assert (told["hits"], told["source"]) == ({"a": 2, "b": 0}, "index")
            assert made.nodes["a"].verbs == []
            told = made.made.proxy._cache._instances.problem
            made.made.proxy._cache._instances.problem = lambda each: "is silent" if each.name == "b" else told(each)
            silent = {"b": {"type": "NodeUnavailable", "message": "node 'b' is silent"}}
            assert (await made.ok("lookup", **SAID))["errors"] == silent
            made.made.proxy._cache._instances.problem = told
            assert (await made.ok("lookup", **SAID, ask=True))["source"] == "nodes"
            verbs._index = lambda _: (known, False)
            assert (await made.ok("lookup", **SAID))["source"] == "nodes"
            assert (await made.ok("lookup", request="r"))["source"] == "nodes"
            assert len(made.nodes["a"].verbs) == 3

    run(main)


@pytest.mark.parametrize(
    ("verb", "body", "order", "answer"),
    [
        (
            "move",
            {**SAID, "source": "a/memory", "target": "b/disk x", "keeps": True},
            Move(KEYS, "memory", "disk x", "b", keeps=True),
            RUNNING,
        ),
        ("move", {**SAID, "source": "a/memory", "target": "a/disk"}, Move(KEYS, "memory", "disk"), RUNNING),
        ("clear", {**SAID, "at": "a/memory", "dry_run": True}, Clear(KEYS, "memory", dry_run=True), Effect([])),
        ("clear", {"at": "a", "everything": True}, Clear(Selection(), everything=True), Effect([])),
        ("clear", {"at": "a", "request": "r"}, Clear(Selection(request="r")), Effect([])),
        ("pin", {**SAID, "at": "a/memory"}, PinIn(KEYS, "memory"), Effect([Kept("memory", 1, 2)])),
        ("unpin", {**SAID, "at": "a"}, PinIn(KEYS, pinned=False), Effect([])),
        ("compress", {**SAID, "at": "a/disk", "method": "fp8"}, Recode(KEYS, "disk", "fp8"), RUNNING),
        (
            "compress",
            {**SAID, "at": "a/disk", "method": "fp8", "new_keys": [KEY]},
            Recode(KEYS, "disk", "fp8", KEYS.keys),
            RUNNING,
        ),
        ("decompress", {**SAID, "at": "a/disk"}, Recode(KEYS, "disk", "none"), RUNNING),
        ("evict", {"at": "a/memory", "below": 3, "nbytes": 9}, Evict(3, 9, "memory"), Effect([], dry_run=False)),
        ("verify", {"at": "a/disk", "remove": True}, Verify("disk", remove=True), RUNNING),
        ("ls", {"instances": ["a"], "session": "s", "model": "m"}, List("s", "m"), Listing([], [])),
        ("why", {"instances": ["a"], "request": "r"}, Why("r"), Explained([], 3)),
        ("jobs", {"instances": ["a"]}, Jobs(), JobList([RUNNING])),
        ("check_finish", {"job": "a:3f-7"}, Jobs("3f-7"), RUNNING),
        ("cancel", {"job": "a:3f-7"}, EndJob("3f-7"), RUNNING),
    ],
)
def test_each_verb_goes_to_the_node_it_names(tmp_path, verb, body, order, answer):
    async def main():
        async with stage(tmp_path, "a", "b") as made:
            made.nodes["a"].answers = lambda _: answer
            told = await made.ok(verb, **body)
            assert made.nodes["a"].verbs == [order]
            assert made.nodes["b"].verbs == []
            if isinstance(answer, JobStatus):
                assert (told["job"], told["state"], told["instance"]) == ("a:3f-7", "running", "a")
                assert (told["type"], told["chunks"]) == ("JobStatus", 4)
            else:
                (entry,) = told["instances"].values()
                assert entry["type"] == type(answer).__name__
                assert "a:3f-7" in str(entry) or verb != "jobs"

    run(main)


def test_a_star_is_all_nodes(tmp_path):
    async def main():
        async with stage(tmp_path, "a", "b") as made:
            made.nodes["a"].answers = lambda _: Effect([Kept("memory", 1, 2)])
            made.nodes["b"].answers = lambda _: refused("TierUnknown")
            told = await made.ok("clear", **SAID, at="*/memory")
            assert told["instances"] == {
                "a": {"type": "Effect", "tiers": [{"name": "memory", "chunks": 1, "nbytes": 2}], "dry_run": False},
                "b": {"type": "Refused", "error": "TierUnknown", "text": "why"},
            }
            assert made.nodes["b"].verbs == [Clear(KEYS, "memory")]

    run(main)


def test_addresses_health_and_models_are_told_from_reports(tmp_path):
    async def main():
        async with stage(tmp_path, "a", "b") as made:
            await made.nodes["a"].report(("e", "http://127.0.0.1:9"), listen="tcp://127.0.0.1:7700", epoch=255)
            await until_told(made)
            told = await made.ok("query_ip", instances=["a"])
            assert told["instances"]["a"] == {
                "type": "Address",
                "ip": "127.0.0.1",
                "address": "tcp://127.0.0.1:7700",
                "engines": ["http://127.0.0.1:9"],
            }
            models = await made.ok("models")
            assert models["instances"]["a"]["models"] == [
                {"engine": "e", "url": "http://127.0.0.1:9", "layout": LAYOUT.hex(), "shape": SHAPE}
            ]
            assert models["instances"]["b"]["models"] == []
            made.nodes["a"].answers = made.nodes["b"].answers = lambda _: refused("NodeError", "ill")
            health = (await made.ok("health"))["instances"]["a"]
            assert (health["reachable"], health["why"], health["epoch"]) == (False, "ill", "ff")
            assert 0 <= health["age_s"] < 60

    run(main)


def test_a_node_that_was_started_again_fails_what_it_was_told_at_once(tmp_path):
    async def main():
        async with stage(tmp_path, "a") as made:
            node = made.nodes["a"]
            node.answers = lambda _: None
            asked = asyncio.create_task(made.error("check_finish", job="a:3f-7", wait_s=60))
            await until(lambda: node.orders)
            await node.report(epoch=99)
            status, kind, text = await asked
            assert (status, kind) == (504, "NodeUnavailable")
            assert "was started again" in text

    run(main)


def test_a_node_that_has_not_been_heard_of_is_not_asked(tmp_path):
    async def main():
        async with stage(tmp_path, "a", heartbeat_timeout_s=0.2) as made:
            async with asyncio.timeout(10):
                while (await made.post("ls", {"instances": ["a"], "wait_s": 60}))[0] != 504:
                    await made.nodes["a"].reply(0, refused("NodeError"))
            status, kind, text = await made.error("move", **SAID, source="a/memory", target="a/disk", wait_s=60)
            assert (status, kind) == (504, "NodeUnavailable")
            assert "has not been heard of" in text

    run(main)


def test_answers_late_twice_misplaced_or_of_another_type_are_dropped_and_counted(tmp_path):
    async def main():
        async with stage(tmp_path, "a", "b") as made:
            a, b = made.nodes.values()
            a.answers = lambda _: None
            asked = asyncio.create_task(made.ok("check_finish", job="a:3f-7", wait_s=60))
            await until(lambda: a.orders)
            number = a.orders[0].number
            await b.reply(number, RUNNING)
            await until(lambda: made.counters["replies_misplaced"] == 1)
            await a.reply(number, RUNNING)
            assert (await asked)["job"] == "a:3f-7"
            await a.reply(number, RUNNING)
            await a.reply(number + 1000, RUNNING)
            await until(lambda: made.counters["replies_late"] == 2)
            a.answers = lambda _: Effect([])
            status, kind, _ = await made.error("check_finish", job="a:3f-7")
            assert (status, kind) == (502, "ProtocolError")
            assert made.counters["replies_wrong"] == 1
            assert len(made.made.proxy._cache._orders) == 0

    run(main)


def test_a_text_is_made_tokens_by_an_engine_without_the_controllers_token(tmp_path):
    async def main():
        async with stage(tmp_path, "a", prefills=1) as made:
            engine = made.made.prefill
            await made.nodes["a"].report(("e", engine.url))
            await until_told(made)
            engine.tokens = list(range(70))
            told = await made.ok("lookup", text="a text")
            assert told["tokens"] == 64
            (find,) = made.nodes["a"].verbs
            assert find.what.keys == chunk_keys(Model("e", "", LAYOUT, SHAPE), list(range(70)))
            body, headers = engine.tokenized[-1]
            assert body == {"prompt": "a text"}
            assert "Authorization" not in headers
            await made.ok("lookup", messages=[{"role": "user", "content": "x"}])
            assert engine.tokenized[-1][0] == {"messages": [{"role": "user", "content": "x"}]}
            engine.tokens = None
            status, kind, text = await made.error("lookup", text="a text")
            assert (status, kind) == (503, "NoEngine")
            assert "give token ids" in text

    run(main)


ADVICE = {"version": 1, "session": "mine", "prefetch": True, "lease_s": 5}


def test_advice_about_a_session_goes_to_all_nodes_and_each_answers(tmp_path):
    async def main():
        async with stage(tmp_path, "a", "b") as made:
            accepted, no = Verdict("prefetch", "accepted"), Verdict("lease_s", "refused", "no room")
            made.nodes["a"].answers = lambda _: Advised([accepted, no])
            made.nodes["b"].answers = lambda _: None
            told = (await made.ok("advise", hints=ADVICE, cache_salt="s", wait_s=0.2))["instances"]
            (advise,) = made.nodes["a"].verbs
            assert advise == Advise(Hints(digest("mine"), salt=tenant("s"), lease_s=5.0, prefetch=[""]))
            assert made.nodes["b"].verbs == [advise]
            session = "refused: no node has answered to it"
            fields = {"session": session, "prefetch": "accepted", "lease_s": "refused: no room"}
            assert told["a"] == {"type": "Advised", "fields": fields}
            assert told["b"]["error"] == "NodeUnavailable"
            await made.ok("advise", hints={"version": 1, "session": "mine"}, instances=["a"])
            assert len(made.nodes["a"].verbs) == 2
            assert len(made.nodes["b"].verbs) == 1

    run(main)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"hints": {"version": 1}}, "name no session"),
        ({"hints": {"session": "s"}}, "say which version"),
        ({"hints": [1]}, "are refused"),
        ({"hints": {"version": 1, "session": ["s"]}}, "name no session"),
        ({"hints": {"version": 1, "session": "s", "x": "y" * (16 << 10)}}, "more than 16384 bytes"),
        ({"hints": ADVICE, "cache_salt": 5}, "Expected `str`"),
        ({}, "required field `hints`"),
    ],
)
def test_advice_that_makes_no_sense_is_refused(tmp_path, body, said):
    async def main():
        async with stage(tmp_path, "a") as made:
            status, _, text = await made.error("advise", **body)
            assert (status, said in text) == (400, True), text
            assert made.nodes["a"].verbs == []

    run(main)
