"""What whoever runs a proxy is told of its engines: which it has found, and why it cannot reach one."""

import json
import logging
import re
import ssl

import pytest
from engine_standin import StandIn
from proxy_harness import BODY, COMPLETIONS, cluster, until
from remote_bed import signed

from pdx.errors import ConfigError
from pdx.proxy.leg import engine_tls


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
