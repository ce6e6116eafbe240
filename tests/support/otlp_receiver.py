"""A collector of OpenTelemetry traces (OTLP), by HTTP on the test's loop or by gRPC on threads."""

import contextlib
import threading
from concurrent import futures
from typing import NamedTuple

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


class Seen(NamedTuple):
    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: str
    is_error: bool
    start_ns: int
    end_ns: int
    attributes: dict
    events: list  # (name, time in ns, attributes)


def _values(attributes):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def seen_in(request):
    """The spans of a message."""
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield Seen(
                service,
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                span.status.code == Status.STATUS_CODE_ERROR,
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _values(span.attributes),
                [(each.name, each.time_unix_nano, _values(each.attributes)) for each in span.events],
            )


class Receiver:
    def __init__(self):
        self.spans = []
        self.raw = []
        self.url = ""
        self.asked = threading.Event()

    def take(self, request):
        self.asked.set()
        self.raw.append(request.SerializeToString())
        self.spans += seen_in(request)
        return ExportTraceServiceResponse()

    def named(self, name):
        return [each for each in self.spans if each.name == name]

    def of(self, trace):
        """The spans of one trace by their names; of several with one name the last."""
        return {each.name: each for each in self.spans if each.trace == trace}


@contextlib.asynccontextmanager
async def receiving_http():
    receiver = Receiver()

    async def take(request):
        answer = receiver.take(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(body=answer.SerializeToString(), content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield receiver
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def receiving_grpc():
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    receiver = Receiver()

    class Service(service.TraceServiceServicer):
        def Export(self, request, _context):  # noqa: N802
            return receiver.take(request)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Service(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
