"""Sends spans to an OpenTelemetry collector (OTLP). Needs the extra `otel`: import it only where traces are wanted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from pdx.errors import ConfigError
from pdx.extras import own_version
from pdx.telemetry.span import Span, Value

MAX_QUEUE = 8192  # spans that wait for the collector
CLOSE_S = 2.0  # for waiting spans to be sent at the end
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Collector:
    """A connection to the collector of a process's spans. `give` is for one thread and never waits: a thread of the SDK
    sends, and if that does not keep up or gets no answer, spans are dropped."""

    def __init__(self, endpoint: str, service: str) -> None:
        """:raises ConfigError: there is no such protocol."""
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # else one warning per attempt
        self.dropped = 0  # spans not sent, because too many waited
        self._given = 0
        self._sender = _Counting(_exporter(endpoint))
        self._processor = BatchSpanProcessor(self._sender, max_queue_size=MAX_QUEUE)
        named: dict[str, Value] = {
            "service.name": service,
            "service.version": own_version(),
            "process.pid": os.getpid(),
        }
        self._resource = Resource.create(named).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("pdx", own_version())

    @property
    def sent(self) -> int:
        """Number of spans that the collector has accepted."""
        return self._sender.sent

    @property
    def failed(self) -> int:
        """Number of spans whose sending failed."""
        return self._sender.failed

    def give(self, spans: Iterable[Span]) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()
        for each in spans:
            if self._given - self._sender.taken >= MAX_QUEUE:
                self.dropped += 1
                continue
            self._given += 1
            self._processor.on_end(self._readable(each, offset_ns))

    def close(self) -> None:
        """Send waiting spans, within CLOSE_S."""
        # The SDK waits up to 30 s before it ends its exporter; its threads do not keep a process from ending.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._sender.shutdown()

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        def context(number: int) -> SpanContext:
            return SpanContext(span.trace, number, is_remote=False, trace_flags=_SAMPLED)

        known = {name: value for name, value in span.attributes.items() if value is not None}
        if span.error:
            known["error.type"] = span.error
        return ReadableSpan(
            span.name,
            context(span.id),
            context(span.parent) if span.parent else None,
            resource=self._resource,
            attributes=known,
            events=[Event(name, dict(about), at_ns + offset_ns) for name, at_ns, about in span.events],
            kind=SpanKind[span.kind],
            status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET),
            start_time=span.start_ns + offset_ns,
            end_time=span.end_ns + offset_ns,
            instrumentation_scope=self._scope,
        )


class _Counting(SpanExporter):
    """Counts the results of an exporter, on the SDK's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken = self.sent = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.sent += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    """The exporter that vLLM would choose, except for TLS."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, insecure=not endpoint.startswith("https://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint)
    raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}: known are grpc and http/protobuf")
