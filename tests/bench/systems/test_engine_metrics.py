"""vLLM's /metrics before and after a batch: the right sums, and only of requests that have ended."""

import http.server

import pytest
from http_server import answering

from pdx.bench.systems import engine_metrics
from pdx.bench.systems.engine_metrics import Found, Sums, Watch, engines, parse

PAGE = """
# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 2.0
vllm:request_queue_time_seconds_count{engine="0",model_name="tiny"} 2.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} 0.25
vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 2.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 1.5
vllm:request_prefill_time_seconds_count{engine="1",model_name="tiny"} 1.0
vllm:request_prefill_time_seconds_sum{engine="1",model_name="tiny"} 5e-01
vllm:request_prefill_time_seconds_created{engine="0",model_name="tiny"} 1.7e+09
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 2.5
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 129.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 871.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 64.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="device"} 64.0
"""


def test_sums_of_a_page():
    found = {"computed_tokens": 129.0, "local_tokens": 64.0, "external_tokens": 871.0}
    assert parse(PAGE) == Sums(finished=3.0, queue_s=0.25, prefill_s=2.0, first_s=2.5, **found)
    assert parse("") == Sums(0, 0, 0, 0, 0)


def test_where_the_tokens_of_a_request_were_found():
    before, after = Sums(1, 0, 0, 0, 100, 10, 0), Sums(3, 0, 0, 0, 120, 50, 400)
    assert after.since(before).found == Found(computed=20, local=40, external=400)
    assert after.since(before).found.prompt == 460


def test_requests_that_come_together_wait_before_the_scheduler_has_them():
    """A step runs; the scheduler takes the second request when it is over, and vLLM's queue time begins there."""
    assert engines(Sums(2, 0.01, 4.0, 6.0, 0), None).prefill_queue_ms == 1000
    assert engines(Sums(1, 0.01, 4.0, 6.0, 0), None).prefill_queue_ms == 10


@pytest.fixture
def pages():
    """What each engine's /metrics say, by its name, time after time; the last ones stay."""
    told = {}

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            of_engine = told[self.path.split("/")[1]]
            sums = of_engine.pop(0) if len(of_engine) > 1 else of_engine[0]
            values = [sums.finished, sums.queue_s, sums.prefill_s, sums.first_s]
            names = engine_metrics.FINISHED, engine_metrics.QUEUE, engine_metrics.PREFILL, engine_metrics.FIRST
            lines = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
            lines.append(f'{engine_metrics.BY_SOURCE}{{source="local_compute"}} {sums.computed_tokens}')
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Metrics)
    with answering(server):
        yield told, lambda *names: Watch(*(f"http://127.0.0.1:{server.server_port}/{name}" for name in names))


def test_an_engine_counts_a_request_when_it_has_ended(pages):
    pages, watch = pages
    pages["p"] = [Sums(5, 1, 10, 0, 0), Sums(6, 1.1, 12, 0, 0), Sums(7, 1.2, 14, 0, 0)]
    pages["d"] = [Sums(3, 0, 0, 0, 0), Sums(3, 0, 0, 0, 0), Sums(5, 0.2, 0.1, 0, 4)]
    found = engines(*watch("p", "d").end(2))
    assert found.prefill_ms == pytest.approx(2000)
    assert (found.decode_queue_ms, found.computed_tokens) == (pytest.approx(100), 2)


def test_a_request_that_is_never_counted(pages, monkeypatch):
    pages, watch = pages
    monkeypatch.setattr(engine_metrics, "COUNTED_S", 0.3)
    pages["p"] = [Sums(5, 1, 10, 0, 0), Sums(6, 1, 12, 0, 0)]
    pages["d"] = [Sums(5, 0, 0, 0, 0)]
    assert watch("p", "d").end(1) is None


def test_an_engine_that_does_everything_counts_once(pages):
    pages, watch = pages
    pages["p"] = [Sums(0, 0, 0, 0, 0), Sums(1, 0, 3, 0, 0)]
    assert watch("p", "p").end(1) == [Sums(1, 0, 3, 0, 0)]


def test_somebody_elses_requests_spoil_the_means(pages):
    pages, watch = pages
    pages["p"] = [Sums(0, 0, 0, 0, 0), Sums(2, 0, 3, 0, 0)]
    assert watch("p", "p").end(1) is None
