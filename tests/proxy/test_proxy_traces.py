"""Traces of requests, as a collector gets them: spans of one trace with the engines', and no word of the request."""

import asyncio
import json
import socket
import sys
import time

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from otlp_receiver import receiving_grpc, receiving_http
from proxy_harness import BODY, CHAT, COMPLETIONS, TALK, cluster, until
from proxy_process import proxy_process

from pdx.errors import ConfigError
from pdx.proxy import traces
from pdx.proxy.app import Proxy
from pdx.proxy.config import ProxyConfig
from pdx.proxy.traces import chosen
from pdx.telemetry import otlp
from pdx.telemetry.env import Env
from pdx.telemetry.otlp import Collector
from pdx.telemetry.span import Span
from pdx.wire.messages import Mark

THEIRS, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, LEFT_OUT = (f"00-{THEIRS}-{PARENT}-{flags}" for flags in ("01", "00"))
ROOT = f"POST {COMPLETIONS}"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Spans are sent by HTTP, which leaves nothing open, and without much delay."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr(traces, "LINGER_S", 0.05)


def sent_to(engine):
    """The `traceparent` of its last request, in parts."""
    return engine.seen[-1][2].get("traceparent", "").split("-")


async def trace_of(receiver, name=ROOT, count=1):
    """The spans of the last of so many requests, by name, when all have come: they come together."""
    await until(lambda: len(receiver.named(name)) >= count)
    return receiver.of(receiver.named(name)[-1].trace)


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [(COMPLETIONS, {**BODY, "stream": True}, "text_completion"), (CHAT, TALK, "chat")],
)
async def test_legs_are_parts_of_the_request_and_parents_of_what_engines_do(path, body, operation):
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url) as made:
        begun_ns = time.time_ns()
        status, headers, _ = await made.post(path, {**body, "model": "hash"})
        ended_ns = time.time_ns()
        spans = await trace_of(receiver, f"POST {path}")
        root, prefill, decode = (spans[name] for name in (f"POST {path}", "pdx.prefill", "pdx.decode"))
        assert status == 200
        assert root.service == "pdx-proxy"
        assert (root.kind, prefill.kind, decode.kind) == ("SERVER", "CLIENT", "CLIENT")
        assert root.parent == ""
        assert prefill.parent == decode.parent == root.id
        for leg, engine in ((prefill, made.prefill), (decode, made.decode)):
            assert sent_to(engine) == ["00", root.trace, leg.id, "01"]
            assert begun_ns <= root.start_ns <= leg.start_ns <= leg.end_ns <= root.end_ns <= ended_ns
            assert (leg.attributes["server.address"], leg.attributes["server.port"]) == (
                "127.0.0.1",
                int(engine.url.rpartition(":")[2]),
            )
        about = root.attributes
        assert about["gen_ai.operation.name"] == operation
        assert about["gen_ai.request.model"] == "hash"
        assert about["gen_ai.request.stream"] is bool(body.get("stream"))
        assert about["gen_ai.usage.input_tokens"] > 0
        assert about["pdx.transfer"] == headers["x-pdx-transfer-id"]
        assert (about["pdx.outcome"], about["http.response.status_code"]) == ("ok", 200)
        assert ("gen_ai.response.time_to_first_chunk" in about) is bool(body.get("stream"))
        assert [name for name, *_ in root.events][0] == "prefill_sent"
        known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
        assert {name for name in about if name.startswith("gen_ai.")} <= known


async def test_a_clients_trace_goes_on():
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url, otlp_traces_sample=0.0) as made:
        await made.post(COMPLETIONS, BODY, headers={"traceparent": SAMPLED, "tracestate": "a=1"})
        spans = await trace_of(receiver)
        assert (spans[ROOT].trace, spans[ROOT].parent) == (THEIRS, PARENT)
        for engine in (made.prefill, made.decode):
            assert sent_to(engine)[1] == THEIRS
            assert engine.seen[-1][2]["tracestate"] == "a=1"


async def test_what_is_not_sampled_is_told_to_nobody_and_engines_hear_so():
    """Else an engine, which hears of no decision, would sample all."""
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url, otlp_traces_sample=0.0) as made:
        for said in ({"traceparent": LEFT_OUT}, {}):
            await made.post(COMPLETIONS, BODY, headers=said)
            for engine in (made.prefill, made.decode):
                assert sent_to(engine)[3] == "00"
                assert (sent_to(engine)[1] == THEIRS) is bool(said)
        await made.post(COMPLETIONS, BODY, headers={"traceparent": SAMPLED})  # behind the others
        await trace_of(receiver)
        assert {each.trace for each in receiver.spans} == {THEIRS}


async def test_what_is_no_trace_begins_a_new_one():
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url) as made:
        await made.post(COMPLETIONS, BODY, headers={"traceparent": "nonsense", "tracestate": "a=1"})
        spans = await trace_of(receiver)
        assert spans[ROOT].parent == ""
        for engine in (made.prefill, made.decode):
            assert sent_to(engine)[1] == spans[ROOT].trace
            assert "tracestate" not in engine.seen[-1][2]


def test_what_is_told_of_a_trace_is_taken_as_far_as_it_is_known():
    for more in ("", "-more"):  # of a version to come
        assert chosen(f"01-{THEIRS}-{PARENT}-01{more}", 0.0) == (int(THEIRS, 16), int(PARENT, 16), 1)
    for said in (
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{THEIRS}-{'0' * 16}-01",
        f"ff-{THEIRS}-{PARENT}-01",
        f"00-{THEIRS}-{PARENT}-01-more",
        f"00-{THEIRS.upper()}-{PARENT}-01",
        f"00-{THEIRS}-{PARENT}-1",
    ):
        number, parent, _ = chosen(said, 1.0)
        assert (number != int(THEIRS, 16), parent) == (True, 0), said


def test_others_choose_the_same_traces():
    """Who samples by the number of a trace, as OpenTelemetry's own sampler does."""
    sampler = TraceIdRatioBased(0.25)
    made = [chosen("", 0.25) for _ in range(2000)]
    for number, _, flags in made:
        assert flags == (sampler.should_sample(None, number, "").decision is not Decision.DROP)
    assert 300 < sum(flags for *_, flags in made) < 700


async def test_without_an_endpoint_clients_traces_go_to_engines_as_they_are():
    async with cluster() as made:
        await made.post(COMPLETIONS, BODY, headers={"traceparent": SAMPLED})
        assert "-".join(sent_to(made.prefill)) == "-".join(sent_to(made.decode)) == SAMPLED


async def test_what_nodes_tell_of_a_transfer_is_in_its_trace(monkeypatch):
    monkeypatch.setattr(traces, "LINGER_S", 600.0)
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url) as made:
        transfer = (await made.post(COMPLETIONS, BODY))[1]["x-pdx-transfer-id"]
        seen = {each["event"]: each["at_ns"] for each in (await made.timeline(transfer))["moments"]}
        begun_ns, at = seen["received"], (seen["done"] - seen["received"]) // 8

        def mark(event, eighths, **more):
            return Mark(transfer, event, begun_ns + at * eighths, **more)

        told = [
            *(mark("admitted", 2, tokens=7, engine="p"), mark("prefill_end", 4, engine="p")),
            *(mark("landed", 5, nbytes=9), mark("landed", 6, nbytes=2)),
            *(mark("runnable", 7, engine="d"), mark("anything", 3)),
            Mark(transfer, "load_end", (1 << 62)),
            Mark(transfer, "load_start", 0),
        ]
        reports = await made.metric("pdx_proxy_reports_total")
        await made.node.report(marks=told)
        await made.metric_reaches(reports + 1, "pdx_proxy_reports_total")
        assert receiver.spans == [], "nodes have time to tell"
        monkeypatch.setattr(traces, "LINGER_S", 0.0)
        spans = await trace_of(receiver)
        push, handoff, root = spans["pdx.push"], spans["pdx.handoff"], spans[ROOT]
        assert (push.parent, handoff.parent) == (spans["pdx.prefill"].id, root.id)
        assert (push.end_ns - push.start_ns, handoff.end_ns - handoff.start_ns) == (4 * at, 3 * at)
        assert push.attributes == {"pdx.bytes": 11}
        told_of = {name: about for name, _, about in root.events}
        assert told_of["admitted"] == {"pdx.tokens": 7, "pdx.engine": "p"}
        assert "anything" not in told_of
        assert all(root.start_ns <= at_ns <= time.time_ns() for _, at_ns, _ in root.events), "whatever nodes say"


async def test_legs_that_fail_say_why_and_others_follow_them():
    async with receiving_http() as receiver, cluster(decodes=2, otlp_traces_endpoint=receiver.url) as made:
        for each in made.decodes:
            each.fault = 500
        assert (await made.post(COMPLETIONS, BODY))[0] == 200
        root = (await trace_of(receiver))[ROOT]
        *failed, last = receiver.named("pdx.decode")
        assert [(each.is_error, each.attributes["error.type"]) for each in failed] == [(True, "status_5xx")] * 2
        assert {each.attributes["pdx.engine"] for each in failed} == {"d0", "d1"}
        assert (last.is_error, last.attributes["pdx.engine"], root.is_error) == (False, "p0", False)
        assert {each.parent for each in (*failed, last)} == {root.id}
        assert {sent_to(each)[2] for each in made.decodes} == {each.id for each in failed}


async def test_requests_that_are_refused_or_fail():
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url) as made:
        assert (await made.post(COMPLETIONS, [1]))[0] == 400
        spans = await trace_of(receiver)
        assert list(spans) == [ROOT]
        assert (spans[ROOT].attributes["http.response.status_code"], spans[ROOT].is_error) == (400, False)
        made.prefill.fault = made.decode.fault = 500
        assert (await made.post(COMPLETIONS, {**BODY, "model": "hash"}))[0] == 500
        root = (await trace_of(receiver, count=2))[ROOT]
        assert (root.is_error, root.attributes["error.type"]) == (True, "engine_error")
        assert "gen_ai.request.model" not in root.attributes, "no engine knew it, perhaps"
        made.prefill.fault = made.decode.fault = None
        made.decode.fault = "hold"
        task = asyncio.create_task(made.post(COMPLETIONS, {**BODY, "stream": True}))
        await until(lambda: len(made.decode.seen) > 1)
        task.cancel()
        root = (await trace_of(receiver, count=3))[ROOT]
        assert (root.attributes["pdx.outcome"], root.is_error) == ("client_gone", False)
        made.decode.released.set()


async def test_the_wait_for_a_turn_is_a_span():
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url, max_concurrent=1) as made:
        made.decode.fault = "hold"
        tasks = [asyncio.create_task(made.post(COMPLETIONS, BODY)) for _ in range(2)]
        await until(lambda: made.proxy.admission.waiting == 1)
        held_ns = time.time_ns()
        made.decode.released.set()
        assert [status for status, *_ in await asyncio.gather(*tasks)] == [200, 200]
        await trace_of(receiver, count=2)
        first, last = sorted(receiver.named("pdx.queue"), key=lambda each: each.end_ns)
        assert first.end_ns <= held_ns <= last.end_ns
        assert {first.parent, last.parent} == {each.id for each in receiver.named(ROOT)}


async def test_no_word_of_a_request_is_in_its_trace():
    secret = "sesame"
    body = {**BODY, "prompt": f"the {secret}", "user": secret, "stop": [secret], "metadata": {secret: secret}}
    talk = {**TALK, "messages": [{"role": "user", "content": secret}], "session_id": secret, "model": secret}
    named = {"X-Request-Id": secret, "X-Session-ID": secret, "tracestate": f"{secret}=1", "User-Agent": secret}
    headers = {**named, "Authorization": f"Bearer {secret}", "Cookie": secret}
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url) as made:
        for path, asked in (
            (COMPLETIONS, body),
            (COMPLETIONS, {**body, "stream": True}),
            (CHAT, talk),
            ("/v1/responses", {"input": secret, "previous_response_id": secret}),
            ("/tokenize", {"prompt": secret}),
            (f"/v1/responses/{secret}/cancel?{secret}={secret}", {}),
        ):
            await made.post(path, asked, headers=headers)
        await until(lambda: len([each for each in receiver.spans if each.name.startswith("POST ")]) == 6)
        assert secret.encode() in json.dumps(made.prefill.bodies).encode()
        assert not [raw for raw in receiver.raw if secret.encode() in raw]


async def test_a_requests_line_in_the_log_names_its_trace(caplog):
    async with receiving_http() as receiver, cluster(otlp_traces_endpoint=receiver.url) as made:
        with caplog.at_level("INFO", "pdx.proxy.requests"):
            await made.post(COMPLETIONS, BODY)
        assert f"trace={(await trace_of(receiver))[ROOT].trace}" in caplog.text


# ---- collectors that do not answer ---------------------------------------------------------------


def span(number):
    return Span("x", 1, number + 1, 0, 1, 2, {})


class Silent:
    """Takes connections, and never answers."""

    def __enter__(self):
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1/traces"
        return self

    def __exit__(self, *error):
        self.socket.close()


async def test_spans_that_nobody_takes_are_bounded_and_counted():
    async with receiving_http() as receiver:
        collector = Collector(receiver.url, "x")
        collector.give(map(span, range(21_000)))  # the loop does not run: nobody answers
        assert 21_000 - collector.dropped <= otlp.MAX_QUEUE + 1000, "what waits, and what is on its way"
        await until(lambda: collector.sent + collector.dropped == 21_000)
        assert len(receiver.spans) == collector.sent
        await asyncio.to_thread(collector.close)


async def test_neither_requests_nor_the_end_wait_for_a_collector(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_QUEUE", 4)
    monkeypatch.setattr(otlp, "CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with Silent() as silent:
        async with cluster(otlp_traces_endpoint=silent.url) as made:
            for _ in range(8):
                assert (await made.post(COMPLETIONS, BODY))[0] == 200
            await made.metric_reaches(8, "pdx_proxy_events_total", event="spans_dropped")
            assert await made.metric("pdx_proxy_events_total", event="spans_sent") == 0
            begun = time.monotonic()
        assert time.monotonic() - begun < otlp.CLOSE_S + 8


async def test_what_a_collector_took_and_what_it_refused_is_counted():
    async with receiving_http() as receiver:
        for url, what in ((receiver.url, "sent"), (receiver.url.replace("/v1/traces", "/none"), "failed")):
            async with cluster(otlp_traces_endpoint=url) as made:
                await made.post(COMPLETIONS, BODY)
                await made.metric_reaches(3, "pdx_proxy_events_total", event=f"spans_{what}")


async def test_what_waits_for_its_nodes_word_is_sent_at_the_end(monkeypatch):
    monkeypatch.setattr(traces, "LINGER_S", 600.0)
    monkeypatch.setattr(traces, "MAX_LINGERING", 2)
    async with receiving_http() as receiver:
        async with cluster(otlp_traces_endpoint=receiver.url) as made:
            for _ in range(3):
                await made.post(COMPLETIONS, BODY)
            await trace_of(receiver)
            assert len(receiver.named(ROOT)) == 1, "the oldest makes room"
        assert len(receiver.named(ROOT)) == 3


# ---- what is to be installed and said ------------------------------------------------------------


def test_a_proxy_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "pdx.telemetry.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint http://x: .*opentelemetry.*pip install"):
        Proxy(ProxyConfig(otlp_traces_endpoint="http://x"), Env())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke", "'smoke': known are grpc and http/protobuf"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", str(otlp.MAX_QUEUE + 1), "--otlp-traces-endpoint http://x: .*less than"),
    ],
)
def test_a_setting_that_is_none_is_refused(monkeypatch, name, value, why):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://x")
    with pytest.raises(ConfigError, match=why):
        Proxy(ProxyConfig(), Env())


async def test_workers_send_by_grpc(tmp_path, monkeypatch):
    """As vLLM does."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    with receiving_grpc() as receiver:
        async with proxy_process(tmp_path, "--otlp-traces-endpoint", receiver.url, "--workers", "2") as made:
            made.process.terminate()
            await asyncio.wait_for(made.process.wait(), 60)
            await until(lambda: receiver.named(ROOT), 60)
    assert {each.service for each in receiver.spans} == {"ours"}
