"""Engines that fail are left in peace, and what the proxy tells of them."""

import asyncio
import errno
import json
from unittest.mock import Mock, patch

import aiohttp
import msgspec
import pytest
from proxy_harness import BODY, COMPLETIONS, Ahead, cluster, until, within

from pdx.errors import RequestRefused
from pdx.proxy import health as health_module
from pdx.proxy.engines import Engine
from pdx.proxy.health import EngineState, Health, Reason
from pdx.proxy.leg import OWN_LACK, Answer, failed
from pdx.proxy.probe import Probes
from pdx.telemetry.env import Env


@pytest.mark.parametrize(("leg", "fault"), [("prefill", "reset"), ("decode", "nonsense")])
async def test_one_bad_engine_of_four_is_no_black_hole(leg, fault, monkeypatch):
    """Its first requests are served by others, and once it is suspect it gets none, until a probe sees a token."""
    monkeypatch.setattr(health_module, "FIRST_S", 0.1)
    async with cluster(prefills=4, decodes=4) as made:
        bad = getattr(made, leg)
        bad.fault = fault

        async def burst():
            asked = (made.post(COMPLETIONS, {**BODY, "seed": number}) for number in range(24))
            answers = await within(asyncio.gather(*asked))
            assert not any(b'"error"' in raw for _, _, raw in answers)
            return {status for status, _, _ in answers}

        assert await burst() == {200}
        assert bad.seen
        seen = len(bad.seen)
        probed = len(bad.probed)
        await until(lambda: len(bad.probed) > probed)
        for _ in range(2):
            assert await burst() == {200}
        assert len(bad.seen) == seen
        bad.fault = None
        await made.metric_reaches(1, "pdx_proxy_engine_ready", url=bad.url)
        assert await burst() == {200}
        assert len(bad.seen) > seen


async def test_an_engine_behind_a_key_is_on_trial_until_a_request_succeeds():
    """The probe has no key, so it cannot tell whether the engine generates."""
    async with cluster(prefills=0, decodes=2) as made:
        bad, good = made.decodes
        key = {"Authorization": "Bearer k"}
        bad.key = good.key = key["Authorization"]

        def ask(**more):
            return made.post(COMPLETIONS, {**BODY, "best_of": 2, **more}, headers=key)

        bad.fault = 500
        assert (await ask())[0] == 200
        assert (await ask())[0] == 200
        bad.fault = "hold"
        bad.seen.clear()
        await until(lambda: "token" in bad.probed)
        await made.metric_reaches(1, "pdx_proxy_engine_ready", url=bad.url)
        good.fault = "hold"
        asked = [asyncio.create_task(ask()) for _ in range(8)]
        await until(lambda: len(bad.seen) + len(good.seen) >= 10)
        assert len(bad.seen) == 1
        for each in (bad, good):
            each.released.set()
        assert {answer[0] for answer in await within(asyncio.gather(*asked))} == {200}
        bad.seen.clear()
        assert {(await ask())[0] for _ in range(4)} == {200}
        assert len(bad.seen) == 2


@pytest.mark.parametrize("serves", [False, True])
async def test_an_engine_that_answers_503_is_full_if_it_serves_others(serves, monkeypatch):
    """vLLM says so of a full queue. What says so to everybody, such as a gateway without an engine, gets no more."""
    monkeypatch.setattr(health_module, "FIRST_S", 3600.0)
    async with cluster(prefills=0, decodes=2) as made:
        for _ in range(2 if serves else 0):
            assert (await made.post(COMPLETIONS, BODY))[0] == 200
        made.decode.fault = 503
        made.decode.seen.clear()
        for _ in range(4):
            assert (await made.post(COMPLETIONS, {**BODY, "best_of": 2}))[0] == 200
        assert len(made.decode.seen) == (4 if serves else 1)
        assert await made.metric("pdx_proxy_engine_ready", url=made.decode.url) == serves


async def test_a_request_that_fails_everywhere_pardons_no_broken_connection():
    async with cluster(prefills=0, decodes=3) as made:
        for turn in range(3):
            assert (await made.post(COMPLETIONS, {**BODY, "best_of": 2, "seed": turn}))[0] == 200
        dead, *others = sorted(made.decodes, key=lambda each: each.seen[-1][1]["seed"])
        dead.fault = "reset"
        for each in others:
            each.fault = 500
        assert (await made.post(COMPLETIONS, {**BODY, "best_of": 2}))[0] == 500
        ready = [await made.metric("pdx_proxy_engine_ready", url=each.url) for each in (dead, *others)]
        assert ready == [0, 1, 1]


async def test_what_the_proxy_lacks_is_no_engines_fault():
    connect = aiohttp.TCPConnector.connect
    async with cluster(heartbeat_timeout_s=1e9) as made:
        urls = {made.prefill.url, made.decode.url}
        for lack in OWN_LACK:

            async def lacking(connector, request, *rest, lack=lack, probed=(probed := set()), **more):
                if (origin := str(request.url.origin())) in urls:
                    if request.url.path == "/health":
                        probed.add(origin)
                    raise aiohttp.ClientConnectorError(request.connection_key, OSError(lack, "lacking"))
                return await connect(connector, request, *rest, **more)

            with patch.object(aiohttp.TCPConnector, "connect", lacking):
                for body in (BODY, {**BODY, "best_of": 2}):
                    status, headers, raw = await made.post(COMPLETIONS, body)
                    assert (status, headers["Retry-After"]) == (503, "1")
                    assert json.loads(raw)["error"]["code"] == 503
                for path in ("/v1/models", "/v1/responses/resp_1"):
                    assert (await made.get(path))[0] == 503
                made.pass_time(5000.0)
                await until(lambda probed=probed: probed == urls)
            assert await made.metric("pdx_proxy_exhausted_total", lack=errno.errorcode[lack]) == 4
        assert json.loads((await made.get("/health"))[1])["decoders"] == 1
        status, headers, _ = await made.post(COMPLETIONS, BODY)
        assert (status, headers["x-pdx-mode"]) == (200, "sampled")


async def test_health_is_readiness(monkeypatch):
    """It says whether somebody can decode now, by probes of the engines themselves."""
    monkeypatch.setattr(health_module, "FIRST_S", 0.05)
    async with cluster(probe_s=0.05) as made:
        made.decode.health = 503

        async def health(*wanted):
            status, raw = await made.get("/health")
            return (status, json.loads(raw)["decoders"], json.loads(raw)["prefillers"]) == wanted

        await until(lambda: health(503, 0, 1))
        assert (await made.post(COMPLETIONS, BODY))[0] == 200  # the prefill engine serves alone meanwhile
        assert made.decode.seen == []
        made.decode.health = 200
        await until(lambda: health(200, 1, 1))
        await made.prefill.stop()
        await made.decode.stop()
        await until(lambda: health(503, 0, 0))


async def test_models_are_those_of_all_engines_that_are_well():
    async with cluster(prefills=2, decodes=2) as made:
        await made.decodes[0].stop()
        await made.prefills[0].stop()
        made.decodes[1].models_served = ["hash", "adapter"]
        made.prefills[1].models_served = ["hash", "other"]
        made.decodes[1].listed = made.prefills[1].listed = 0
        for _ in range(5):
            status, raw = await made.get("/v1/models")
            assert status == 200
            cards = json.loads(raw)["data"]
            assert [card["id"] for card in cards] == ["hash", "adapter", "other"]
            assert cards[0]["owner"] == "d1"
        assert (made.decodes[1].listed, made.prefills[1].listed) == (1, 1)  # the answer is kept


def probes_of(clock, known, ask):
    """The probes of these engines, and their health."""
    env = Env(clock)
    health = Health(env, silence_s=60.0)
    return Probes(Mock(all=lambda: known, health=health), Mock(ask=ask), env, first_byte_timeout_s=600.0), health


@pytest.mark.parametrize("well", [0, 1])
def test_a_list_of_models_does_not_wait_for_each_engine_that_hangs(well):
    now, asked = 0.0, []
    known = [Engine(url=f"http://e{number}", name="e", prefills=True, decodes=True, named=True) for number in range(50)]

    async def ask(engine, path, *, headers, timeout_s):
        nonlocal now
        asked.append(engine.url)
        if len(asked) <= well:
            return Mock(status=200, failure=None), b'{"data": [{"id": "m"}]}'
        now += timeout_s
        raise failed(Reason.TIMEOUT, engine)

    models, _ = probes_of(lambda: now, known, ask)
    assert asyncio.run(models.answer({})).status == (200 if well else 503)
    assert len(asked) < 10


ABORTED = b'{"choices": [{"finish_reason": "abort"}]}'
PROBED = [(401, b"", "trial"), (429, b"", "trial"), (503, b"", "trial"), (500, b"", "suspect")]
PROBED += [(200, b'{"choices": [1]}', "well"), (200, ABORTED, "suspect")]


@pytest.mark.parametrize(("status", "raw", "state"), PROBED)
def test_one_that_is_full_does_not_tell_whether_it_generates(status, raw, state):
    """Nor one that wants a key: they get one request at a time until they take one. One that is paused does not."""
    engine = Engine(url="http://e", name="e", prefills=True, decodes=True, named=True)

    async def ask(engine, path, *, headers, timeout_s, payload=None):
        answer = Answer(engine, health, None, timeout_s, timeout_s)
        answer.arrived(Mock(status=200 if payload is None else status, headers={}))
        return answer, raw

    async def main():
        probes.look()
        await until(lambda: not health.of(engine.url).is_probing)

    probes, health = probes_of(lambda: 0.0, [engine], ask)
    health.failed(health.begin(engine.url), Reason.RESET)
    health.of(engine.url).probe_at = 0.0
    asyncio.run(main())
    assert health.of(engine.url).state == state


def run_ahead(main):
    """The result of a test's coroutine, on a clock that goes to the next timer at once."""
    with asyncio.Runner(loop_factory=Ahead) as runner:
        return runner.run(main)


async def hung(engine, path, *, headers, timeout_s):
    """No answer from the engines without a node."""
    if not engine.node:
        await asyncio.sleep(timeout_s)
        raise failed(Reason.TIMEOUT, engine)
    return Mock(status=404 if "responses" in path else 200, failure=None), b'{"data": [{"id": "m"}]}'


def test_who_looks_for_responses_where_an_engine_hangs_keeps_nobody_from_the_models_and_is_told_in_time():
    async def main():
        clock = asyncio.get_running_loop().time
        known = [
            Engine(url=f"http://{n}", name="e", prefills=True, decodes=True, named=True, node=n) for n in ("n", "")
        ]
        probes, _ = probes_of(clock, known, hung)
        searches = [asyncio.create_task(probes.holder(f"r{number}", {})) for number in range(200)]
        await asyncio.sleep(0.1)
        await probes.answer({})
        listed_s = clock()
        found = await asyncio.gather(*searches, return_exceptions=True)
        return listed_s, clock(), found

    listed_s, ended_s, found = run_ahead(main())
    assert listed_s < 3
    assert ended_s < 5
    assert found[0] is None
    assert (type(found[-1]), found[-1].status, found[-1].retry_after_s) == (RequestRefused, 429, 1)


def test_a_response_and_a_new_model_are_found_though_most_engines_hang():
    """Those that are suspect are asked last: there was never a turn for others."""

    async def keeps(engine, path, **how):
        listed = b'{"data": [{"id": "new"}]}'
        return (Mock(status=200, failure=None), listed) if engine.node else await hung(engine, path, **how)

    async def main():
        known = [Engine(url=f"http://{n}", name="e", prefills=True, decodes=True, named=True) for n in range(40)]
        known.append(msgspec.structs.replace(known[0], url="http://n", node="n"))
        probes, health = probes_of(asyncio.get_running_loop().time, known, keeps)
        for engine in known[:-1]:
            health.failed(health.begin(engine.url), Reason.TIMEOUT)
        await probes.place("new", {})
        return health.of("http://n").models, await probes.holder("r", {})

    models, holder = run_ahead(main())
    assert (models, holder.node) == ({"new": None}, "n")


def test_requests_of_a_new_model_wait_neither_for_each_engine_that_hangs_nor_for_each_other():
    async def main():
        known = [Engine(url=f"http://{n}", name="e", prefills=True, decodes=True, named=True) for n in range(100)]
        probes, _ = probes_of(asyncio.get_running_loop().time, known, hung)
        await asyncio.gather(*(probes.place("new", {}) for _ in range(9)))
        return asyncio.get_running_loop().time()

    assert run_ahead(main()) < 5


def test_many_engines_that_hang_keep_no_other_from_being_probed():
    async def main():
        known = [Engine(url=f"http://e{n}", name="e", prefills=True, decodes=True, named=True) for n in range(401)]

        async def ask(engine, path, *, headers, timeout_s):
            if engine is not known[-1]:
                await asyncio.sleep(timeout_s)
                raise failed(Reason.TIMEOUT, engine)
            return Mock(status=200), b""

        probes, health = probes_of(asyncio.get_running_loop().time, known, ask)
        probes.look()
        while health.of(known[-1].url).state is not EngineState.WELL:
            await asyncio.sleep(0.25)
        await probes.close()
        return asyncio.get_running_loop().time()

    assert run_ahead(main()) < 40


def test_clients_who_name_many_keys_do_not_take_all_descriptors():
    """For each key, all engines are asked."""
    known = [Engine(url=f"http://e{number}", name="e", prefills=True, decodes=True, named=True) for number in range(50)]
    under_way, most = 0, 0

    async def ask(engine, path, *, headers, timeout_s):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(100):
            await asyncio.sleep(0)
        under_way -= 1
        return Mock(status=200, failure=None), b'{"data": [{"id": "m"}]}'

    async def main():
        models, _ = probes_of(lambda: 0.0, known, ask)
        await asyncio.gather(*(models.answer({"Authorization": str(key)}) for key in range(10)))

    asyncio.run(main())
    assert most <= 16 + 10


async def test_models_are_told_to_each_client_by_its_own_key_and_are_no_load():
    async with cluster(prefills=0, decodes=2) as made:
        first = made.decode
        first.key = "Bearer a"
        first.fault = "hang"
        listed = first.listed

        async def ask(key):
            async with made.client.get(made.url + "/v1/models", headers={"Authorization": key}) as response:
                return response.status

        asked = asyncio.create_task(ask("Bearer a"))
        await until(lambda: first.listed > listed)
        assert await made.metric("pdx_proxy_engine_in_flight", url=first.url) == 0
        asked.cancel()
        first.fault = None
        assert await ask("Bearer b") == 401
        assert await ask("Bearer a") == 200
