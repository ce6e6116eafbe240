"""An engine's own traces have what PDX did for a request, where the request is in one."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from toy_engine import CHUNK, Engines, Request, decode_of, prefill_of, tokens

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
LEFT_OUT = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[ReadableSpan]]:
    """The spans that were sent, with the provider that vLLM sets where it traces."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(opentelemetry.trace, "get_tracer", provider.get_tracer)
    return lambda: list(exporter.get_finished_spans())


def traced(prompt: list[int], headers: Any, params: Any = None) -> Request:
    request = Request(secrets.token_hex(4), prompt, params)
    request.trace_headers = headers
    return request


def test_questions_and_loads_are_in_their_requests_trace(engines: Engines, told: Any) -> None:
    first, second = engines(), engines()
    prompt, transfer = tokens(1, 2 * CHUNK), "transfer-" + "x" * 20
    first.finish(first.save(prompt, prefill_of(transfer)))
    request = traced([*prompt, 7], SAMPLED, decode_of(transfer, prefill_tokens=len(prompt)))
    assert second.admit(request) == set()
    assert request.num_computed == len(prompt)
    second.finish(request)
    lookup, load = told()
    assert (lookup.name, load.name) == ("pdx.lookup", "pdx.load")
    for each in (lookup, load):
        assert f"{each.context.trace_id:032x}" == TRACE
        assert f"{each.parent.span_id:016x}" == PARENT
        assert each.attributes == {"pdx.tokens": len(prompt), "pdx.transfer": transfer}
        assert each.status.is_unset
    assert lookup.start_time <= lookup.end_time <= load.end_time
    assert lookup.end_time <= load.start_time + 10**6, "a clock each"


@pytest.mark.parametrize("headers", [None, {}, LEFT_OUT, {"traceparent": "nonsense"}, {"tracestate": "a=1"}])
def test_a_request_that_is_not_traced_tells_nothing(engines: Engines, told: Any, headers: Any) -> None:
    first, second = engines(), engines()
    first.run(tokens(2, 2 * CHUNK))
    engines.node.wait_sealed(2)
    request = traced(tokens(2, 2 * CHUNK), headers)
    assert second.admit(request) == set()
    assert request.num_computed
    second.finish(request)
    assert told() == []


def test_a_load_that_failed_says_so(engines: Engines, told: Any) -> None:
    first, second = engines(), engines()
    first.run(tokens(3, 2 * CHUNK))
    engines.node.wait_sealed(2)
    request = traced(tokens(3, 2 * CHUNK), SAMPLED)
    second.allocate(request, second.match(request))
    second.scheduler.load_failed(request.request_id)
    second.finish_load(request)
    second.finish(request)
    assert [(each.name, each.status.is_unset) for each in told()] == [("pdx.lookup", True), ("pdx.load", False)]
