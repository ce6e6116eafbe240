"""One trace of a request through the proxy: ours and vLLM's own spans, from engines that trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import completion, text
from http_client import post
from otlp_receiver import Receiver, receiving_grpc
from pair import ENGINE_FLAGS, Pair

from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving_grpc() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(collector: Receiver, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Pair]:
    """A pair with a node each, all of which trace what they are asked to."""
    option = ["--otlp-traces-endpoint", collector.url]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setattr("pair.ENGINE_FLAGS", [*ENGINE_FLAGS, *option])
        pair = Pair(tmp_path_factory.mktemp("t"), model, "tcp")
        try:
            pair.wait_ready()
            pair.serve_anew(*option, "--otlp-traces-sample", "0")
            pair.wait_ready()
            yield pair
        finally:
            pair.close()


def test_one_trace_has_the_proxys_the_engines_and_vllms_spans(traced: Pair, collector: Receiver) -> None:
    trace, left_out = "4bf92f3577b34da6a3ce929d0e0e4736", "5bf92f3577b34da6a3ce929d0e0e4736"
    prompts = [text(number, 600) for number in (7001, 7002)]
    for number, flags, prompt in zip((left_out, trace), ("00", "01"), prompts, strict=True):
        path, body = completion(prompt, max_tokens=8)
        post(traced.proxy.url, path, body, traceparent=f"00-{number}-00f067aa0ba902b7-{flags}")

    def of_trace() -> list[Any]:
        return [each for each in collector.spans if each.trace == trace]

    expected = ["POST /v1/completions", "llm_request", "llm_request", "pdx.decode", "pdx.handoff", "pdx.load"]
    expected += ["pdx.lookup", "pdx.lookup", "pdx.prefill", "pdx.push"]
    wait_until(lambda: len(of_trace()) >= len(expected), timeout_s=60, what="all have told of the request")
    spans = sorted(of_trace(), key=lambda each: each.name)
    assert [each.name for each in spans] == expected
    by_name = {each.name: each for each in spans}
    legs = {by_name["pdx.prefill"].id, by_name["pdx.decode"].id}
    assert {each.parent for each in spans if each.name in ("llm_request", "pdx.lookup")} == legs
    assert by_name["pdx.load"].parent == by_name["pdx.decode"].id
    assert by_name["pdx.load"].attributes["pdx.transfer"] == by_name["POST /v1/completions"].attributes["pdx.transfer"]
    assert by_name["pdx.push"].attributes["pdx.bytes"] > 0
    assert not [each for each in collector.spans if each.trace == left_out]
    assert not [raw for raw in collector.raw for prompt in prompts if prompt[:40].encode() in raw]
