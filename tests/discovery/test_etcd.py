"""Nodes and proxies find each other by a real etcd, whatever happens to it or in it meanwhile."""

import signal
import threading
from collections import Counter

import pytest
from etcd_bed import EtcdServer, needs_etcd
from found_bed import etcd as etcd
from http_server import Canned, answering
from remote_bed import signed

from pdx.discovery import etcd as etcd_module
from pdx.discovery.discovery import Discovery
from pdx.discovery.etcd import Etcd
from pdx.testing.waiting import wait_until

pytestmark = [needs_etcd, pytest.mark.long]


class Member:
    """A node or a proxy, as far as it is to be found and finds."""

    def __init__(self, url, kind="", name="", address="", **settings):
        self.counters = Counter()
        self.source = Etcd.named(url)
        self.discovery = Discovery(self.source, self.counters, **{"pause_s": 0.01, **settings})
        self.discovery.start(kind, name, address)

    @property
    def found(self):
        return dict(self.discovery.found.nodes), dict(self.discovery.found.proxies)

    def finds(self, nodes, proxies=()):
        wait_until(lambda: self.found == (nodes, dict(proxies)), what=f"{nodes} {proxies} {self.found}")


@pytest.fixture
def join(etcd):
    made = []

    def join(*own, url="", **settings):
        made.append(Member(url or f"{etcd.url}/pdx", *own, **settings))
        return made[-1]

    yield join
    for each in made:
        each.discovery.close()


A, B, P = "tcp://10.0.0.1:7700", "tcp://10.0.0.2:7700", "tcp://10.0.0.9:7600"


def test_who_is_there_is_found_and_who_ends_is_not(etcd, join):
    a, proxy = join("nodes", "a", A), join("proxies", "p", P)
    b = join("nodes", "b", B)
    for each in (a, b, proxy):
        each.finds({"a": A, "b": B}, {"p": P})
    assert not a.discovery.found.is_assigned
    b.discovery.close()
    for each in (a, proxy):
        each.finds({"a": A}, {"p": P})
    assert etcd.entries() == {"/pdx/nodes/a": A, "/pdx/proxies/p": P}
    assert a.counters + proxy.counters == {}


def test_one_that_dies_goes_with_its_lease(etcd, join, monkeypatch):
    monkeypatch.setattr("pdx.discovery.etcd.LEASE_S", 2)
    alive, dead = join("nodes", "a", A), join("nodes", "b", B)
    alive.finds({"a": A, "b": B})
    dead.source.leave = _nothing
    dead.discovery.close()
    alive.finds({"a": A})
    assert alive.counters == {}, "its own lease is kept"


async def _nothing():
    pass


def test_an_entry_that_is_removed_is_written_again_and_a_lease_that_is_over_is_taken_anew(etcd, join, monkeypatch):
    monkeypatch.setattr("pdx.discovery.etcd.LEASE_S", 2)
    a = join("nodes", "a", A)
    a.finds({"a": A})
    etcd.delete("/pdx/nodes/a")
    a.finds({})
    a.finds({"a": A})
    (lease,) = etcd.call("lease/leases")["leases"]
    etcd.call("lease/revoke", **lease)
    a.finds({})
    a.finds({"a": A})
    assert a.counters == {}


def test_a_node_that_is_started_elsewhere_is_there_and_the_end_of_the_old_one_changes_nothing(join):
    old, watching = join("nodes", "a", A), join()
    watching.finds({"a": A})
    join("nodes", "a", B)
    watching.finds({"a": B})
    old.discovery.close()
    watching.finds({"a": B})


def test_what_could_not_be_written_at_first_is_written_though_there_is_an_older_entry(etcd, join, monkeypatch):
    etcd.put("/pdx/nodes/a", A)  # of a life whose lease is not over
    write, failed = Etcd._write, []

    async def fails_once(self, *words):
        if not failed:
            failed.append(words)
            raise TimeoutError
        await write(self, *words)

    monkeypatch.setattr(Etcd, "_write", fails_once)
    join("nodes", "a", B)
    join().finds({"a": B})


def test_one_that_is_stopped_or_gone_changes_nothing_until_it_is_back(etcd, join):
    a, watching = join("nodes", "a", A), join()
    watching.finds({"a": A})
    etcd.kill()
    wait_until(lambda: a.counters["discovery_failures"] > 1)
    assert watching.found == ({"a": A}, {})
    etcd.start()
    etcd.put("/pdx/nodes/b", B)
    for each in (a, watching):
        each.finds({"a": A, "b": B})


def test_one_that_hangs_is_left_and_ends_nobody(etcd, join, monkeypatch):
    monkeypatch.setattr("pdx.discovery.etcd.ANSWER_S", 0.3)
    monkeypatch.setattr("pdx.discovery.etcd.WATCH_S", 0.3)
    monkeypatch.setattr("pdx.discovery.discovery.CLOSE_S", 5.0)
    a = join("nodes", "a", A)
    a.finds({"a": A})
    etcd.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: a.counters["discovery_failures"])
    a.discovery.close()
    assert "pdx-discovery" not in [thread.name for thread in threading.enumerate()]
    etcd.process.send_signal(signal.SIGCONT)


def test_what_others_write_there_is_bounded_and_garbage_is_nobody(etcd, join):
    watching = join()
    for key, value in {
        "/pdx/nodes/long": "x" * 10_000,
        f"/pdx/nodes/{'n' * 300}": A,
        "/pdx/others/a": A,
        "/pdx/nodes": A,
        "/pdxother/nodes/a": A,
        "/pdx/nodes/\N{SNOWMAN}": A,
        "/pdx/nodes/b": f" {B}\n",
    }.items():
        etcd.put(key, value)
    watching.finds({"\N{SNOWMAN}": A, "b": B})
    join().finds({"\N{SNOWMAN}": A, "b": B})
    assert watching.counters == {}


def test_too_many_entries_change_nothing(etcd, join, monkeypatch):
    monkeypatch.setattr("pdx.discovery.etcd.MAX_FOUND", 3)
    for name in "abc":
        etcd.put(f"/pdx/nodes/{name}", A)
    watching = join()
    watching.finds(dict.fromkeys("abc", A))
    etcd.put("/pdx/nodes/d", B)
    wait_until(lambda: watching.counters["discovery_failures"] > 2)
    assert watching.found == (dict.fromkeys("abc", A), {})
    etcd.delete("/pdx/nodes/a")
    watching.finds({"b": A, "c": A, "d": B})


def test_what_was_compacted_is_asked_for_anew(etcd, join, monkeypatch):
    """Between the list and the watch."""
    real, done = etcd_module._call, []

    async def call(http, method, ask, kind):
        told = await real(http, method, ask, kind)
        if method == "kv/range" and not done:
            done.append(told)
            for _ in range(3):
                etcd.put("/pdx/nodes/b", B)
            etcd.call("kv/compaction", revision=str(int(told.header.revision) + 3))
        return told

    monkeypatch.setattr(etcd_module, "_call", call)
    watching = join()
    watching.finds({"b": B})
    assert watching.counters["discovery_failures"] == 1


def test_another_is_asked_where_a_member_does_not_answer_and_nobody_is_sent_elsewhere(etcd, join):
    down, elsewhere = Canned(lambda said: b"<html>"), Canned(lambda said: b"{}")
    elsewhere.status = 307
    with answering(down), answering(elsewhere):
        members = ",".join(f"127.0.0.1:{port}" for port in (down.server_port, elsewhere.server_port, etcd.port))
        join("nodes", "a", A, url=f"http://{members}/pdx").finds({"a": A})
        assert down.asked
        assert elsewhere.asked


def test_with_users_and_their_passwords(etcd, join, monkeypatch):
    for method, ask in (
        ("user/add", {"name": "root", "password": "secret"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        etcd.call(f"auth/{method}", **ask)
    stranger = join("nodes", "s", A)
    wait_until(lambda: stranger.counters["discovery_failures"] > 1)
    assert stranger.found == ({}, {})
    monkeypatch.setenv("ETCDCTL_USER", "root:wrong")
    liar = join("nodes", "l", A)
    wait_until(lambda: liar.counters["discovery_failures"] > 1)
    monkeypatch.setenv("ETCDCTL_USER", "root:secret")
    a = join("nodes", "a", A)
    a.finds({"a": A, "s": A, "l": A})  # who was turned away reads the environment again


def test_with_certificates_of_both_sides(tmp_path, join, monkeypatch):
    files = signed(tmp_path)
    server = EtcdServer(tmp_path / "tls", tls=files)
    monkeypatch.setattr(server, "is_up", lambda: "serving" in (server.folder / "log").read_text())
    try:
        server.start()
        stranger = join("nodes", "s", A, url=f"{server.url}/pdx")
        wait_until(lambda: stranger.counters["discovery_failures"] > 1)
        stranger.discovery.close()
        for name, file in zip(("CACERT", "CERT", "KEY"), files, strict=True):
            monkeypatch.setenv(f"ETCDCTL_{name}", str(file))
        a = join("nodes", "a", A, url=f"{server.url}/pdx")
        a.finds({"a": A})
        assert not a.counters
        a.discovery.close()
    finally:
        server.kill()
