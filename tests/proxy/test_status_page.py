"""The status page: what its document says, who may see it, what it costs, and how it looks in a browser.

`pytest -s tests/proxy/test_status_page.py -k large` prints the numbers of docs/numbers.md.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
import sys
import time
from unittest import mock

import aiohttp
import msgspec
import pytest
from cache_stage import TOKEN
from chromium import CHROMIUM, tab
from proxy_harness import BODY, COMPLETIONS, cluster, until
from status_stage import HOSTILE, MS, serving

from pdx.proxy import status
from pdx.proxy.plan import Mode
from pdx.proxy.routes import Route
from pdx.proxy.timelines import KEPT, LAST, Timeline, Timelines
from pdx.telemetry.timeline import Event, Moment, phases
from pdx.wire.overview import Overview
from pdx.wire.status import ArenaStatus, NodeStatus, PeerStatus, TierStatus

MOST_BYTES = 200_000  # of page and document together, as they come


async def told(url, *, token="", accepts="identity"):
    headers = {"Accept-Encoding": accepts, **({"Authorization": f"Bearer {token}"} if token else {})}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.get(f"{url}/status.json", headers=headers) as answer,
    ):
        return answer.status, answer.headers, await answer.read()


async def page_of(url):
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer.headers, await answer.text()


async def overview(url):
    status_, _, body = await told(url)
    assert status_ == 200, body
    return msgspec.json.decode(body, type=Overview)


# ---- what it says -------------------------------------------------------------------------------


async def test_the_document_says_what_is_there():
    async with serving(nodes=7, requests=9) as stage:
        shown = await overview(stage.url)
    assert (shown.status, shown.prefillers, shown.decoders) == ("ok", 4, 3)
    first, *others = shown.nodes
    assert [node.name for node in shown.nodes] == [f"node-00{number}" for number in range(7)]
    assert [room.name for room in first.rooms] == ["memory", "disk", "remote"]
    disk = first.rooms[1]
    assert (disk.place, disk.limit_bytes, disk.state) == ("/var/cache/pdx", 400 << 30, "paused: the disk is full")
    assert disk.hits + disk.misses > 0
    assert first.found <= first.looked_up
    assert first.degraded == {"load_late": 3}
    assert [(link.channel, link.peers) for link in first.links] == [("nixl", 5), ("tcp", 1)]
    down = next(link for link in others[2].links if not link.channel)
    assert (down.peers, down.why) == (1, "node-005 is closed: it was silent for 6 s")
    engine = shown.engines[0]
    assert (engine.name, engine.role, engine.state, engine.node) == ("llama-0", "prefill", "well", "node-000")
    assert (engine.models, engine.requests, engine.tokens_s) == ("meta-llama/Llama-3.1-8B", 0, 8000)
    assert len(shown.requests) == 9
    ages = [sum(each.phases) for each in shown.requests]
    assert ages == sorted(ages, reverse=True), "the one that is under way for longest is first"
    assert all(1 <= len(each.phases) <= 4 and each.outcome == "" for each in shown.requests)
    assert {each.outcome for each in shown.ended} == {"ok"}
    assert {each.why for each in shown.fallbacks} <= {"prefill_timeout", "no_prefiller", "layouts"}


async def test_a_request_is_shown_until_it_ends_with_what_became_of_it(made):
    made.prefill.fault, made.decode.fault = 503, "hold"
    body = {**BODY, "prompt": "a secret of the client", "stream": True, "user": "mallory"}
    asked = asyncio.create_task(made.post(COMPLETIONS, body, headers={"X-Session-ID": "s3cret"}))

    async def is_under_way():
        made.pass_time(status.FRESH_S)
        return (await overview(made.admin)).fallbacks

    await until(is_under_way)
    _, _, raw = await told(made.admin)
    assert not any(word in raw for word in (b"secret", b"s3cret", b"mallory"))
    shown = msgspec.json.decode(raw, type=Overview)
    [request], [fallback] = shown.requests, shown.fallbacks
    assert (request.mode, request.why, request.outcome) == ("alone", "prefill_status_503", "")
    assert (fallback.id, fallback.why) == (request.id, "prefill_status_503")
    made.decode.released.set()
    assert (await asked)[0] == 200
    made.pass_time(status.FRESH_S)
    shown = await overview(made.admin)
    assert (shown.requests, [each.outcome for each in shown.ended]) == ([], ["ok"])
    assert len(shown.ended[0].phases) == 4
    took = shown.ended[0].phases
    await made.post("/score", {"text_1": "a", "text_2": "b"})
    made.pass_time(status.FRESH_S)
    shown = await overview(made.admin)
    whole, before = shown.ended
    assert shown.requests == []
    assert (whole.route, before.phases) == ("whole", took), "what has ended does not go on"


def test_a_long_request_outlasts_all_that_came_after_it():
    kept = Timelines()
    first = Timeline("first", Route.COMPLETIONS, Mode.ALONE, "")
    kept.open(first)
    kept.begin(first)
    for number in range(KEPT + LAST):
        other = Timeline(str(number), Route.COMPLETIONS, Mode.ALONE, "")
        kept.open(other)
        kept.begin(other)
        kept.end(other, "ok", 1)
    assert list(kept.under_way) == [first]
    assert len(kept.ended) == LAST


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"prefill_sent": 2}, [100.0]),  # its engine has not taken it
        ({"prefill_sent": 2, "admitted": 30, "prefill_end": 60}, [30.0, 30.0, 40.0]),
        ({"prefill_sent": 2, "prefill_answered": 60}, [2.0, 58.0, 40.0]),
        ({"prefill_sent": 2, "admitted": 30, "prefill_end": 60, "decode_first": 75, "done": 90}, [30, 30, 15, 15]),
        ({"decode_sent": 3, "decode_first": 40}, [3.0, 37.0, 0.0, 60.0]),  # one engine alone
        ({"prefill_sent": 2, "admitted": 9, "decode_sent": 20, "decode_first": 40}, [9, 31, 0, 60]),  # it failed
        ({"prefill_end": 60, "runnable": 50, "done": 80}, [0.0, 60.0, 0.0, 20.0]),  # by another host's clock
    ],
)
def test_phases_follow_each_other_and_the_last_goes_on(seen, expected):
    moments = [Moment(Event.RECEIVED, 1000 * MS), *(Moment(name, (1000 + ms) * MS) for name, ms in seen.items())]
    assert phases(moments, 1100 * MS) == expected


# ---- what it costs ------------------------------------------------------------------------------


async def test_many_readers_cost_one_document_a_second():
    async with serving(nodes=3) as stage:
        answers = await asyncio.gather(*(told(stage.url) for _ in range(50)))
        assert len({body for _, _, body in answers}) == 1
        assert sorted(stage.nodes.asked) == ["node-000", "node-001", "node-002"]
        await told(stage.url)
        assert len(stage.nodes.asked) == 3
        stage.now += status.FRESH_S
        await asyncio.gather(*(told(stage.url) for _ in range(50)))
        assert len(stage.nodes.asked) == 6


async def test_a_node_that_does_not_answer_is_told_of_as_it_was():
    async with serving(nodes=3) as stage:
        before = (await overview(stage.url)).nodes
        answers = stage.nodes.answers.copy()
        stage.nodes.answers["node-001"] = None
        stage.now += status.FRESH_S
        with mock.patch.object(status, "WAIT_S", 0.2):
            first, *others = (await overview(stage.url)).nodes
        assert "has not answered for 0.2 s" in first.problem
        assert msgspec.structs.replace(first, problem="") == before[1]
        assert [each.name for each in others] == ["node-000", "node-002"]
        stage.nodes.answers = answers
        stage.now += status.FRESH_S
        assert not any(node.problem for node in (await overview(stage.url)).nodes)


async def test_of_many_nodes_some_are_asked_at_a_time_and_all_in_turn(monkeypatch):
    monkeypatch.setattr(status, "AT_A_TIME", 4)
    async with serving(nodes=10) as stage:
        shown, asked = await overview(stage.url), stage.nodes.asked
        assert len(asked) == 4
        assert all(node.rooms for node in shown.nodes), "what heartbeats say is known of all"
        for _ in range(2):
            stage.now += status.FRESH_S
            await told(stage.url)
        assert len(set(asked)) == 10
        assert len(asked) == 12


async def test_the_document_has_bounds(monkeypatch):
    for name, most in (("MOST_NODES", 2), ("MOST_ENGINES", 3), ("MOST_REQUESTS", 4)):
        monkeypatch.setattr(status, name, most)
    async with serving(nodes=60, requests=20) as stage:
        shown = await overview(stage.url)
    assert (len(shown.nodes), len(shown.engines), len(shown.requests)) == (2, 3, 4)
    assert (shown.more_nodes, shown.more_engines, shown.more_requests) == (58, 57, 16)
    assert all("is not connected" in node.problem for node in shown.nodes), "what is wrong comes first"
    assert shown.engines[0].state == "suspect"


async def test_other_requests_have_their_turn_while_a_large_one_is_made():
    async with serving(nodes=0, requests=status.MOST_REQUESTS) as stage:
        turns = 0

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        with mock.patch.object(asyncio, "to_thread", mock.AsyncMock()):  # it is not packed: nobody waits for that
            beside = asyncio.create_task(others())
            await stage.page.document()
        beside.cancel()
        assert turns >= status.MOST_REQUESTS // 20


# ---- who may see it, and what strangers' words do -----------------------------------------------


async def test_where_there_is_a_token_the_document_needs_it_and_the_page_tells_nothing(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    async with serving(nodes=2, cache_token_file=str(file)) as stage:
        for token in ("", "x" * 32):
            code, headers, body = await told(stage.url, token=token)
            assert (code, headers["WWW-Authenticate"]) == (401, 'Bearer realm="pdx"')
            assert json.loads(body)["error"]["message"]
        assert stage.nodes.asked == []
        assert (await told(stage.url, token=TOKEN))[0] == 200
        assert "node-" not in (await page_of(stage.url))[1]
        assert stage.env.counters["controllers_denied"] == 2


async def test_the_page_runs_its_own_script_and_nothing_else():
    async with serving(nodes=0, requests=0) as stage:
        headers, page = await page_of(stage.url)
    for kind in ("script", "style"):
        [part] = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in headers["Content-Security-Policy"]
    assert headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|srcdoc", page)
    assert not re.search(r"https?://|src=|@import|url\(", page), "nothing comes from elsewhere"
    assert len(page.encode()) < 40_000


async def test_strangers_words_can_be_printed_and_are_short():
    async with serving(nodes=14, requests=14, hostile=True) as stage:
        _, _, body = await told(stage.url)
    text = body.decode()
    assert text.isprintable()
    assert not re.search("x{90}", text.replace("x" * 64, ""))
    shown = msgspec.json.decode(body, type=Overview)
    assert "000<img src=x onerror=alert(1)>" in {node.name for node in shown.nodes}, "what can be printed stays"


async def test_a_model_of_half_a_character_breaks_nothing():
    async with serving(nodes=1) as stage:
        stage.health.of(stage.engines.all()[0].url).models = {"\ud800": None}
        assert (await overview(stage.url)).engines[0].models == "\\ud800"


@pytest.mark.parametrize(("number", "share"), [(-(2**63), float("nan")), (2**63 - 1, float("inf"))])
async def test_a_node_may_answer_with_whatever_numbers_it_likes(number, share):
    async with serving(nodes=1) as stage:
        stage.nodes.answers["node-000"] = NodeStatus(
            *("", 0, 0, share, number, -number - 1, {}, {}, 0, 0, number, []),
            {"hit_chunks": number, "looked_up_chunks": number, **{f"degraded_{each}": number for each in range(999)}},
            arenas=[ArenaStatus("", number, -number - 1)] * 99,
            tiers=[TierStatus("", "", used_bytes=number, limit_bytes=number, hits=number, load_gb_s=share)] * 99,
            peers=[PeerStatus("", "", "ready", "tcp", {"tcp": share}, number, number, number, number, "")] * 99,
        )
        [node] = (await overview(stage.url)).nodes
        assert node.problem == ""
        assert (len(node.degraded), len(node.rooms), len(node.links)) == (8, 8, 1)
        told = msgspec.to_builtins(node)
        numbers = [each for room in (told, *told["rooms"], *told["links"]) for each in room.values()]
        assert all(0 <= each <= 2**53 for each in numbers if isinstance(each, int | float))


# ---- in a browser -------------------------------------------------------------------------------

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
SECTIONS = "document.querySelectorAll('section').length > 4"


@in_a_browser
@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (400, True)])
async def test_a_browser_shows_strangers_words_as_words(tmp_path, width, is_dark):
    async with serving(nodes=14, requests=30, hostile=True) as stage, tab(tmp_path) as page:
        await page.looks(width=width, is_dark=is_dark)
        await page.open(stage.url)
        await page.until(SECTIONS)
        text = await page.value("document.body.textContent")
        for words in (HOSTILE[0], HOSTILE[3], "\\u202egnp.exe", "\\x1b[2J"):
            assert words in text
        assert await page.value("document.querySelectorAll('img, main script, b > b').length") == 0
        assert await page.value("document.documentElement.scrollWidth") == width, "it is not wider than the window"
        assert page.complaints == []


@in_a_browser
async def test_a_browser_shows_100_nodes_and_1000_requests_large_as_they_are(tmp_path, capsys):
    async with serving(nodes=100, requests=1000) as stage, tab(tmp_path) as page:
        began = time.perf_counter()
        _, _, plain = await told(stage.url)
        made_ms = 1000 * (time.perf_counter() - began)
        _, headers, packed = await told(stage.url, accepts="gzip, deflate")
        assert headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed) == plain
        await page.looks(width=1280)
        await page.open(stage.url)
        await page.until(SECTIONS)
        size = await page.value(
            "performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
            ".reduce((sum, each) => sum + each.transferSize, 0)"
        )
        drawn_ms = await page.value("performance.getEntriesByName('drawn')[0].startTime")
        assert await page.value("document.querySelectorAll('tbody')[0].children.length") == 20
        await page.value(
            "[...document.querySelectorAll('button')].find(each => each.textContent === 'show 1,000').click()"
        )
        assert await page.value("document.querySelectorAll('tbody')[0].children.length") == 1000
        assert page.complaints == []
        assert len(packed) < size < MOST_BYTES
    with capsys.disabled():
        sys.stdout.write(
            f"\n100 nodes, 1,000 requests: document {len(plain):,} bytes, {len(packed):,} packed, "
            f"made in {made_ms:.0f} ms; "
            f"page and document {size:,.0f} bytes; drawn {drawn_ms:.0f} ms after the request\n"
        )


@in_a_browser
async def test_a_browser_asks_for_the_token_and_does_not_go_on_with_a_wrong_one(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    (tmp_path / "browser").mkdir()
    async with serving(cache_token_file=str(file)) as stage, tab(tmp_path / "browser") as page:
        await page.open(stage.url)
        await page.until("!document.getElementById('ask').hidden")
        submit = "document.getElementById('token').value = '%s'; document.querySelector('form button').click()"
        await page.value(submit % ("x" * 32))
        await page.until("document.getElementById('said').textContent === 'The token is wrong.'")
        assert stage.env.counters["controllers_denied"] == 2
        await page.value(submit % TOKEN)
        await page.until(SECTIONS)
        assert await page.value("document.getElementById('ask').hidden")
        assert stage.env.counters["controllers_denied"] == 2


async def test_without_named_engines_and_nodes_all_is_empty():
    async with cluster(named=False, prefills=0, decodes=0) as made:
        shown = await overview(made.admin)
        assert (shown.status, shown.engines, shown.requests) == ("unavailable", [], [])
