"""Nodes and proxies as a stand-in of the Kubernetes API tells of them, whatever happens to it meanwhile."""

import gc
import threading
import time
from collections import Counter

import pytest
from kubernetes_standin import SERVICE, endpoint, kubernetes_standin

from pdx.discovery.discovery import Discovery, discovery
from pdx.discovery.kubernetes import Kubernetes
from pdx.errors import ConfigError
from pdx.testing.waiting import wait_until

pytestmark = pytest.mark.long  # connections are lost, and made again, in real time

ONE, TWO = endpoint("10.0.0.1", "pdx-decode-0", "worker-1"), endpoint("10.0.0.2", "pdx-decode-1", "worker-2")


class Asking:
    """Discovery as a pod has it."""

    def __init__(self, api, **settings):
        self.counters = Counter()
        source = Kubernetes(SERVICE, "", api=api.url, account=api.account)
        self.discovery = Discovery(source, self.counters, **{"pause_s": 0.01, **settings})
        self.discovery.start()

    def finds(self, **nodes):
        """Wait until these are the nodes."""
        wait_until(lambda: dict(self.discovery.found.nodes) == nodes, what=f"{nodes} {self.discovery.found}")


@pytest.fixture
def api(tmp_path):
    with kubernetes_standin(tmp_path) as api:
        yield api


@pytest.fixture
def ask(api):
    made = []

    def ask(**settings):
        made.append(Asking(api, **settings))
        return made[-1]

    yield ask
    for each in made:
        each.discovery.close()


def named(*ends, port=7700):
    """By pod and by host."""
    found = {}
    for each in ends:
        for name in (each["targetRef"]["name"], each["nodeName"]):
            found[name] = f"tcp://{each['addresses'][0]}:{port}"
    return found


def test_nodes_are_named_as_pods_and_hosts_and_proxies_are_apart(api, ask):
    api.put("a", ONE, node=7700)
    api.put("b", endpoint("10.0.0.9", "pdx-proxy-0"), control=7600, http=8000)
    api.put("c", endpoint("fd00::3", "six"), endpoint("fd00::1", "pdx-decode-0"), kind="IPv6", node=7700)
    api.put("d", endpoint("10.0.0.3", "else"), unnamed=1)
    api.put("e", node=7700)
    asking = ask()
    asking.finds(**named(ONE), six="tcp://[fd00::3]:7700")
    assert dict(asking.discovery.found.proxies) == {"pdx-proxy-0": "tcp://10.0.0.9:7600"}
    assert asking.discovery.found.is_assigned
    assert not asking.counters


def test_changes_are_heard(api, ask):
    api.put("a", ONE, node=7700)
    asking = ask()
    asking.finds(**named(ONE))
    api.put("b", TWO, node=7701)
    asking.finds(**named(ONE), **named(TWO, port=7701))
    api.put("a", node=7700)
    asking.finds(**named(TWO, port=7701))
    api.delete("b")
    asking.finds()
    assert [each.get("watch") for each in api.asked] == [None, "1"], "all by one watch"
    assert not asking.counters


def test_a_watch_that_drops_loses_nothing(api, ask):
    asking = ask()
    wait_until(lambda: any("watch" in each for each in api.asked))
    for number in range(5):
        api.drop()
        api.put("a", endpoint(f"10.0.0.{number}", "n", "h"), node=1)
        asking.finds(n=f"tcp://10.0.0.{number}:1", h=f"tcp://10.0.0.{number}:1")


def test_versions_that_are_forgotten_are_asked_for_anew(api, ask):
    api.put("a", ONE, node=7700)
    asking = ask()
    asking.finds(**named(ONE))
    api.answers = lambda handler, asked: (
        api.watch(handler, 0) if "watch" in asked else api.list(handler)  # from a version that was forgotten meanwhile
    )
    api.put("a", TWO, node=7700)
    api.forget()
    wait_until(lambda: asking.counters["discovery_failures"] > 2)  # the first is the end of the watch
    asking.finds(**named(TWO))
    api.answers = None
    api.put("a", ONE, node=7700)
    asking.finds(**named(ONE))


def test_a_token_that_is_renewed_counts_from_the_next_round(api, ask):
    asking = ask()
    wait_until(lambda: any("watch" in each for each in api.asked))
    api.token = "second"  # which the pod does not have yet
    api.put("a", ONE, node=7700)
    asking.finds(**named(ONE))  # a watch that has begun goes on
    api.drop()
    wait_until(lambda: asking.counters["discovery_failures"])
    api.put("a", TWO, node=7700)
    api.renew("second")
    asking.finds(**named(TWO))


def test_one_that_is_gone_or_forbids_changes_nothing(api, ask, caplog):
    api.put("a", ONE, node=7700)
    asking = ask()
    asking.finds(**named(ONE))
    api.answers = lambda handler, asked: handler.whole(403, {"reason": "Forbidden"})
    api.drop()
    wait_until(lambda: asking.counters["discovery_failures"] > 2)
    asking.finds(**named(ONE))
    said = [each.getMessage() for each in caplog.records if "is asked again" in each.getMessage()]
    assert len(said) == 1, "once a minute"
    assert "status 403" in said[0]
    assert "Forbidden" in said[0]
    assert "first" not in caplog.text, "the token is in no log"


def test_a_stranger_in_its_place_is_not_told_the_token(api, ask, tmp_path):
    (tmp_path / "other").mkdir()
    with kubernetes_standin(tmp_path / "other") as stranger:
        (api.account / "ca.crt").write_bytes((stranger.account / "ca.crt").read_bytes())
        asking = ask()
        wait_until(lambda: asking.counters["discovery_failures"])
        assert api.asked == []


def test_nobody_is_sent_elsewhere_with_the_token(api, ask):
    went = []
    api.answers = lambda handler, asked: (
        went.append(asked) if "gone" in asked else handler.raw(302, b"", Location=f"{handler.path}&gone=1")
    )
    asking = ask()
    wait_until(lambda: asking.counters["discovery_failures"] > 1)
    assert went == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<html>", "JSON is malformed"),
        (b'{"x":' + b"[" * 100_000, "recursion"),
        (b'{"metadata":{},"items":[{"metadata":{},"endpoints":[{"addresses":["%s"]}]}]}' % (b"1" * 300), "<= 256"),
        (b" " * ((4 << 20) + 1), "an answer of more than"),
        (
            b'{"metadata":{},"items":[%s]}'
            % b",".join(b'{"metadata":{"name":"%d"}}' % number for number in range(8193)),
            "more than 8192",
        ),
    ],
    ids=["html", "deep", "long address", "huge", "many"],
)
def test_what_makes_no_sense_changes_nothing(api, ask, caplog, body, why):
    api.put("a", ONE, node=7700)
    asking = ask()
    asking.finds(**named(ONE))
    api.answers = lambda handler, asked: handler.raw(200, body)
    api.drop()
    wait_until(lambda: why in caplog.text)
    asking.finds(**named(ONE))
    api.answers = None
    api.put("a", TWO, node=7700)
    asking.finds(**named(TWO))


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n",
        b'{"type":"ERROR","object":{"code":500}}\n',
        b'{"type":"ADDED","object":7}\n',
        b'{"x":"%s","type":"ADDED","object":{"metadata":{}}}\n' % (b"x" * (2 << 20)),
    ],
    ids=["not utf-8", "error", "number", "huge"],
)
def test_a_change_that_makes_no_sense_is_followed_by_a_new_list(api, ask, line):
    spoiled = []

    def answers(handler, asked):
        if "watch" not in asked:
            api.list(handler)
            return
        spoiled.append(asked)
        handler.begin()
        handler.piece(line)

    api.answers = answers
    asking = ask()
    wait_until(lambda: len(spoiled) > 1)
    api.put("a", ONE, node=7700)
    asking.finds(**named(ONE))


@pytest.mark.parametrize("part", ["list", "watch"])
def test_one_that_hangs_or_trickles_is_left_at_its_deadline(api, ask, monkeypatch, part):
    monkeypatch.setattr("pdx.discovery.kubernetes.ANSWER_S", 0.3)
    monkeypatch.setattr("pdx.discovery.kubernetes.WATCH_S", 0.3)
    lasting = []

    def answers(handler, asked):
        if ("watch" in asked) != (part == "watch"):
            api.list(handler)
            return
        lasting.append(asked)
        handler.begin()
        while True:  # until the other side has closed the connection
            handler.piece(b" ")

    api.answers = answers
    asking = ask()
    wait_until(lambda: len(lasting) > 1)
    assert asking.counters["discovery_failures"]


def test_whenever_it_ends_no_connection_is_left(api, ask):
    """Also in the middle of a handshake: one that was lost sight of was there until the other side said goodbye."""
    api.answers = lambda handler, asked: handler.raw(200, b"<html>")
    for number in range(40):
        asking = ask(pause_s=0.001)
        wait_until(lambda asking=asking: asking.counters["discovery_failures"])
        time.sleep(0.0003 * number)
        asking.discovery.close()
        assert "pdx-discovery" not in [thread.name for thread in threading.enumerate()]
    gc.collect()  # which would say what was not closed


def test_nothing_waits_for_one_that_hangs_when_all_ends(api, ask, monkeypatch):
    is_over = threading.Event()
    api.answers = lambda handler, asked: is_over.wait(60)
    asking = ask()
    wait_until(lambda: api.asked)
    asking.discovery.close()
    is_over.set()
    assert "pdx-discovery" not in [thread.name for thread in threading.enumerate()]
    asking.discovery.close()


def test_thousands_that_come_and_go_are_told_a_few_times_a_second(api, ask):
    ends = [endpoint(f"10.0.{number // 250}.{number % 250}", f"pod-{number}") for number in range(3000)]
    for first in range(0, 3000, 100):
        api.put(f"slice-{first}", *ends[first : first + 100], node=7700)
    asking = ask()
    wait_until(lambda: len(asking.discovery.found.nodes) == 3000)
    told = {id(asking.discovery.found): asking.discovery.found}
    for number in range(300):
        api.put("slice-0", *ends[: number % 100], node=7700)
    api.put("last", endpoint("10.9.9.9", "last"), node=7700)

    def is_last():
        told[id(asking.discovery.found)] = asking.discovery.found
        return "last" in asking.discovery.found.nodes

    wait_until(is_last, pause_s=0.001)
    assert len(told) < 30
    assert len(asking.discovery.found.nodes) == 3000
    assert not asking.counters


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("kubernetes:../x", "SERVICE"),
        ("kubernetes:pdx", "not a pod"),
        ("consul:x", "kubernetes:SERVICE"),
        ("etcd:http://h:1", "PREFIX"),
        ("etcd:http://u:p@h:1/x", "PREFIX"),
        ("etcd:http://h:x/x", "PREFIX"),
        ("etcd:http://h:1,/x", "PREFIX"),
    ],
)
def test_what_is_no_place_is_refused(monkeypatch, where, why):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=why):
        discovery(where, Counter(), has_keys=True)
