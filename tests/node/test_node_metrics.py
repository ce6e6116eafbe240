"""What a node tells Prometheus: the numbers of its status, on this host only, and nobody is kept waiting for it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack

import psutil
import pytest
from node_harness import wait_until
from prometheus_client.parser import text_string_to_metric_families

import pdx
from pdx.errors import ConfigError
from pdx.node import metrics
from pdx.node.metrics import MetricsServer
from pdx.telemetry.env import Env


def address_in(log):
    """Where a node says that its metrics are."""
    host, port = re.search(r"metrics at http://([\d.]+):(\d+)/metrics", log).groups()
    return host, int(port)


def scrape(address):
    """Samples by name and labels."""
    url = "http://{}:{}/metrics".format(*address)
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


@pytest.fixture
def told(start_node):
    node = start_node(metrics="127.0.0.1:0")
    return node, address_in(node.log)


def test_each_number_of_the_status_is_told(told):
    node, address = told
    with pdx.connect(node.address) as client:
        client.reserve("a", 1000).seal()
        status = client.status()
        found = scrape(address)
    assert found["pdx_node_arena_bytes",] == status.arena_bytes
    assert found["pdx_node_free_bytes",] == status.free_bytes < status.arena_bytes
    assert found["pdx_node_uptime_s",] >= status.uptime_s
    for state, count in status.chunks.items():
        assert found["pdx_node_chunks", state] == count
    assert found["pdx_node_chunks", "retired"] == 0
    for name, count in status.counters.items():
        assert found["pdx_node_counters_total", name] >= count
    assert any(count for count in status.counters.values())


def test_nothing_listens_by_default(node):
    assert not psutil.Process(node.pid).net_connections("tcp")


def test_it_listens_on_its_address_only(told):
    node, address = told
    listening = [each for each in psutil.Process(node.pid).net_connections("tcp") if each.status == "LISTEN"]
    assert [tuple(each.laddr) for each in listening] == [address]


def test_a_port_that_is_taken(address):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--metrics"):
        MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}", Env(), status=lambda: None)


def test_connections_that_say_nothing_cost_metrics_only(told):
    """One thread serves them, one after the other; processes and who scrapes when they have gone are served."""
    node, address = told
    process = psutil.Process(node.pid)
    before = process.num_threads()
    with ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(address)
        with pdx.connect(node.address) as client:
            assert client.status().arena_bytes
        assert process.num_threads() <= before
    wait_until(lambda: scrape(address), what="metrics are told again")


def test_a_connection_that_says_nothing_has_a_deadline(told):
    _, address = told
    with socket.create_connection(address), socket.create_connection(address) as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert scrape(address)


def test_a_control_loop_that_does_not_answer_is_an_error_and_no_hang(monkeypatch, caplog):
    monkeypatch.setattr(metrics, "ANSWER_S", 0.05)
    caplog.set_level("INFO", logger="pdx.node")
    before = threading.active_count()
    server = MetricsServer("127.0.0.1:0", Env(), status=lambda: None)
    try:
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            scrape(address_in(caplog.text))
    finally:
        server.close()
    wait_until(lambda: threading.active_count() == before, what="the thread has ended")


def test_who_asks_a_byte_at_a_time_is_served_no_longer_than_others(told):
    """It kept the only thread for as long as it liked."""
    _, address = told
    with socket.create_connection(address) as slow:
        ended = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while not ended.wait(0.2):
                    slow.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert scrape(address)
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/x", "/-/ready"])
def test_elsewhere_there_is_nothing(told, path):
    _, address = told
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen("http://{}:{}".format(*address) + path, timeout=30)


def test_states_are_told_before_there_is_a_chunk_and_each_family_says_what_it_is(told):
    _, address = told
    found = scrape(address)
    assert {name[1]: value for name, value in found.items() if name[0] == "pdx_node_chunks"} == dict.fromkeys(
        ("filling", "sealed", "quarantined", "retired"), 0
    )
    with urllib.request.urlopen("http://{}:{}/metrics".format(*address), timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert [each.name for each in families if len(each.documentation.split()) < 3] == []


@pytest.mark.parametrize("has_keys", [True, False])
def test_beyond_this_host_only_a_node_with_keys_and_a_roster_tells_them(has_keys):
    if not has_keys:
        with pytest.raises(ConfigError, match="beyond this host"):
            MetricsServer("192.0.2.1:1", Env(), status=lambda: None)
    else:
        with pytest.raises(ConfigError, match="--metrics 192.0.2.1:1: "):  # which is an address of no interface
            MetricsServer("192.0.2.1:1", Env(), status=lambda: None, has_keys=True)
