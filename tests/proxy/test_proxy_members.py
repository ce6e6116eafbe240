"""Engines that are drained, that come back as others, that share no KV, and nodes between which nothing goes (yet)."""

import asyncio
import json
import logging
import re
import ssl

import pytest
from engine_standin import StandIn
from proxy_harness import BODY, CHAT, COMPLETIONS, TALK, cluster, until, within
from remote_bed import signed

from pdx.errors import ConfigError
from pdx.proxy.leg import engine_tls

PATIENT = {"named": False, "heartbeat_timeout_s": 600.0}


def of(*engines):
    """As a node reports stand-ins: a name begins with p or d."""
    return [(each.name, {"p": "prefill", "d": "decode"}[each.name[0]], each.url) for each in engines]


async def ready(made, *engines):
    for engine in engines:
        await made.metric_reaches(1, "pdx_proxy_engine_ready", url=engine.url)


async def health(made):
    return json.loads((await made.get("/health"))[1])


def naming(layout, **fields):
    return layout.encode() * 16, {"model": "m", "dtype": "bf16", **fields}


async def test_engines_of_two_layouts_are_no_pair_and_a_sentence_says_why(caplog):
    caplog.set_level(logging.INFO, "pdx.proxy")
    async with cluster(**PATIENT) as made:
        p, d = made.prefill, made.decode
        wide, narrow = naming("w", block_tokens="32"), naming("n", block_tokens="16")
        await made.node.report(*of(p, d), naming=[wide, narrow])
        await ready(made, p, d)
        why = (
            f"engine p0 at {p.url} (prefill, model hash, node node) and engine d0 at {d.url} (decode, model hash, node "
            "node) share no KV: block_tokens '32' and '16' (--block-size)"
        )
        assert (await health(made))["apart"] == [why]
        await until(lambda: [each.message for each in caplog.records].count(why) == 1, 1.0)
        status, headers, _ = await made.post(CHAT, TALK)
        assert (status, headers["x-pdx-mode"], len(p.seen), len(d.seen)) == (200, "alone", 0, 1)
        assert await made.metric("pdx_proxy_fallbacks_total", reason="layouts") == 1
        assert any(each.message == f"a request is served by one engine alone: {why}" for each in caplog.records)
        await made.node.report(*of(p, d), naming=narrow)
        await until(lambda: _served_by_two(made))
        assert "apart" not in await health(made)


async def _served_by_two(made):
    return (await made.post(CHAT, TALK))[1]["x-pdx-mode"] == "sampled"


async def test_an_engine_that_is_drained_finishes_and_gets_no_more():
    async with cluster(decodes=2, **PATIENT) as made:
        engines = of(made.prefill, *made.decodes)
        first, second = made.decodes
        await made.node.report(*engines)
        await ready(made, made.prefill, first, second)
        first.fault = "hold"
        while not first.seen:
            under_way = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "best_of": 2}))
            await until(lambda task=under_way: task.done() or first.seen)
        await made.node.report(*engines, draining={"d0"})
        await made.metric_reaches(3, "pdx_proxy_reports_total")
        seen = len(second.seen)
        for _ in range(6):
            assert (await made.post(CHAT, TALK))[0] == 200
        assert (len(first.seen), len(second.seen)) == (1, seen + 6)
        first.released.set()
        assert (await within(under_way))[0] == 200
        await made.node.report(*engines)
        await made.metric_reaches(4, "pdx_proxy_reports_total")
        for _ in range(4):
            await made.post(CHAT, TALK)
        assert len(first.seen) > 1


async def test_an_engine_that_comes_back_with_another_model_serves_that():
    """Its list was believed until it was asked for the next time, in half a minute."""
    async with cluster(decodes=2, prefills=0, models={"d0": ["a"], "d1": ["b"]}, **PATIENT) as made:
        changed, gone = made.decodes
        await made.node.report(*of(changed, gone))
        await ready(made, changed, gone)
        assert (await made.post(COMPLETIONS, {**BODY, "model": "a"}))[0] == 200
        changed.models_served = ["b"]
        await gone.stop()
        await made.node.report(("d0-anew", "decode", changed.url), *of(gone))

        async def is_served():
            return (await made.post(COMPLETIONS, {**BODY, "model": "b"}))[0] == 200

        await until(is_served, 5.0)
        assert len(changed.seen) >= 2


async def test_a_pair_between_which_a_probe_has_gone_is_taken_first():
    async with cluster(decodes=2, **PATIENT) as made:
        near, far = made.decodes
        nodes = {name: made.other_node(name) for name in ("a", "b", "c")}
        await nodes["b"].report(*of(near))
        await nodes["c"].report(*of(far))
        await nodes["a"].report(*of(made.prefill), reaches=["c"])
        await ready(made, made.prefill, near, far)
        told = await health(made)
        assert (told["pairs"], told["not_reached"]) == (1, ["a > b"])
        for _ in range(4):
            assert (await made.post(CHAT, TALK))[1]["x-pdx-mode"] == "sampled"
        assert (len(near.seen), len(far.seen)) == (0, 4)
        await nodes["a"].report(*of(made.prefill), reaches=["b", "c"])
        await until(lambda: _all_are_reached(made))
        for _ in range(4):
            await made.post(CHAT, TALK)
        assert len(near.seen) >= 2


async def _all_are_reached(made):
    told = await health(made)
    return told["pairs"] == 2 and "not_reached" not in told


# ---- what whoever runs a proxy is told of its engines --------------------------------------------


async def test_the_log_says_who_is_there_and_who_is_gone(caplog):
    caplog.set_level(logging.INFO, "pdx.proxy")

    def said():
        return [record.message for record in caplog.records if record.name == "pdx.proxy.engines"]

    async with cluster(named=False, heartbeat_timeout_s=60.0, node="alpha", models={"d0": ["m", "adapter"]}) as made:
        p, d = made.prefill.url, made.decode.url
        await made.node.report(("p", "prefill", p), ("d", "decode", d))
        found = {
            "joined: node alpha",
            f"joined: engine p at {p} (prefill, model hash, node alpha)",
            f"joined: engine d at {d} (decode, model m, adapter, node alpha)",
        }
        await until(lambda: found <= set(said()))
        made.pass_time(61.0)
        gone = f"changed: engine p at {p} (prefill, model hash, no node)"
        await until(lambda: {gone, "left: node alpha"} <= set(said()))
        assert len(said()) == len(set(said()))


async def test_where_no_engine_can_be_reached_the_answer_says_so(made, caplog):
    await made.prefill.stop()
    await made.decode.stop()
    for stream in (False, True):
        status, headers, raw = await made.post(COMPLETIONS, {**BODY, "stream": stream})
        said = "no engine that could serve this request can be reached (refused); come back later"
        assert (status, json.loads(raw)["error"]["message"]) == (503, said)
        assert 1 <= int(headers["Retry-After"]) <= 30
    assert {record.name for record in caplog.records if record.levelno == logging.WARNING} == {"pdx.proxy.app"}


async def test_without_any_engine_a_client_is_told_to_come_back():
    async with cluster(prefills=0, decodes=0) as made:
        status, headers, _ = await made.post(COMPLETIONS, BODY)
        assert (status, headers["Retry-After"]) == (503, "1")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return signed(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("trusts", ["nobody", "option", "environment"])
async def test_engines_with_tls(certificates, trusts, monkeypatch, caplog):
    ca, cert, key = certificates
    if trusts == "environment":
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        aiohttps_own = ssl.create_default_context()  # made when aiohttp is imported, before this test
        monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", aiohttps_own)
    engine = StandIn("tls")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    await engine.start(tls=tls)
    named = {"decode": (engine.url,), "engine_ca": str(ca) if trusts == "option" else ""}
    try:
        async with cluster(prefills=0, decodes=0, named=False, **named) as made:
            status, _, raw = await made.post(COMPLETIONS, BODY)
            if trusts != "nobody":
                assert status == 200
                return
            assert (status, "(tls)" in raw.decode()) == (503, True)
            assert re.search(r"engine https://\S+ \(.*\) is suspect \(.*certificate verify failed", caplog.text)
            assert "--engine-ca" in caplog.text
    finally:
        await engine.stop()


def test_a_file_that_holds_no_certificates(tmp_path):
    with pytest.raises(ConfigError, match="--engine-ca /nowhere: No such file"):
        engine_tls("/nowhere")
    (tmp_path / "ca").write_text("x")
    with pytest.raises(ConfigError, match="must hold certificates in PEM"):
        engine_tls(str(tmp_path / "ca"))
