"""One proxy in front of engines of several models: each request goes to those that have its model."""

import asyncio
import json
from unittest.mock import AsyncMock, Mock

import pytest
from engine_standin import Server
from proxy_harness import BODY, CHAT, COMPLETIONS, TALK, cluster, until

from pdx.proxy import health, probe
from pdx.proxy.engines import Engine
from pdx.telemetry.env import Env

FORMS = [(COMPLETIONS, {**BODY, "stream": True}), (CHAT, TALK)]


def two_models(**settings):
    """The second engines of both kinds are of model "b", the first ones of "a"."""
    return cluster(prefills=2, decodes=2, models={"p0": ["a"], "p1": ["b"], "d0": ["a"], "d1": ["b"]}, **settings)


def asked(made):
    """The models that each engine was asked for, by the engine's name."""
    every = (*made.prefills, *made.decodes)
    return {engine.name: {body.get("model") for body in engine.bodies} for engine in every}


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_a_request_goes_to_engines_of_its_model(path, body):
    async with two_models() as made:
        models = "aabb" * 5  # not in turns, as engines are asked where nobody looks at models
        answers = await asyncio.gather(*(made.post(path, {**body, "model": model}) for model in models))
        assert {status for status, _, _ in answers} == {200}
        assert asked(made)["d0"] == {"a"}
        assert asked(made)["d1"] == {"b"}
        assert asked(made)["p0"] <= {"a"}
        assert asked(made)["p1"] <= {"b"}


async def test_both_legs_of_a_request_without_a_model_are_of_one():
    async with two_models() as made:
        for _ in range(6):
            assert (await made.post(COMPLETIONS, BODY))[0] == 200
        assert {name for name, models in asked(made).items() if models} == {"p0", "d0"}


async def test_what_nobody_has_is_refused_in_an_engines_words():
    async with two_models() as made:
        status, _, raw = await made.post(COMPLETIONS, {**BODY, "model": "c"})
        assert (status, json.loads(raw)["error"]["message"]) == (404, "The model `c` does not exist.")


async def test_adapters_are_found_where_they_are_loaded():
    async with two_models() as made:
        for engine in (made.prefills[1], made.decodes[1]):
            engine.models_served.append("adapter")
        for _ in range(4):
            assert (await made.post(COMPLETIONS, {**BODY, "model": "adapter"}))[0] == 200
        assert asked(made) == {"p0": set(), "d0": set(), "p1": {"adapter"}, "d1": {"adapter"}}
        made.decodes[1].models_served.remove("adapter")
        made.prefills[1].models_served.remove("adapter")
        for engine in (made.prefills[0], made.decodes[0]):
            engine.models_served.append("adapter")
        assert (await made.post(COMPLETIONS, {**BODY, "model": "adapter"}))[0] == 404
        made.pass_time(probe._AGAIN_S)
        assert (await made.post(COMPLETIONS, {**BODY, "model": "adapter"}))[0] == 200


async def test_engines_behind_a_key_are_asked_with_the_clients():
    async with two_models(key="Bearer k") as made:
        right, wrong = ({"Authorization": f"Bearer {key}"} for key in "kw")
        assert (await made.post(COMPLETIONS, {**BODY, "model": "b"}, headers=wrong))[0] == 401
        before = {name: len(engine.seen) for name, engine in zip("01", made.decodes, strict=True)}
        for model in "abab":
            assert (await made.post(COMPLETIONS, {**BODY, "model": model}, headers=right))[0] == 200
        assert [len(engine.seen) - before[name] for name, engine in zip("01", made.decodes, strict=True)] == [2, 2]


async def test_a_list_that_one_client_is_refused_is_there_for_others():
    """An engine's server takes shorter headers than this client has."""
    async with two_models(served={"field_bytes": 1 << 18}) as made:
        long = {"tracestate": "a" * (1 << 17)}
        assert (await made.post(COMPLETIONS, {**BODY, "model": "c"}, headers=long))[0] == 400
        for model in "abab":
            assert (await made.post(COMPLETIONS, {**BODY, "model": model}))[0] == 200
        assert (asked(made)["d0"], asked(made)["d1"]) == ({"a"}, {"b"})


async def test_a_long_prompt_is_measured_by_engines_of_its_model():
    servers = {"p0": Server(model_len=64), "d0": Server(model_len=64)}
    async with two_models(servers=servers) as made:
        long = {"prompt": [7] * 100, "max_tokens": 2}
        assert (await made.post(COMPLETIONS, {**long, "model": "b"}))[0] == 200
        status, _, raw = await made.post(COMPLETIONS, {**long, "model": "a"})
        assert status == 400
        assert "maximum context length is 64 tokens" in json.loads(raw)["error"]["message"]


async def test_an_engine_whose_list_does_not_come_keeps_a_request_waiting_once():
    async with cluster(prefills=0, decodes=2, key="Bearer k") as made:
        silent = made.decodes[1]
        silent.fault = "hang"
        listed = silent.listed

        def ask():
            body = {**BODY, "best_of": 2, "model": "hash"}
            return asyncio.create_task(made.post(COMPLETIONS, body, headers={"Authorization": "Bearer k"}))

        first = ask()
        await until(lambda: silent.listed > listed and made.proxy.engines.health.of(made.decode.url).models)
        made.pass_time(probe._LIST_S)
        assert [(await first)[0], (await ask())[0], (await ask())[0]] == [200] * 3
        assert silent.listed == listed + 1


async def test_a_name_that_nobody_has_asks_for_lists_once_in_a_while():
    async with two_models() as made:
        listed = made.decode.listed
        await asyncio.gather(*(made.post(COMPLETIONS, {**BODY, "model": "c"}) for _ in range(10)))
        assert made.decode.listed == listed + 1


@pytest.mark.parametrize(
    ("detached", "before", "after"),
    [(False, None, {}), (False, {"m": None}, {}), (True, {}, {}), (True, {"m": None}, None), (True, None, None)],
)
async def test_what_has_no_list_at_the_address_of_an_engine_that_had_one_has_not_every_model(detached, before, after):
    """Of an engine that a node reports, or that had none before, that is so."""
    engine = Engine(url="http://e", name="e", prefills=True, decodes=True, named=False, detached=detached)
    env = Env(lambda: 0.0)
    found = health.Health(env, silence_s=60.0)
    found.of(engine.url).models = before
    legs = Mock(ask=AsyncMock(return_value=(Mock(status=404, failure=None), b"")))
    probes = probe.Probes(Mock(health=found), legs, env, first_byte_timeout_s=600.0)
    await probes.learn(engine, {})
    assert found.of(engine.url).models == after


async def test_an_engine_that_is_well_is_not_asked_for_its_list_with_each_probe(monkeypatch):
    monkeypatch.setattr(health, "FIRST_S", 0.05)
    async with cluster(probe_s=0.02) as made:
        await until(lambda: len(made.decode.probed) >= 5)
        assert made.decode.listed == 1
        made.decode.health = 503
        await until(lambda: made.metric_is(0, "pdx_proxy_engine_ready", url=made.decode.url))
        made.decode.health = 200
        await until(lambda: made.decode.listed == 2)
