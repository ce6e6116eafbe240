"""`pdx bench proxy`: a real proxy in front of real stand-in engines, with few and short requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from pdx.bench.harness.ask import Answer, AskFailed, session
from pdx.bench.harness.timing import Spread
from pdx.bench.proxy.run import FORWARD, SAMPLED, Case, Row, Way, cost_figures, exposed_ms, measure
from pdx.bench.proxy.stage import Front, Stage
from pdx.bench.proxy.stand_in_engine import Pace, StandInEngine
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


def test_what_is_exposed_begins_with_the_end_of_the_requests_own_prefill_leg() -> None:
    ended = {"other": 2.0, "own": 1.2}
    answer = Answer("a", 250.0, [1.0], 300.0, "", "own", 1, 2, 1_000_000_000)
    assert exposed_ms(answer, ended) == pytest.approx(50.0)
    with pytest.raises(RuntimeError, match="request unknown was answered, and no prefill leg of it has ended"):
        exposed_ms(replace(answer, request_id="unknown"), ended)


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
        stage = Stage(PACE, url, url, Front(url, url, os.getpid()))
        async with serving(app) as other_url:
            wrong = replace(stage, proxy=Front(other_url, url, os.getpid()))
            with pytest.raises(RuntimeError, match=r"through the proxy \(proxy\) is not the engine's"):
                await asyncio.to_thread(measure, wrong, Case(FORWARD, 1, 8, 3, 2))
            with pytest.raises(AskFailed, match="does not tell what it did with transfer ''"):
                await asyncio.to_thread(measure, stage, Case(SAMPLED, 1, 8, 3, 2))

    with_engine(work)


def test_the_cost_of_a_token_is_what_more_tokens_take() -> None:
    way = Way(Spread(1, 1, 1), Spread(1, 1, 1), 1, cpu_ms=1.4, exposed=None)
    fewer = Row("forward", 1, 10, 4, 1, way, way, way, 0, 0, 0, 0)
    more = replace(fewer, tokens=24, proxy=replace(way, cpu_ms=3.4), example=replace(way, cpu_ms=6.4))
    found = cost_figures(fewer, more, alone=True)
    assert [each.value for each in found] == [pytest.approx(each) for each in (1.0, 100.0, 2.5, 0.4)]
    assert [each.is_met for each in found] == [True, False, False, True]
    assert len(cost_figures(fewer, more, alone=False)) == 3
    assert len(cost_figures(replace(fewer, example=None), more, alone=True)) == 2
