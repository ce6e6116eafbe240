"""Who is let in, with which key, and how many requests at a time."""

import asyncio
import contextlib
import json
import os
import signal
from unittest import mock

import aiohttp
import openai
import pytest
from proxy_harness import BODY, COMPLETIONS, begin, cluster, until, within
from workers_stage import PATIENT_S, workers

from pdx.errors import ConfigError, RequestRefused
from pdx.proxy import admission
from pdx.proxy.admission import MAX_NAMES, Admission, Key, load_keys
from pdx.proxy.config import ProxyConfig
from pdx.proxy.exchange import KEY_ROWS, Seat
from pdx.security import reread
from pdx.telemetry.env import Env

ALICE, BOB, FRESH = "a" * 64, "sk-" + "b" * 48, "c" * 32


def shown(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path):
    """Writes the file with this text, in one step, and says where it is."""

    def write(text, mode=0o600):
        (tmp_path / "fresh").write_text(text)
        (tmp_path / "fresh").chmod(mode)
        return str((tmp_path / "fresh").replace(tmp_path / "keys"))

    return write


# ---- API keys -----------------------------------------------------------------------------------


async def test_all_but_what_balancers_ask_needs_a_key(keys):
    async with cluster(api_keys=keys(f"# who\nalice {ALICE}\nbob\t{BOB}  # theirs\n")) as made:
        for path in ("/health", "/healthz", "/readyz", "/ping", "/load"):
            assert (await made.get(path))[0] == 200
        closed = ["/v1/models", "/version", "/nonsense", "/v1/nonsense", "/metrics", "/health/", "//health"]
        closed.append("/health/../v1/models")
        assert {(await made.get(path))[0] for path in closed} == {401}
        for path in (COMPLETIONS, "/invocations", "/tokenize", "/v2/rerank"):
            assert (await made.post(path, BODY))[0] == 401
        wrong = [f"Bearer {ALICE}x", f"Bearer {ALICE[1:]}", f"Basic {ALICE}", f"Bearer  {ALICE}", ALICE, "Bearer", ""]
        wrong.append("Bearer \xe9")
        for header in wrong:
            status, headers, raw = await made.post(COMPLETIONS, BODY, headers={"Authorization": header})
            assert (status, headers["WWW-Authenticate"], json.loads(raw)["error"]["code"]) == (401, "Bearer", 401)
        assert await made.metric("pdx_proxy_events_total", event="unauthorized") == 12 + len(wrong)
        assert [made.prefill.seen, made.decode.seen, made.decode.done] == [[], [], []]
        for header in (f"Bearer {ALICE}", f"bearer {BOB}"):
            assert (await made.post(COMPLETIONS, BODY, headers={"Authorization": header}))[0] == 200
        assert (await made.client.get(made.url + "/v1/models", headers=shown(BOB))).status == 200


async def test_a_clients_key_ends_at_the_proxy_and_engines_get_their_own(keys, tmp_path):
    own = tmp_path / "engine"
    own.write_text("e" * 32)
    own.chmod(0o600)
    async with cluster(api_keys=keys(f"alice {ALICE}"), engine_key=str(own), key=f"Bearer {'e' * 32}") as made:
        for path in (COMPLETIONS, "/tokenize"):
            assert (await made.post(path, BODY, headers=shown(ALICE)))[0] == 200
        assert (await made.client.get(made.url + "/v1/models", headers=shown(ALICE))).status == 200
        sent = [headers for _, _, headers in (*made.prefill.seen, *made.decode.seen)]
        sent += [headers for _, headers in (*made.prefill.tokenized, *made.decode.tokenized)]
        assert {headers["Authorization"] for headers in sent} == {f"Bearer {'e' * 32}"}
        made.prefill.key = made.decode.key = f"Bearer {'f' * 32}"
        status, _, raw = await made.post(COMPLETIONS, BODY, headers=shown(ALICE))
        assert (status, json.loads(raw)["error"]["message"]) == (502, "the decode engine failed (unauthorized)")
        own.write_text("f" * 32 + "\n")

        async def is_taken():
            return (await made.post(COMPLETIONS, BODY, headers=shown(ALICE)))[0] == 200

        await until(is_taken)
    async with cluster(api_keys=keys(f"alice {ALICE}")) as made:
        assert (await made.post(COMPLETIONS, BODY, headers=shown(ALICE)))[0] == 200
        assert not any("Authorization" in headers for _, _, headers in (*made.prefill.seen, *made.decode.seen))


async def test_keys_change_while_it_runs_and_a_bad_file_changes_nothing(keys, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(reread, "SETTLE_S", 0.01)
    async with cluster(api_keys=keys(f"alice {ALICE}\n")) as made:

        async def status(key):
            return (await made.post(COMPLETIONS, BODY, headers=shown(key)))[0]

        async def is_in(key):
            return await status(key) == 200

        assert (await status(ALICE), await status(BOB)) == (200, 401)
        keys(f"alice {ALICE}\nalice {BOB}\n")
        await until(lambda: is_in(BOB))
        assert await status(ALICE) == 200
        keys(f"alice {BOB}\n")
        await until(lambda: status_is(status, ALICE, 401))
        told = []
        for text, mode in (("", 0o600), (f"alice {FRESH}", 0o644), (f"alice {FRESH}\nbob {FRESH}\nx", 0o600)):
            caplog.clear()
            keys(text, mode)
            await until(lambda: "the file of API keys stays as it was" in caplog.text)
            told.append(caplog.text)
            assert (await status(BOB), await status(FRESH)) == (200, 401)
        (tmp_path / "keys").unlink()
        await until(lambda: "keys: No such file" in caplog.text)
        assert (await status(BOB), await status(FRESH)) == (200, 401)
        keys(f"bob {FRESH}\n")
        await until(lambda: is_in(FRESH))
    assert not [key for key in (ALICE, BOB, FRESH) if key in "".join([*told, caplog.text])]


async def status_is(status, key, wanted):
    return await status(key) == wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is none in it"),
        ("# nobody\n", "there is none in it"),
        (ALICE, "line 1 is not NAME KEY"),
        (f"\nalice {ALICE[:31]}", "line 2 is not NAME KEY"),
        (f"alice {ALICE} {BOB}", "line 1 is not"),
        (f"alice {ALICE} per-minute=0", "line 1 is not"),
        (f"alice {ALICE} max-concurrent=9999999", "line 1 is not"),
        (f"alice {ALICE} tokens=9", "line 1 is not"),
        (f"al/ice {ALICE}", "line 1 is not"),
        (f"alice {ALICE}\nbob {ALICE}", "line 2: this key is another one's, too"),
        (f"alice {ALICE} per-minute=1\nalice {BOB}", "line 2: alice has other limits in a line before"),
        ("x" * (2 << 20), "more than"),
        # it was cut within bob's line, who had no limits then
        (f"#{'é' * 524_250}\nbob {BOB} max-concurrent=1 per-minute=60", "more than"),
        ("\n".join(f"name{each} {each:032}" for each in range(MAX_NAMES + 1)), "names; at most"),
    ],
)
def test_a_file_that_is_wrong_is_refused_at_the_start_and_no_key_is_told(keys, text, why):
    with pytest.raises(ConfigError, match=why) as told:
        load_keys(keys(text))
    assert ALICE not in str(told.value)
    assert BOB not in str(told.value)


def test_what_is_kept_of_a_key_is_no_key(keys):
    (found,) = load_keys(keys(f"alice {ALICE} max-concurrent=2 per-minute=600")).items()
    assert found[1] == Key("alice", 2, 600)
    assert ALICE.encode() not in found[0]
    assert len(found[0]) == 32


# ---- limits of a key ----------------------------------------------------------------------------


async def test_a_key_has_so_many_requests_at_a_time(keys):
    text = f"alice {ALICE} max-concurrent=2\nalice {FRESH} max-concurrent=2\nbob {BOB}"
    async with cluster(api_keys=keys(text)) as made:
        made.prefill.fault = made.decode.fault = "hold"
        busy = [asyncio.create_task(made.post(COMPLETIONS, BODY, headers=shown(key))) for key in (ALICE, FRESH)]
        await until(lambda: len(made.prefill.seen) == 2)
        status, headers, raw = await made.post(COMPLETIONS, BODY, headers=shown(ALICE))
        error = json.loads(raw)["error"]
        assert (status, headers["Retry-After"], error["code"]) == (429, "1", 429)
        assert error["message"] == "alice has 2 requests under way, as many as it may"
        busy.append(asyncio.create_task(made.post(COMPLETIONS, BODY, headers=shown(BOB))))
        await until(lambda: len(made.prefill.seen) == 3)
        busy[0].cancel()  # a client that leaves counts no more

        async def is_in():
            busy.append(asyncio.create_task(made.post(COMPLETIONS, BODY, headers=shown(ALICE))))
            await until(lambda: busy[-1].done() or len(made.prefill.seen) == 4)
            return not busy[-1].done()

        await until(is_in)
        assert await made.metric("pdx_proxy_requests_total", outcome="limited") == len(busy) - 3
        made.release()
        answers = await within(asyncio.gather(*busy, return_exceptions=True))
        assert [each[0] for each in answers if isinstance(each, tuple) and each[0] != 429] == [200] * 3
        assert set(made.proxy.drain.seat.uses[2::3]) == {0}


class Worker:
    """Lets in who shows a key: of each name the one that `key_of` makes of it."""

    def __init__(self, file, seat):
        self.admission = Admission(ProxyConfig(api_keys=file), Env(), seat)
        self.under_way = contextlib.AsyncExitStack()

    async def begin(self, name):
        """A request, which goes on until `end`."""
        request = type("Request", (dict,), {"path": COMPLETIONS, "headers": shown(key_of(name))})()

        async def served(request):
            await self.under_way.enter_async_context(self.admission.counted(request))

        assert await self.admission.guard(request, served) is None

    async def end(self):
        await self.under_way.aclose()

    async def ask(self, name, times=1):
        for _ in range(times):
            await self.begin(name)
            await self.end()


def key_of(name):
    return name.encode().hex().zfill(64)


async def test_a_key_has_so_many_requests_in_a_minute(keys):
    file = keys(f"alice {key_of('alice')} per-minute=60\nbob {key_of('bob')} per-minute=1")
    made = Worker(file, Seat.alone())
    now = 10**18
    with mock.patch.object(admission.time, "monotonic_ns", side_effect=lambda: now):
        await made.ask("alice", 60)
        for _ in range(3):
            with pytest.raises(RequestRefused, match="alice has asked 60 requests within a minute") as told:
                await made.ask("alice")
            assert (told.value.status, told.value.retry_after_s) == (429, 1)
        await made.ask("bob")
        now += 2 * 10**9
        await made.ask("alice", 2)
        with pytest.raises(RequestRefused):
            await made.ask("alice")
        now += 60 * 10**9
        await made.ask("alice", 60)
        await made.ask("bob")
        with pytest.raises(RequestRefused, match="bob has asked 1 ") as told:
            await made.ask("bob")
        assert told.value.retry_after_s == 60


async def test_workers_count_each_others_requests_and_more_names_than_rows_end_nothing(keys):
    cells = memoryview(bytearray(8 * Seat.sizes(3)[2])).cast("q")
    loads = memoryview(bytearray(24)).cast("q")

    def workers_of(*names):
        file = keys("".join(f"{name} {key_of(name)} max-concurrent={2 - ('name' in name)}\n" for name in names))
        return [Worker(file, Seat(number, loads, loads, cells)) for number in range(3)]

    one, two, _ = workers_of("alice")
    for each in (one, two):
        await each.begin("alice")
    for each in (one, two):
        with pytest.raises(RequestRefused):
            await each.begin("alice")
    await one.end()
    await two.begin("alice")
    await two.end()
    begun = []
    for file in range(2):  # the first names are in the file no more
        names = [f"name{file}-{number}" for number in range(MAX_NAMES)]
        begun.append((workers_of(*names)[0], names))
        for name in names:
            await begun[-1][0].begin(name)  # else it shares a row, and is refused what another one did
    for each, _ in begun:
        await each.end()

    async def ask_with_more():
        for file in range(KEY_ROWS // MAX_NAMES):
            more = [f"more{file}-{number}" for number in range(MAX_NAMES)]
            each = workers_of(*more)[0]
            for name in more:
                await each.ask(name)

    with pytest.raises(RequestRefused, match="has to be restarted"):
        await ask_with_more()
    await begun[0][0].ask(begun[0][1][0])
    assert not any(any(cells[2 + number :: 5]) for number in range(3))


# ---- so many at a time --------------------------------------------------------------------------


async def test_others_wait_in_turn_and_no_more_than_the_queue_has_room_for():
    async with cluster(max_concurrent=1, max_queue=2) as made:
        made.prefill.fault = made.decode.fault = "hold"
        asked = []
        for number in range(3):
            body = {**BODY, "prompt": f"prompt {number}"}
            asked.append(asyncio.create_task(made.post(COMPLETIONS, body)))
            await until(lambda: made.proxy.drain.load == len(asked))
        await until(lambda: made.metric_is(2, "pdx_proxy_waiting"))
        status, headers, raw = await made.post(COMPLETIONS, BODY)
        assert (status, headers["Retry-After"], json.loads(raw)["error"]["type"]) == (429, "1", "Too Many Requests")
        assert [body["prompt"] for body in made.prefill.bodies] == ["prompt 0"]
        assert (await made.get("/v1/models"))[0] == (await made.get("/health"))[0] == 200
        asked[1].cancel()  # who leaves waits no more
        await until(lambda: made.metric_is(1, "pdx_proxy_waiting"))
        made.release()
        assert [(await within(each))[0] for each in (asked[0], asked[2])] == [200, 200]
        assert [body["prompt"] for body in made.prefill.bodies] == ["prompt 0", "prompt 2"]
        assert await made.metric("pdx_proxy_requests_total", outcome="limited") == 1


async def test_a_body_that_does_not_come_keeps_nobody_waiting():
    """A head alone held a place for the time that a body may take: so many heads, and nobody was served."""
    async with cluster(max_concurrent=1, max_queue=1) as made:
        reader, writer = await begin(made.url, 1000)
        await until(lambda: made.proxy.drain.load == 1)
        assert (await made.post(COMPLETIONS, BODY))[0] == 200
        writer.close()


async def test_nobody_waits_for_longer_than_an_engine_may_take():
    made = Admission(ProxyConfig(max_concurrent=1, max_queue=1, first_byte_timeout_s=0.1), Env(), Seat.alone())
    async with made.turn({}):
        with pytest.raises(RequestRefused, match="the request has waited 0.1 s for its turn") as told:
            async with made.turn({}):
                pass
        assert (told.value.status, made.waiting) == (429, 0)
    async with made.turn({}):
        pass


async def test_those_who_wait_are_told_when_the_proxy_ends():
    async with cluster(max_concurrent=1, max_queue=1) as made:
        made.prefill.fault = made.decode.fault = "hang"
        asked = [asyncio.create_task(made.post(COMPLETIONS, BODY)) for _ in range(2)]
        await until(lambda: made.metric_is(1, "pdx_proxy_waiting"))
        made.proxy.drain.end()
        assert {(await within(each))[0] for each in asked} == {503}


# ---- real processes, and a real client ----------------------------------------------------------


async def test_workers_share_the_limits_of_keys_and_one_that_dies_takes_its_requests_with_it(keys, tmp_path):
    file = keys(f"alice {ALICE} max-concurrent=6\nbob {BOB}")
    async with workers(tmp_path, "--api-keys", file, "--max-concurrent", "30", headers=shown(BOB)) as them:
        engine, url = them.made.engine, them.made.url + COMPLETIONS

        async def ask():
            async with aiohttp.request("POST", url, json=BODY, headers=shown(ALICE)) as response:  # to any of them
                return response.status

        engine.seen.clear()
        engine.fault = "hold"
        asked = [asyncio.create_task(ask()) for _ in range(18)]
        await until(lambda: sum(each.done() for each in asked) >= 12)
        assert {each.result() for each in asked if each.done()} == {429}
        await until(lambda: 0 < len(engine.seen) == sum(not each.done() for each in asked) <= 6)  # they have come, too
        for pid in them.pids:
            os.kill(pid, signal.SIGKILL)
        await within(asyncio.gather(*asked, return_exceptions=True))
        engine.fault = None
        await until(lambda: them.num_starts == 2 * them.count, PATIENT_S)
        for _ in range(12):
            assert await ask() == 200
        keys(f"alice {FRESH}\nbob {BOB}")

        async def none_takes_it():
            return {await ask() for _ in range(8)} == {401}

        await until(none_takes_it)


async def test_the_openai_client_understands(keys):
    async with cluster(api_keys=keys(f"alice {ALICE}\nbob {BOB} per-minute=1")) as made:

        def client(key, **more):
            return openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key=key, max_retries=0, **more)

        async with client(ALICE) as alice, client(BOB) as bob, client("sk-none") as nobody:
            asked = {"model": "hash", "prompt": "beta", "max_tokens": 4}
            assert (await alice.completions.create(**asked)).choices
            assert [each.id for each in (await alice.models.list()).data] == ["hash"]
            async for event in await bob.completions.create(**asked, stream=True):
                assert event.object == "text_completion"
            with pytest.raises(openai.RateLimitError, match="bob has asked 1 requests") as told:
                await bob.completions.create(**asked)
            assert 50 <= int(told.value.response.headers["Retry-After"]) <= 60
            with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
                await nobody.completions.create(**asked)
