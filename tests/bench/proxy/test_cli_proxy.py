"""`pdx bench proxy`: a real proxy in front of real stand-in engines, with few and short requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cli_process import CliProcess
from click.testing import CliRunner

from pdx.bench.harness.ask import Answer, AskFailed, ask, completion, session
from pdx.bench.harness.timing import CpuClock, Spread, machine_seconds
from pdx.bench.proxy.run import FORWARD, SAMPLED, Case, Row, Way, _Spent, cost, measure
from pdx.bench.proxy.stage import Stage
from pdx.bench.proxy.stand_in_engine import MODEL, Pace, StandInEngine
from pdx.cli.main import main

PACE = Pace(2.0, 1.0)
OPTIONS = ["--requests", "4", "--prompt-tokens", "50", "--first-ms", "2", "--pace-ms", "1"]


def bench(*options: str) -> Any:
    return CliRunner().invoke(main, ["bench", "proxy", *options])


def check_spread(found: dict[str, Any]) -> None:
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["count"] > 0


@pytest.mark.timeout(180)
def test_a_small_run_has_every_figure(place: Path) -> None:
    result = bench(*OPTIONS, "--concurrency", "1,3", "--tokens", "2,6", "--out", str(place), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert result.stdout == (place / "proxy.json").read_text()
    details = found["details"]
    assert details["is_complete"]
    assert not details["failed"]
    kinds = [(row["mode"], row["concurrency"], row["tokens"]) for row in details["rows"]]
    assert kinds == [("forward", 1, 6), ("forward", 3, 6), ("sampled", 1, 6), ("sampled", 3, 6)]
    kinds = [(row["mode"], row["concurrency"], row["tokens"]) for row in details["saturated"]]
    assert kinds == [("forward", 3, 2), ("forward", 3, 6), ("sampled", 3, 2), ("sampled", 3, 6)]
    for row in details["rows"] + details["saturated"]:
        assert row["requests"] >= 4
        assert row["cpu_ms"] > 0
        for way in (row["direct"], row["proxy"]):
            check_spread(way["ttft"])
            check_spread(way["itl"])
            assert way["itl"]["count"] == row["requests"] * (row["tokens"] - 1)
            assert way["requests_per_s"] > 0
            assert way["client_cores"] > 0
            assert way["engine_cores"] > 0
        for name in ("ttft", "itl"):
            added = row["proxy"][name]["p50_ms"] - row["direct"][name]["p50_ms"]
            assert row[f"added_{name}_p50_ms"] == pytest.approx(added, abs=0.002)
    for row in details["rows"]:
        assert row["direct"]["ttft"]["p50_ms"] >= PACE.first_ms
        assert row["proxy"]["ttft"]["p50_ms"] >= PACE.first_ms
    assert [each["mode"] for each in details["costs"]] == ["forward", "sampled"]
    assert len(found["figures"]) == 5 * 4 + 2 * 4 + 2 * 2


@pytest.mark.timeout(180)
def test_an_interrupted_run_keeps_what_was_measured(place: Path) -> None:
    slow = ["--requests", "16", "--concurrency", "1,2", "--tokens", "2,4", "--first-ms", "100", "--prompt-tokens", "50"]
    with CliProcess(place, "bench", "proxy", *slow, "--out", str(place)) as process:
        process.until("[2/8]")
        assert process.interrupt(signal.SIGTERM) == 130, process.lines
        assert not process.left_behind()
        assert "ended early" in process.output
        assert not any("Traceback" in line for line in process.lines), process.lines
    details = json.loads((place / "proxy.json").read_text())["details"]
    assert details["rows"][0]["concurrency"] == 1
    assert 1 <= len(details["rows"]) < 4
    assert details["saturated"] == []
    assert not details["is_complete"]


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


def with_engine(work: Callable[[aiohttp.ClientSession, str], Awaitable[None]], pace: Pace = PACE) -> None:
    """Run `work` with a client and the URL of a stand-in engine in this process."""

    async def run() -> None:
        runner = web.AppRunner(StandInEngine(pace).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with session() as http:
                await work(http, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

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

    with_engine(work)


def test_a_stand_in_keeps_its_pace_and_a_decode_leg_has_its_prompt_already() -> None:
    """Not before the time; how long after it, only a machine without other work could tell."""
    engine = StandInEngine(Pace(200.0, 30.0))

    def due(params: dict[str, Any], prompt_tokens: int) -> list[float]:
        moments = engine._moments(1000.0, params, prompt_tokens)
        return [round((next(moments) - 1000.0) * 1e3) for _ in range(3)]

    decode = {"do_remote_prefill": True, "prefill_tokens": 10}
    assert due({}, 10) == due({"do_remote_decode": True}, 10) == [200, 230, 260]
    assert due(decode, 11) == [30, 60, 90]  # goes on behind the first token
    assert due(decode, 10) == [0, 30, 60]  # samples it, with the prompt's KV at hand

    async def work(http: aiohttp.ClientSession, url: str) -> None:
        started_at = time.monotonic()
        answer = await ask(http, url, completion(MODEL, "x", 3), "r")
        assert (time.monotonic() - started_at) * 1e3 >= 9.0
        assert answer.ttft_ms >= 5.0
        async with http.post(f"{url}/pace", json={"first_ms": 0.0, "pace_ms": 0.0}) as response:
            assert response.status == 200
        assert len((await ask(http, url, completion(MODEL, "x", 40), "r")).itl_ms) == 39

    with_engine(work, Pace(5.0, 2.0))


def test_a_stand_in_refuses_what_is_no_prompt() -> None:
    async def work(http: aiohttp.ClientSession, url: str) -> None:
        with pytest.raises(AskFailed, match="one prompt, as text or token ids"):
            await ask(http, url, completion(MODEL, [], 3), "r")

    with_engine(work)


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
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stage = Stage(PACE, url, url, url, url, (os.getpid(), os.getpid()), os.getpid())
        try:
            wrong = replace(stage, proxy_url=f"http://127.0.0.1:{runner.addresses[0][1]}")
            with pytest.raises(RuntimeError, match="through the proxy is not the engine's"):
                await asyncio.to_thread(measure, wrong, Case(FORWARD, 1, 8, 3, 2))
            with pytest.raises(AskFailed, match="does not tell what it did with transfer ''"):
                await asyncio.to_thread(measure, stage, Case(SAMPLED, 1, 8, 3, 2))
        finally:
            await runner.cleanup()

    with_engine(work)


def test_the_cost_of_a_token_is_what_more_tokens_take() -> None:
    way = Way(Spread(1, 1, 1), Spread(1, 1, 1), 1, 1, 1, 1, 1)
    fewer = Row("forward", 1, 10, 4, 1, way, way, 0, 0, 0, 0, cpu_ms=1.4, is_machine_full=False)
    found = cost(fewer, replace(fewer, tokens=24, cpu_ms=3.4))
    assert found.cpu_us_per_token == pytest.approx(100.0)
    assert found.cpu_ms_per_request == pytest.approx(1.0)


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
