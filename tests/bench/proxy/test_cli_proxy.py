"""`pdx bench proxy`: a real proxy in front of real stand-in engines, with few and short requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from pdx.bench.harness.ask import Answer, AskFailed, ask, completion, session
from pdx.bench.harness.timing import CpuClock, Spread, machine_seconds
from pdx.bench.proxy import run as proxy_run
from pdx.bench.proxy import stand_in_engine
from pdx.bench.proxy.run import FORWARD, SAMPLED, Case, Row, Way, _Load, _Spent, cost_figures, measure
from pdx.bench.proxy.stage import Front, Stage
from pdx.bench.proxy.stand_in_engine import MODEL, Pace, StandInEngine
from pdx.cli.main import main

PACE = Pace(2.0, 1.0)
OPTIONS = ["--requests", "4", "--prompt-tokens", "50", "--first-ms", "2", "--pace-ms", "1"]


def bench(*options: str) -> Any:
    return CliRunner().invoke(main, ["bench", "proxy", *options])


def check_spread(found: dict[str, Any]) -> None:
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["count"] > 0


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_small_run_has_every_figure(place: Path) -> None:
    result = bench(*OPTIONS, "--concurrency", "1,3", "--tokens", "2,6", "--out", str(place), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert result.stdout == (place / "proxy.json").read_text()
    details = found["details"]
    assert details["is_complete"]
    assert not details["missing"]
    paced = [row for row in details["rows"] if not row["is_saturated"]]
    saturated = [row for row in details["rows"] if row["is_saturated"]]
    kinds = [[(row["mode"], row["concurrency"], row["tokens"]) for row in rows] for rows in (paced, saturated)]
    assert kinds[0] == [(mode, *each) for mode in ("forward", "sampled") for each in ((1, 6), (3, 6), (3, 2))]
    assert kinds[1] == [("forward", 3, 2), ("forward", 3, 6), ("sampled", 3, 2), ("sampled", 3, 6)]
    for row in details["rows"]:
        assert row["requests"] >= 4
        assert row["proxy"]["cpu_ms"] > 0
        assert row["example"]["cpu_ms"] > 0
        assert row["direct"]["exposed"] is row["example"]["exposed"] is None
        check_spread(row["proxy"]["exposed"])
        for way in (row["direct"], row["proxy"], row["example"]):
            check_spread(way["ttft"])
            check_spread(way["itl"])
            assert way["itl"]["count"] == row["requests"] * (row["tokens"] - 1)
            assert way["requests_per_s"] > 0
            assert way["client_cores"] > 0
            assert way["engine_cores"] > 0
        for name in ("ttft", "itl"):
            added = row["proxy"][name]["p50_ms"] - row["direct"][name]["p50_ms"]
            assert row[f"added_{name}_p50_ms"] == pytest.approx(added, abs=0.002)
    for row in paced:
        assert row["direct"]["ttft"]["p50_ms"] >= PACE.first_ms
        # Each request's first token comes after its prefill leg's end, and that end after `first_ms`.
        assert row["proxy"]["exposed"]["p50_ms"] <= row["proxy"]["ttft"]["p50_ms"] - PACE.first_ms
    assert len(found["figures"]) == 7 * 6 + 2 * 4 + 2 * (4 + 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--modes", "both"], "'both' is no mode; there are forward, sampled"),
        (["--tokens", "1"], "'1' is not a whole number from 2 on"),
        (["--concurrency", "many"], "'many' is not a whole number from 1 on"),
        (["--concurrency", ""], "at least one is needed"),
        (["--prompt-tokens", ""], "at least one is needed"),
        (["--pace-ms", "-1"], "-1.0 is not in the range"),
        (["--requests", "0"], "0 is not in the range"),
    ],
)
def test_bad_options_are_refused(place: Path, options: Sequence[str], words: str) -> None:
    result = bench("--out", str(place), *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not list(place.iterdir())


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The URL of an application that is served in this process."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def with_engine(work: Callable[[aiohttp.ClientSession, str], Awaitable[None]], pace: Pace = PACE) -> None:
    """Run `work` with a client and the URL of a stand-in engine in this process."""

    async def run() -> None:
        async with serving(StandInEngine(pace).app()) as url, session() as http:
            await work(http, url)

    asyncio.run(run())


async def whole(http: aiohttp.ClientSession, url: str, **body: Any) -> dict[str, Any]:
    async with http.post(f"{url}/v1/completions", json={"model": MODEL, **body}) as response:
        assert response.status == 200
        found: dict[str, Any] = await response.json()
        return found


def test_a_stand_in_says_the_same_streamed_whole_and_in_two_legs() -> None:
    async def work(http: aiohttp.ClientSession, url: str) -> None:
        prompt = "what is asked"
        streamed = await ask(http, url, completion(MODEL, prompt, 5), "r")
        answer = await whole(http, url, prompt=prompt, max_tokens=5)
        assert streamed.text == answer["choices"][0]["text"]
        assert streamed.output_tokens == answer["usage"]["completion_tokens"] == 5
        assert streamed.prompt_tokens == answer["usage"]["prompt_tokens"] == 7
        prefill = await whole(http, url, prompt=prompt, max_tokens=1, return_token_ids=True)
        first = prefill["choices"][0]
        assert len(first["prompt_token_ids"]) == 7
        rest = await whole(http, url, prompt=[*first["prompt_token_ids"], *first["token_ids"]], max_tokens=4)
        assert first["text"] + rest["choices"][0]["text"] == streamed.text
        routed = await whole(http, url, prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        told = routed["kv_transfer_params"]  # of a router that names no transfer, as vLLM's example
        assert told.pop("transfer_id")
        assert told == {"do_remote_prefill": True, "prefill_tokens": 7}

    with_engine(work)


def test_a_stand_in_keeps_its_pace_and_a_decode_leg_has_its_prompt_already() -> None:
    """Not before the time; how long after it, only a machine without other work could tell."""
    engine = StandInEngine(Pace(200.0, 30.0, intake_ms=50.0))

    def due(
        params: dict[str, Any], prompt_tokens: int, *, is_text: bool = False, arrived_ms: float = 0.0
    ) -> list[float]:
        arrived_at = 1000.0 + arrived_ms / 1e3
        moments = engine._moments(1000.0, params, prompt_tokens, is_text=is_text, arrived_at=arrived_at)
        return [round((next(moments) - 1000.0) * 1e3) for _ in range(3)]

    decode = {"do_remote_prefill": True, "prefill_tokens": 10}
    early = {"do_remote_prefill": True, "is_early": True}
    assert due({}, 10) == due({"do_remote_decode": True}, 10, is_text=True) == [200, 230, 260]
    assert due(decode, 11) == [30, 60, 90]  # goes on behind the first token
    assert due(decode, 10) == [0, 30, 60]  # samples it, with the prompt's KV at hand
    assert due(decode, 10, is_text=True) == [50, 80, 110]  # has to be read first
    assert due(early, 10, is_text=True, arrived_ms=20) == [50, 80, 110]  # and so if it comes while prefill computes
    assert due(early, 10, is_text=True, arrived_ms=120) == [120, 150, 180]

    async def work(http: aiohttp.ClientSession, url: str) -> None:
        started_at = time.monotonic()
        answer = await ask(http, url, completion(MODEL, "x", 3), "r")
        assert (time.monotonic() - started_at) * 1e3 >= 9.0
        assert answer.ttft_ms >= 5.0
        async with http.post(f"{url}/pace", json={"first_ms": 0.0, "pace_ms": 0.0}) as response:
            assert response.status == 200
        assert len((await ask(http, url, completion(MODEL, "x", 40), "r")).itl_ms) == 39

    with_engine(work, Pace(5.0, 2.0))


def test_a_decode_leg_that_comes_early_waits_for_the_end_of_its_prefill_leg(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in_engine, "KV_WAIT_S", 60.0)

    async def run() -> None:
        link = str(place / "kv.sock")
        prefill, decode = StandInEngine(Pace(50.0, 0.0), kv_to=link), StandInEngine(PACE, kv_from=link)
        chat = {"messages": [{"role": "user", "content": "a chat"}], "stream": True, "max_tokens": 2}
        chat["stream_options"] = {"include_usage": True}
        early = {"do_remote_prefill": True, "transfer_id": "t", "is_early": True}
        leg = {"do_remote_decode": True, "transfer_id": "t"}
        async with serving(decode.app()) as decode_url, serving(prefill.app()) as prefill_url, session() as http:
            asked = ask(http, decode_url, chat | {"kv_transfer_params": early}, "r", path="/v1/chat/completions")
            answer = asyncio.create_task(asked)
            url, headers = f"{prefill_url}/v1/chat/completions", {"X-Request-Id": "r"}
            body = chat | {"stream": False, "max_tokens": 1, "kv_transfer_params": leg}
            async with http.post(url, json=body, headers=headers) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == " delta"
            found = await asyncio.wait_for(answer, 30.0)
            assert found.text == " delta eps"
            async with http.get(f"{prefill_url}/ended") as response:
                ended = await response.json()
            assert list(ended) == ["r"]
            assert found.sent_ns / 1e9 + found.ttft_ms / 1e3 >= ended["r"]
            async with http.get(f"{prefill_url}/ended") as response:
                assert await response.json() == {}

    asyncio.run(run())


def test_what_is_exposed_begins_with_the_end_of_the_requests_own_prefill_leg() -> None:
    front = Front("", "", os.getpid())
    load = _Load(Stage(PACE, "", "", (os.getpid(), os.getpid()), front), Case(SAMPLED, 1, 8, 3, 2))
    load._ended = {"other": 2.0, "own": 1.2}
    answer = Answer("a", 250.0, [1.0], 300.0, "", "own", 1, 2, 1_000_000_000)
    assert load._exposed_ms(answer) == pytest.approx(50.0)
    with pytest.raises(RuntimeError, match="request unknown was answered, and no prefill leg of it has ended"):
        load._exposed_ms(replace(answer, request_id="unknown"))


@pytest.mark.timeout(180)
def test_another_answer_and_another_mode_are_noticed(place: Path) -> None:
    """An engine in the place of the proxy knows no transfers; one with other words is no proxy of this engine."""

    async def other(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        text = "wrong" if not body.get("stop") else " eta theta"
        events = [{"choices": [{"text": text}]}, {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 1}}]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return web.Response(text=lines, content_type="text/event-stream")

    async def work(http: aiohttp.ClientSession, url: str) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", other)
        stage = Stage(PACE, url, url, (os.getpid(), os.getpid()), Front(url, url, os.getpid()))
        async with serving(app) as other_url:
            wrong = replace(stage, proxy=Front(other_url, url, os.getpid()))
            with pytest.raises(RuntimeError, match=r"through the proxy \(proxy\) is not the engine's"):
                await asyncio.to_thread(measure, wrong, Case(FORWARD, 1, 8, 3, 2))
            with pytest.raises(AskFailed, match="does not tell what it did with transfer ''"):
                await asyncio.to_thread(measure, stage, Case(SAMPLED, 1, 8, 3, 2))

    with_engine(work)


def test_the_cost_of_a_token_is_what_more_tokens_take() -> None:
    way = Way(Spread(1, 1, 1), Spread(1, 1, 1), 1, 1, 1, 1, 1, cpu_ms=1.4, exposed=None)
    fewer = Row("forward", 1, 10, 4, 1, way, way, way, 0, 0, 0, 0, is_machine_full=False)
    more = replace(fewer, tokens=24, proxy=replace(way, cpu_ms=3.4), example=replace(way, cpu_ms=6.4))
    found = cost_figures(fewer, more, alone=True)
    assert [each.value for each in found] == [pytest.approx(each) for each in (1.0, 100.0, 2.5, 0.4)]
    assert [each.is_met for each in found] == [True, False, False, True]
    assert len(cost_figures(fewer, more, alone=False)) == 3
    assert len(cost_figures(replace(fewer, example=None), more, alone=True)) == 2


def test_the_cost_of_a_token_is_told_once_from_the_fewest_and_the_most(monkeypatch) -> None:
    way = Way(Spread(1, 1, 1), Spread(1, 1, 1), 1, 1, 1, 1, 1, cpu_ms=1.0, exposed=Spread(1, 1, 1))

    def measured(_stage: Any, case: Case, *, is_saturated: bool = False) -> Row:
        spent = replace(way, cpu_ms={4: 1.4, 14: 9.0, 24: 3.4}[case.tokens])
        return Row(case.mode, 1, 10, case.tokens, 1, way, spent, None, 0, 0, 0, 0, is_machine_full=False)

    monkeypatch.setattr(proxy_run, "measure", measured)
    run: Any = SimpleNamespace(details={"rows": []})
    asked = {"modes": ["forward"], "concurrency": [1], "prompt_tokens": [10], "tokens": [4, 24, 14], "requests": 1}
    found = [figure for step in proxy_run.steps_of(run, None, **asked) for figure in step.call()]  # type: ignore[arg-type]
    assert [each.value for each in found if "per token" in each.name] == [pytest.approx(100.0)] * 2
    assert len({each.name for each in found}) == len(found)


def test_cores_that_were_hardly_busy_are_not_zero() -> None:
    spent = _Spent(wall_s=36_000.0, client_s=0.9, proxy_s=1.8, engine_s=2.7, machine_s=36_000.0)
    way = spent.way([Answer("a", 1.0, [1.0], 2.0, "", "r", 1, 2, 0)])
    assert (way.client_cores, way.proxy_cores, way.engine_cores, way.machine_cores) == (2.5e-5, 5e-5, 7.5e-5, 1.0)


def test_cpu_time_is_that_of_the_process() -> None:
    clock = CpuClock(os.getpid())
    machine = machine_seconds()
    before = time.process_time()
    found = clock.seconds()
    while time.process_time() - before < 0.1:
        sum(range(10_000))
    assert before <= found <= time.process_time()
    assert clock.seconds() - found >= 0.09
    assert machine_seconds() - machine >= 0.05
    with pytest.raises(OSError, match="process 4194305"):
        CpuClock(4_194_305)  # beyond the largest id that Linux gives
