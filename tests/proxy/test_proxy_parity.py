"""`pdx parity` against the proxy: nothing differs from an engine that is asked directly, and what does is named."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from engine_standin import Server, StandIn
from proxy_harness import COMPLETIONS, cluster

from pdx.bench.parity import run
from pdx.bench.parity.asking import connected
from pdx.bench.parity.cases import HIDDEN, disconnects
from pdx.bench.parity.reasons import REASONS
from pdx.bench.parity.records import Recording, Way
from pdx.cli.main import main
from pdx.proxy.routes import GENERATING, PASSED, RESPONSE

ROOT = Path(__file__).resolve().parents[2]
# What the stand-in engine does as vLLM does it.
DONE = {
    "usual",
    "seeded",
    "stop",
    "stop-text",
    "least",
    "usage",
    "usage-each",
    "ignore-eos",
    "logprobs",
    "model-unknown",
}
DONE |= {"limit-1", "limit-2", "limit-40", "limit-text"}


def is_done(case):
    endpoint, _, name = case.name.partition(" ")
    name = name.removesuffix(" streamed")
    if endpoint in ("responses", "messages"):
        return name in ("usual", "limit-2", "limit-40")
    return endpoint in ("completions", "chats") and name in DONE


@asynccontextmanager
async def both(**settings):
    """A plain engine, a proxy before two more, and both as `pdx parity` sees them."""
    plain = StandIn("plain", settings.get("server"))
    await plain.start()
    try:
        async with cluster(**settings) as made, connected(plain.url, made.url, timeout_s=10) as servers:
            yield plain, made, *servers
    finally:
        await plain.stop()


async def cases_of(server, wanted):
    name, length = await run.facts(server)
    assert (name, length) == ("hash", 512)
    every, _ = run.pick_cases(name, length, seed=3, count=2000)
    return [case for case in every if wanted(case)]


async def verdicts_of(plain, proxy, wanted, *, concurrency=1):
    def on_done(*_):
        pass

    recording = Recording(url=plain.url, model="hash", seed=3, asked=[])
    await run.record(plain, await cases_of(plain, wanted), recording, concurrency=concurrency, on_done=on_done)
    return await run.compare(proxy, recording.asked, concurrency=concurrency, on_done=on_done)


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_the_proxy_answers_as_its_engine_does(concurrency):
    async with both() as (_, made, plain, proxy):
        verdicts = await verdicts_of(plain, proxy, is_done, concurrency=concurrency)
        assert len(verdicts) > 50
        assert {each.case.name: each.differences for each in verdicts if each.differences} == {}
        assert [each.case.name for each in verdicts if each.uncompared] == []
        assert len(made.prefill.seen) > 20, "two share most"


async def test_a_client_that_leaves_is_no_difference():
    async with both() as (_, made, plain, proxy):
        verdicts = await verdicts_of(plain, proxy, lambda case: disconnects(case) and case.endpoint == COMPLETIONS)
        assert {each.case.way for each in verdicts} == {Way.LEAVES, Way.UNREAD, Way.UNSENT}
        assert [each.differences for each in verdicts if each.differences] == []
        assert len(made.proxy.drain) == 0


async def test_every_route_of_the_proxy_is_asked():
    every, _ = run.pick_cases("m", 4096, seed=0, count=2000)
    paths = {case.path for case in every}
    wanted = {each.replace(RESPONSE, "/v1/responses/resp_none") for row in PASSED.values() for each in row}
    not_of_a_text_model = {each for each in wanted if each.endswith("render") or "systemone" in each}
    assert {*wanted, *GENERATING} - not_of_a_text_model - paths == set()
    assert any(case.endpoint == HIDDEN for case in every)


def test_each_reason_is_documented():
    page = (ROOT / "docs" / "proxy.md").read_text()
    assert [each.name for each in REASONS if f"- {each.name}: {each.sentence}\n" not in page] == []


async def command(*words, **env):
    """The exit status of `pdx parity`, and what it says."""
    done = await asyncio.to_thread(CliRunner().invoke, main, ["parity", *map(str, words)], env=env)
    return done.exit_code, done.output


async def test_the_command(tmp_path):
    """Recorded first, compared later; the exit status says whether there is a difference."""
    record, report = tmp_path / "plain.json", tmp_path / "report.json"
    only = ("--requests", 2000, "--only", "completions usual")
    async with both() as (engine, made, plain, proxy):
        status, said = await command(plain.url, "--record", record, *only)
        assert (status, said) == (0, f"2 cases are recorded in {record}\n")
        await engine.stop()
        status, said = await command(record, proxy.url)
        assert (status, "0 of 2 answers differ without a reason" in said) == (0, True), said
        made.decode.server = Server(repetition_penalty=1.3)
        status, said = await command(record, proxy.url, "--json", report)
        assert (status, "2 of 2 answers differ without a reason" in said) == (1, True), said
        assert "curl -sS -i -X POST -H 'Content-Type: application/json' --data-binary" in said
        found = json.loads(report.read_bytes())
        assert [each["name"] for each in found["cases"]] == ["completions usual", "completions usual streamed"]
        assert found["cases"][0]["differences"][0]["path"] == "body.choices[0].text"


async def test_the_clients_keys_are_for_nobody():
    """Client libraries take keys and headers from their environment, where they are for another server."""
    env = {"OPENAI_API_KEY": "theirs", "OPENAI_ORG_ID": "theirs", "OPENAI_CUSTOM_HEADERS": "x-odd: theirs"}
    env |= {"ANTHROPIC_API_KEY": "theirs", "ANTHROPIC_CUSTOM_HEADERS": "x-odd: theirs"}
    async with both() as (engine, _, plain, proxy):
        for name in ("openai chat.completions.create 1 ", "anthropic messages.create 0 "):
            pytest.importorskip(name.split()[0])
            _, said = await command(plain.url, plain.url, "--only", name, "--key", "ours", **env)
            assert "0 of 2 answers differ" in said, said
        assert len(engine.seen) == 12
        assert {headers["Authorization"] for _, _, headers in engine.seen} == {"Bearer ours"}
        assert "theirs" not in str(engine.seen)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:1",), "name a URL"),
        (("http://127.0.0.1:1", "http://127.0.0.1:1"), "no OpenAI server answers at http://127.0.0.1:1/v1/models"),
        (("none.json", "http://127.0.0.1:1"), "none.json cannot be read"),
    ],
)
async def test_what_cannot_be_asked(words, said):
    status, output = await command(*words)
    assert status == 1
    assert said in output
    assert "Traceback" not in output
