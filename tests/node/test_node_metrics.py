"""What a node tells Prometheus: the numbers of its status, to whom it may, and nobody is kept waiting for it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from node_harness import NodeProcess
from scraping import address_in, families_at, scrape

import pdx
from pdx.config import NodeConfig
from pdx.errors import ConfigError
from pdx.node import metrics
from pdx.node.metrics import MetricsServer
from pdx.telemetry.env import Env
from pdx.telemetry.names import METRICS, TIER_EVENTS, of_counter
from pdx.testing.waiting import wait_until


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A node, and where its metrics are."""
    address = f"ipc://{tmp_path_factory.mktemp('told')}/node.sock"
    node = NodeProcess.ready(NodeConfig(address=address, arena_bytes=8 << 20, metrics="127.0.0.1:0"))
    yield node, address_in(node.log)
    node.close()


def test_each_number_of_the_status_is_told(told):
    node, address = told
    with pdx.connect(node.address) as client:
        client.reserve("a", 1000).seal()
        status = client.status()
        found = scrape(address)
        client.delete("a")
    assert found["pdx_node_arena_bytes",] == status.arena_bytes
    assert found["pdx_node_free_bytes",] == status.free_bytes < status.arena_bytes
    assert found["pdx_node_uptime_seconds",] >= status.uptime_s
    for state, count in status.chunks.items():
        assert found["pdx_node_chunks", state] == count
    states = {name[1] for name in found if name[0] == "pdx_node_chunks"}
    assert states == {"filling", "sealed", "quarantined", "retired"}, "also those that no chunk is in"
    for name, count in status.counters.items():
        metric, values = of_counter(name)
        labels = dict(sorted(zip(METRICS[metric].labels, values, strict=True)))
        assert found[f"{metric}_total", *labels.values()] >= (count / 1e9 if name.endswith("_ns") else count)
    assert found["pdx_node_sealed_total",] == 1
    assert found["pdx_node_attached", "client"] == 1
    assert found["pdx_node_admit_seconds_count",] == found["pdx_node_admit_seconds_bucket", "+Inf"] == 1


def test_it_listens_on_its_address_only_and_by_default_nowhere(told, module_node):
    node, address = told
    assert not psutil.Process(module_node.pid).net_connections("tcp")
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
        assert node.status().arena_bytes
        assert process.num_threads() <= before
    wait_until(lambda: scrape(address), what="metrics are told again")


def test_who_asks_a_byte_at_a_time_is_served_no_longer_than_others(start_here, monkeypatch, caplog):
    """It kept the only thread for as long as it liked."""
    monkeypatch.setattr(metrics, "SILENCE_S", 0.3)
    caplog.set_level("INFO", logger="pdx.node")
    start_here(metrics="127.0.0.1:0")
    address = address_in(caplog.text)
    with socket.create_connection(address), socket.create_connection(address) as slow:  # one says nothing at all
        ended = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    slow.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert scrape(address)
        finally:
            ended.set()
            thread.join()


def test_what_is_told_is_what_the_registry_names_and_every_counter_has_a_series(told):
    _, address = told
    families = {each.name: each for each in families_at(address) if each.name.startswith("pdx_")}
    assert {*families} == {name for name in METRICS if not name.startswith(("pdx_proxy_", "vllm:"))}
    for name, family in families.items():
        about = METRICS[name]
        assert (family.type, family.documentation) == (about.kind, about.text)
        assert {label for each in family.samples for label in each.labels} <= {*about.labels, "le"}
        assert family.samples or about.labels[0] in ("peer", "tier"), name


def test_what_is_counted_has_a_name():
    """Under the names in our sources; those that begin with a variable are a tier's."""
    counted = re.compile(r"""counters\[\s*"(\w+)"|counted\([^"]*?"(\w+)\"""")
    folder = Path(pdx.__file__).parent
    rooms = ("node", "store", "security", "telemetry")
    sources = [path.read_text() for room in rooms for path in (folder / room).rglob("*.py")]
    names = {first or second for text in sources for first, second in counted.findall(text)}
    assert len(names) > 70
    found = {name: of_counter(name) for name in names}
    assert [
        name
        for name, (metric, values) in found.items()
        if metric == "pdx_node_tier_events" and values[1] not in TIER_EVENTS.get(values[0], ())
    ] == []
    events = {each for text in sources for each in re.findall(r"_count\(\"(\w+)\"", text)}
    kinds = {each for text in sources for each in re.findall(r"TierError\([^\n]*\"(\w+)\"\)", text)}
    of_jobs = {"cancelled", "stale", "pinned"}  # of jobs that somebody has ended: nobody counts these
    assert events | kinds - of_jobs <= {each for kind in TIER_EVENTS.values() for each in kind}
    assert len(events) > 5


def test_a_control_loop_that_does_not_answer_is_an_error_and_no_hang(told, monkeypatch, caplog):
    """Of the node, which is well as long as its loop answers, and of who asks for metrics."""
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen("http://{}:{}/".format(*told[1]) + path, timeout=30) as answer:
            assert answer.read() == b"ok\n"
    monkeypatch.setattr(metrics, "ANSWER_S", 0.05)
    caplog.set_level("INFO", logger="pdx.node")
    before = threading.active_count()
    server = MetricsServer("127.0.0.1:0", Env(), status=lambda: None)
    try:
        address = address_in(caplog.text)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            scrape(address)
        for path in ("healthz", "readyz"):
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen("http://{}:{}/".format(*address) + path, timeout=30)
    finally:
        server.close()
    wait_until(lambda: threading.active_count() == before, what="the thread has ended")


def test_with_a_token_only_who_shows_it_is_told(start_node, tmp_path):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("0123456789" * 4)
    node = start_node(metrics="127.0.0.1:0", metrics_token_file=str(file))
    url = "http://{}:{}".format(*address_in(node.log))

    def status(path, header=None):
        request = urllib.request.Request(url + path, headers={"Authorization": header} if header else {})
        try:
            return urllib.request.urlopen(request, timeout=30).status
        except urllib.error.HTTPError as error:
            return error.code

    paths = ("/metrics", "/healthz", "/readyz", "/", "/metric", "/metrics/x")
    assert [status(path) for path in paths] == [401, 200, 200, 404, 404, 404]
    assert status("/metrics", f"Bearer {'0123456789' * 4}") == 200
    assert [status("/metrics", header) for header in ("Bearer x", "Bearer ", f"Basic {'0123456789' * 4}")] == [401] * 3
    file.write_text("abcdefghij" * 4)
    assert status("/metrics", f"Bearer {'0123456789' * 4}") == 401, "the file says another one now"
    assert status("/metrics", f"Bearer {'abcdefghij' * 4}") == 200
    file.unlink()
    assert status("/metrics", f"Bearer {'abcdefghij' * 4}") == 401


def test_beyond_this_host_only_a_node_with_a_token_or_keys_tells_them(tmp_path):
    with pytest.raises(ConfigError, match="--metrics-token-file"):
        MetricsServer("192.0.2.1:1", Env(), status=lambda: None)
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("0123456789" * 4)
    for guard in {"token_file": str(file)}, {"has_keys": True}:
        with pytest.raises(ConfigError, match="--metrics 192.0.2.1:1: "):  # which is an address of no interface
            MetricsServer("192.0.2.1:1", Env(), status=lambda: None, **guard)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        MetricsServer("127.0.0.1:0", Env(), status=lambda: None, token_file=str(file))
