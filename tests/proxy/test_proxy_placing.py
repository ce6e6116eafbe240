"""Requests go where their cache is, as far as load allows; where it does not, the engine's node is told who has it."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from cache_stage import LAYOUT, SHAPE
from proxy_harness import CHAT, COMPLETIONS, cluster, until

from pdx.proxy import locating, placing
from pdx.proxy.config import Routing
from pdx.proxy.engines import Engine
from pdx.proxy.health import Record
from pdx.proxy.placing import Prompt, cost
from pdx.proxy.status import FRESH_S
from pdx.telemetry.rate import Rate
from pdx.wire.tokens import chunk_keys
from pdx.wire.verbs import Model

TOKENS = [number % 100 for number in range(4 * 32 + 5)]
KEYS = chunk_keys(Model("", "", LAYOUT, SHAPE), TOKENS)
IDS = {"prompt": TOKENS, "temperature": 0, "max_tokens": 4}


# ---- the rule --------------------------------------------------------------------------------


def at(node):
    return Engine(url=node, name=node, prefills=True, decodes=False, named=True, node=node)


def record(url="", **fields):
    """One that computes 10,000 tokens in a second and loads 100,000."""
    second = 1_000_000_000
    rates = {"computing": Rate(10_000, second, second), "loading": Rate(100_000, second, second)}
    return Record(url, 0.0, 0.0, **{**rates, **fields})


@pytest.mark.parametrize(
    ("fields", "hits", "wanted"),
    [
        ({}, {}, 200),  # 10,000 tokens computed, which counts twice, in ticks of 10 ms
        ({}, {"a": 10_000}, 10),
        ({}, {"b": 10_000}, 200),
        ({}, {"a": 5_000}, 105),
        ({"backlog": 2_000}, {"a": 10_000}, 30),
        ({"others": 1}, {"a": 10_000}, 15),  # a request counts like 500 tokens
        ({"in_flight": 3}, {"a": 10_000}, 25),
    ],
)
def test_by_prefix_an_engine_costs_the_seconds_until_it_has_the_prompt(fields, hits, wanted):
    assert cost(Routing.PREFIX, at("a"), record(**fields), Prompt(10_000, hits)) == wanted


@pytest.mark.parametrize(("common", "wanted"), [(15_000, 133), (30_000, 200), (0, 200)])
def test_an_engine_is_as_fast_as_the_others_unless_it_is_far_from_them(common, wanted):
    assert cost(Routing.PREFIX, at("a"), record(), Prompt(10_000, computing=common)) == wanted


def test_the_other_rules():
    busy, prompt = record("a", in_flight=3), Prompt(9, {"a": 9}, urls=frozenset({"a"}))
    assert cost(Routing.ROUND_ROBIN, at("a"), busy, prompt) == 0
    assert cost(Routing.LEAST_LOADED, at("a"), busy, prompt) == 3
    assert cost(Routing.SESSION, at("a"), busy, prompt) < cost(Routing.SESSION, at("b"), record("b"), prompt)
    much = record("a", in_flight=9)
    assert cost(Routing.SESSION, at("a"), much, prompt) > cost(Routing.SESSION, at("b"), record("b"), prompt)


# ---- the proxy -------------------------------------------------------------------------------


def _count_of(made, node):
    return sum(engine.node == node for engine in made.proxy.engines.all())


@asynccontextmanager
async def pairs(routing=Routing.PREFIX, **settings):
    """Two nodes with an engine of each role; the second one has all of the prompt but the last five tokens."""
    async with cluster(2, 2, named=False, routing=routing, heartbeat_timeout_s=600.0, **settings) as made:
        other = made.other_node("other")
        naming = (LAYOUT, SHAPE)
        for each, at in ((made.node, 0), (other, 1)):
            roles = (("prefill", made.prefills[at]), ("decode", made.decodes[at]))
            await each.report(*((one.name, role, one.url) for role, one in roles), naming=naming)
            await until(lambda name=each.name: _count_of(made, name) == 2)  # whose they are, the first one says
        await until(lambda: made.proxy.engines.node_names() == {"node", "other"})
        for engine in (*made.prefills, *made.decodes):
            await made.metric_reaches(1, "pdx_proxy_engine_ready", url=engine.url)
        if made.proxy.chunks is not None:
            made.proxy.chunks.index.add("other", "memory", b"".join(KEYS))
        yield made


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a machine that is busy with other things an answer may take long."""
    monkeypatch.setattr(locating, "FIND_S", 10.0)


def load(made, *urls, tokens=100, pace=1000):
    """As though these engines had so much to compute, at a known pace."""
    for engine in (*made.prefills, *made.decodes):
        found = made.proxy.engines.health.of(engine.url)
        found.computing = Rate(pace, 1_000_000_000, 1 << 62)
        found.loading = Rate(100_000, 1_000_000_000, 1 << 62)
        found.backlog = tokens if engine.url in urls else 0


async def served(made, body=IDS, **kwargs):
    """(the engine that prefilled it, its leg); of one engine alone: that."""
    before = [len(each.bodies) for each in made.prefills]
    status, headers, _ = await made.post(COMPLETIONS, body, **kwargs)
    assert status == 200
    at = next((at for at, each in enumerate(made.prefills) if len(each.bodies) > before[at]), None)
    return (None, headers["x-pdx-mode"]) if at is None else (at, made.prefills[at].bodies[-1]["kv_transfer_params"])


async def test_a_request_goes_where_its_prefix_is():
    async with pairs() as made:
        for _ in range(3):
            load(made)
            at, params = await served(made)
            assert (at, "prefix_node" in params) == (1, False)


async def test_where_load_wins_the_node_that_has_it_is_named(monkeypatch):
    async with pairs() as made:
        for more, most_ids, named in (
            ({}, 1 << 20, "other"),
            ({}, 100, None),  # so many ids are not read
            ({"cache_salt": "s"}, 1 << 20, None),  # has other chunks
            ({"truncate_prompt_tokens": 100}, 1 << 20, None),  # as what the engine cuts has
        ):
            monkeypatch.setattr(locating, "MOST_IDS", most_ids)
            load(made, made.prefills[1].url, tokens=10_000)
            at, params = await served(made, {**IDS, **more})
            assert (at, params.get("prefix_node")) == (0, named), more


async def test_a_text_is_made_tokens_by_an_engine_with_the_clients_key():
    async with pairs() as made:
        for engine in (*made.prefills, *made.decodes):
            engine.tokens = TOKENS
        load(made)
        body = {"prompt": "beta", "temperature": 0, "max_tokens": 4}
        at, _ = await served(made, body, headers={"Authorization": "Bearer k"})
        (asked,) = [each for engine in (*made.prefills, *made.decodes) for each in engine.tokenized]
        assert at == 1
        assert asked[0] == {"prompt": "beta"}
        assert asked[1]["Authorization"] == "Bearer k"


async def test_without_tokens_in_time_a_request_is_placed_by_load(monkeypatch):
    async with pairs() as made:
        for engine in (*made.prefills, *made.decodes):
            engine.tokens = None
        load(made, made.prefills[1].url)
        at, params = await served(made, {"prompt": "beta", "temperature": 0, "max_tokens": 4})
        assert (at, "prefix_node" in params) == (0, False)
        assert made.proxy.env.counters["placed_without_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", {"input": "beta"}), (CHAT, {"messages": [], "documents": []})]
)
async def test_who_could_not_be_placed_by_tokens_is_counted(path, body):
    async with pairs() as made:
        await made.post(path, body)
        assert made.proxy.env.counters["placed_without_tokens"] == 1


async def test_a_decoder_that_has_the_prompt_does_without_a_prefill_engine():
    async with pairs(min_split_tokens=16) as made:
        load(made)
        assert await served(made) == (None, "alone")
        assert (len(made.decodes[0].bodies), len(made.decodes[1].bodies)) == (0, 1)
        at, _ = await served(made, {**IDS, "prompt": [*TOKENS, *range(32)]})
        assert at == 1, "more than that is missing"


@pytest.mark.parametrize("routing", [Routing.SESSION, Routing.PREFIX])
async def test_a_session_stays_where_its_last_turn_was(routing):
    async with pairs(routing) as made:
        long = {"prompt": "beta " * 12, "max_tokens": 4}
        for engine in (*made.prefills, *made.decodes):
            engine.tokens = None
        first, _ = await served(made, long, headers={"X-Session-ID": "s"})
        for _ in range(3):
            load(made, pace=10)
            found, _ = await served(made, long, headers={"X-Session-ID": "s"})
            assert found == first
        others = set()
        for _ in range(4):
            load(made, pace=10)
            others.add((await served(made, long))[0])
        assert others == {0, 1}, "other requests take turns"


async def test_a_prompt_that_is_being_computed_counts_as_there(monkeypatch):
    """Of many requests with one prompt that come at once, all but the first one go where that is."""
    monkeypatch.setattr(placing, "REQUEST_TOKENS", 0)  # the prompt is short
    async with pairs() as made:
        for engine in (*made.prefills, *made.decodes):
            engine.fault = "hold"
        load(made, tokens=0)
        new = {**IDS, "prompt": [*range(50, 100), *TOKENS]}
        asking = [asyncio.create_task(made.post(COMPLETIONS, new)) for _ in range(4)]
        await until(lambda: sum(len(each.bodies) for each in made.prefills) == 4)
        assert sorted(len(each.bodies) for each in made.prefills) == [0, 4]
        for engine in (*made.prefills, *made.decodes):
            engine.released.set()
        await asyncio.gather(*asking)
        at = max((0, 1), key=lambda at: len(made.prefills[at].bodies))
        load(made, made.prefills[at].url)
        assert (await served(made, new))[0] != at, "it is computed, and no node has told of it"


# ---- what clients and engines may send -------------------------------------------------------


async def test_a_prompt_without_keys_is_served():
    kind = {"Content-Type": "application/json"}
    async with pairs() as made:
        for engine in (*made.prefills, *made.decodes):
            engine.tokens = [1, 2]
        for said in (
            b'"prompt":[1,2,3]',  # fills no chunk
            b'"prompt":"beta"',
            b'"prompt":[%s],"cache_salt":"\xed\xa0\x80"' % b",".join([b"1"] * 64),  # half of a surrogate pair
            b'"prompt":[%s],"cache_salt":[1]' % b",".join([b"1"] * 64),
            b'"prompt":[%s]' % b",".join([b"9" * 30] * 64),
            b'"prompt":"beta","model":"\\ud800"',
        ):
            raw = b'{"temperature":0,"max_tokens":4,%s}' % said
            async with made.client.post(made.url + COMPLETIONS, data=raw, headers=kind) as response:
                assert response.status == (404 if b"model" in said else 200), await response.read()


async def test_an_engine_that_makes_no_tokens_is_not_asked_again_and_again():
    async with pairs() as made:
        for engine in (*made.prefills, *made.decodes):
            engine.tokens = TOKENS if engine is made.decodes[1] else None
        for _ in range(8):
            load(made)
            await served(made, {"prompt": "beta", "temperature": 0, "max_tokens": 4})
        assert made.proxy.env.counters["placed_without_tokens"] == 3


@pytest.mark.parametrize(
    ("more", "status", "is_known"),
    [({}, 200, True), ({"min_tokens": 9}, 400, False), ({"truncate_prompt_tokens": 9}, 200, False)],
)
async def test_the_pace_is_of_prompts_that_were_computed(more, status, is_known):
    """A refusal comes at once: by it an engine would seem to have computed millions of tokens in a second."""
    async with pairs() as made:
        answer, *_ = await made.post(COMPLETIONS, {**IDS, "prompt": [1] * 64, "stream": True, **more})
        assert answer == status
        assert any(engine.tokens_s for engine in (await made.overview()).engines) == is_known


async def test_engines_are_asked_for_no_tokens_that_would_be_other_ones_or_cost_a_look_at_a_picture():
    """vLLM's /tokenize has neither documents nor a reasoning effort, which chat templates write into the prompt."""
    async with pairs() as made:
        load(made)
        parts = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
        others = ({"reasoning_effort": "high"}, {"documents": [{"text": "x"}]})
        for content, more in (("hello", {}), (parts, {}), *(("hello", other) for other in others)):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}
            assert (await made.post(CHAT, body))[0] == 200
        (asked,) = [each for engine in (*made.prefills, *made.decodes) for each in engine.tokenized]
        assert asked[0]["messages"][0]["content"] == "hello"


@pytest.mark.parametrize("leaves", [False, True])
async def test_no_prompt_is_estimated_longer_than_engines_take_and_backlogs_end_with_their_legs(leaves):
    async with pairs() as made:
        for engine in (*made.prefills, *made.decodes):
            engine.fault, engine.tokens = "hold", None
        load(made)
        body = {"messages": [{"role": "user", "content": "x" * 100_000}], "max_tokens": 4}
        asking = asyncio.create_task(made.post(CHAT, body))
        await until(lambda: any(each.bodies for each in made.prefills))
        assert {0, made.prefill.server.model_len} == {each.backlog_tokens for each in (await made.overview()).engines}
        if leaves:
            asking.cancel()
        else:
            made.release()
        await asyncio.wait([asking])
        await until(lambda: not made.proxy.drain.load)
        made.pass_time(FRESH_S)
        assert {each.backlog_tokens for each in (await made.overview()).engines} == {0}


async def test_an_adapter_has_other_chunks_than_its_model():
    """Else a decoder would compute for itself all that another one's node has of the model."""
    async with pairs(min_split_tokens=16) as made:
        engines = [*made.prefills, *made.decodes]
        for engine in engines:
            engine.models_served, engine.adapters = ["hash", "tuned"], {"tuned"}
        assert (await made.get("/v1/models"))[0] == 200  # which has all of them asked
        load(made, made.prefills[1].url)
        assert await served(made, {**IDS, "model": "hash"}) == (None, "alone")
        at, params = await served(made, {**IDS, "model": "tuned"})
        assert (at, "prefix_node" in params) == (0, False)
