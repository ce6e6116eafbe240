"""Spans of what PDX did for a request, in the request's trace, if its engine traces (vLLM: `--otlp-traces-endpoint`).

The engine's own provider sends them, with the engine's own spans.
"""

from __future__ import annotations

import time

from pdx.engine.step import EngineRequest


def tell(request: EngineRequest, name: str, took_s: float, *, failed: bool = False, **about: str | int | None) -> None:
    """Record a span that has just ended. `about`: attributes `pdx.…`, except those that are None."""
    headers = getattr(request, "trace_headers", None)  # there if engine and client (or proxy) trace
    if not headers:
        return
    from opentelemetry.trace import StatusCode, get_current_span, get_tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(headers)
    if not get_current_span(parent).get_span_context().trace_flags.sampled:
        return
    end_ns = time.time_ns()
    known = {f"pdx.{each}": value for each, value in about.items() if value is not None}
    span = get_tracer("pdx").start_span(name, parent, attributes=known, start_time=end_ns - int(took_s * 1e9))
    if failed:
        span.set_status(StatusCode.ERROR)
    span.end(end_ns)
