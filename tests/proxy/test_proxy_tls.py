"""HTTPS in front of the proxy: who it is said to be, while certificates change, and strangers who never say hello."""

import asyncio
import json
import shutil
import ssl
import subprocess

import openai
import pytest
from proxy_harness import BODY, COMPLETIONS, cluster, dial, put_ahead, until, within
from proxy_process import proxy_process
from remote_bed import certificate, signed

from pdx.errors import ConfigError
from pdx.proxy import server as listener
from pdx.proxy.server import server_tls
from pdx.security import reread


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return signed(tmp_path_factory.mktemp("tls"))


def trusting(ca):
    return ssl.create_default_context(cafile=ca)


def served(certificates, **more):
    return {"served": {"tls": server_tls(str(certificates[1]), str(certificates[2])), **more}}


async def curl(*words):
    """What it prints; its status where that is not 0."""
    process = await asyncio.create_subprocess_exec("curl", "-s", "-m", "10", *words, stdout=asyncio.subprocess.PIPE)
    out, _ = await within(process.communicate())
    return process.returncode or out


async def test_streams_and_whole_answers_by_https(certificates):
    async with cluster(**served(certificates)) as made:
        assert made.url.startswith("https://")
        tls = trusting(certificates[0])
        plain = [await made.post(COMPLETIONS, {**BODY, "stream": stream}, ssl=tls) for stream in (False, True)]
        assert [status for status, _, _ in plain] == [200, 200]
        assert plain[1][2].endswith(b"data: [DONE]\n\n")
        made.decode.fault = "hang_mid"
        made.decode.closed.clear()
        leaving = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "stream": True}, ssl=tls))
        await within(made.decode.progress.wait())
        leaving.cancel()
        await within(made.decode.closed.wait())
        await until(lambda: made.proxy.drain.load == 0)


async def test_a_new_certificate_is_shown_and_a_wrong_one_is_not(certificates, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(listener, "_LOOK_S", 0.02)
    monkeypatch.setattr(reread, "SETTLE_S", 0.01)
    ca, cert, key = (shutil.copy(each, tmp_path) for each in certificates)
    other_ca, other_cert, other_key = signed(tmp_path, "other")
    tls = server_tls(str(cert), str(key))
    async with cluster(served={"tls": tls}) as made:
        host, port = made.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting(ca))

        async def is_shown(authority):
            try:
                _, probe = await asyncio.open_connection(host, int(port), ssl=trusting(authority))
            except ssl.SSLCertVerificationError:
                return False
            probe.close()
            await probe.wait_closed()
            return True

        assert (await is_shown(ca), await is_shown(other_ca)) == (True, False)
        shutil.copy(other_cert, cert)  # which has another key
        await until(lambda: "the certificate stays as it was: --tls-cert" in caplog.text)
        assert (await is_shown(ca), await is_shown(other_ca)) == (True, False)
        shutil.copy(other_key, key)
        await until(lambda: is_shown(other_ca))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")  # and connections go on
        assert b" 200 OK" in await within(reader.read())
        writer.close()


async def test_strangers_without_a_handshake_end_and_make_room(certificates, monkeypatch, caplog):
    async with cluster(**served(certificates, head_s=60.0)) as made:
        tls = trusting(certificates[0])
        assert (await made.post(COMPLETIONS, BODY, ssl=tls))[0] == 200  # its connection is idle, and older
        silent = [await dial(made.url.removeprefix("https://")) for _ in range(8)]
        monkeypatch.setattr(listener, "MOST", 0)
        newcomer, other = await dial(made.url.removeprefix("https://"))
        assert await within(silent[0][0].read()) == b""
        assert "connections without a TLS handshake are closed for new ones" in caplog.text
        monkeypatch.setattr(listener, "MOST", 1 << 14)
        assert (await made.post(COMPLETIONS, BODY, ssl=tls))[0] == 200
        put_ahead(60)
        for reader, _ in (*silent[1:], (newcomer, other)):
            assert await within(reader.read()) == b"", "a handshake has as long as a request's head"
        for _, writer in (*silent, (newcomer, other)):
            writer.close()
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 4096):
            reader, writer = await dial(made.url.removeprefix("https://"))
            writer.write(nonsense)
            await within(reader.read())
            writer.close()
        assert (await made.post(COMPLETIONS, BODY, ssl=tls))[0] == 200
        assert "Traceback" not in caplog.text


async def test_strangers_hold_little_memory_and_keep_nobody_out(certificates, monkeypatch):
    """asyncio sets 256 KiB aside for each connection, before a stranger has said a word."""
    monkeypatch.setattr(listener, "HANDSHAKES", 8)
    async with cluster(**served(certificates)) as made:
        tls = trusting(certificates[0])
        assert (await made.post(COMPLETIONS, BODY, ssl=tls))[0] == 200
        silent = [await dial(made.url.removeprefix("https://")) for _ in range(20)]
        for reader, _ in silent[:12]:
            assert await within(reader.read()) == b""
        assert (await made.post(COMPLETIONS, BODY, ssl=tls))[0] == 200
        assert await made.metric("pdx_proxy_events_total", event="connections_displaced") == 12
        for _, writer in silent:
            writer.close()
        assert asyncio.sslproto.SSLProtocol.max_size == 64 << 10


def test_files_that_are_wrong(certificates, tmp_path):
    ca, cert, key = map(str, certificates)
    with pytest.raises(ConfigError, match="--tls-cert /nowhere, .* No such file"):
        server_tls("/nowhere", key)
    with pytest.raises(ConfigError, match=rf"--tls-cert \(not given\), --tls-key {key}: these must be"):
        server_tls("", key)
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        server_tls(ca, key)
    open_to_all = tmp_path / "key"
    shutil.copy(key, open_to_all)
    open_to_all.chmod(0o644)
    with pytest.raises(ConfigError, match=f"--tls-key {open_to_all} has mode 0644"):
        server_tls(cert, str(open_to_all))
    locked = tmp_path / "locked"
    command = f"openssl rsa -aes128 -passout pass:secret -in {key} -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(ConfigError, match="without a password"):
        server_tls(cert, str(locked))
    both = tmp_path / "both"
    both.write_bytes(b"".join(each.read_bytes() for each in certificates[1:]))
    both.chmod(0o600)
    assert server_tls(str(both), "").value


async def test_curl_and_the_openai_client_at_several_workers(tmp_path):
    cert, key = certificate(tmp_path)
    options = ("--workers", "2", "--tls-cert", str(cert), "--tls-key", str(key))
    async with proxy_process(tmp_path, *options, ca=cert) as made:
        for _ in range(4):
            assert json.loads(await curl("--cacert", str(cert), f"{made.url}/health"))["status"] == "ok"
        assert await curl(f"{made.url}/health") == 60  # it trusts nobody
        assert await curl(made.url.replace("https", "http") + "/health") in (52, 56)
        assert await curl("--cacert", str(cert), "--tls-max", "1.1", f"{made.url}/health") == 35
        web = openai.DefaultAsyncHttpxClient(verify=trusting(cert))
        async with openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="x", max_retries=0, http_client=web) as client:
            answer = await client.completions.create(model="hash", prompt="beta", max_tokens=4)
            assert answer.usage.completion_tokens == 4
            events = await client.completions.create(model="hash", prompt="beta", max_tokens=4, stream=True)
            assert len([event async for event in events]) > 1
