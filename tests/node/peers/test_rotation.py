"""Keys of nodes are exchanged while real nodes run: nothing is lost by it, and an old key is worth nothing then."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from pathlib import Path

import pytest
import zmq
from connection_stage import settled
from peers_harness import LocalCluster, pattern, put, read

from pdx.cli.ports import free_ports
from pdx.errors import ConfigError
from pdx.node.proxy_line import ProxyLine
from pdx.security import reread
from pdx.security.curve_keys import KeyPair
from pdx.security.gate import Gate
from pdx.security.peer_socket import dialled
from pdx.security.reread import SETTLE_S, Reread
from pdx.security.roster import RosterFile
from pdx.testing.waiting import wait_until
from pdx.wire.messages import PeerFrame, Ping, encode
from pdx.wire.proxy import PeerEntry


class Mounted:
    """A folder of files as Kubernetes mounts a Secret: links to `..data`, which is exchanged as a whole."""

    def __init__(self, place: Path):
        self.place, self._version = place, 0
        place.mkdir()

    def put(self, files: dict[str, str]) -> None:
        self._version += 1
        data = self.place / f"..{self._version}"
        data.mkdir()
        for name, text in files.items():
            (data / name).write_text(text)
            (data / name).chmod(0o600)
            settled(data / name)
            if not (self.place / name).is_symlink():
                (self.place / name).symlink_to(f"..data/{name}")
        fresh = self.place / "..data_tmp"
        fresh.symlink_to(data.name)
        fresh.rename(self.place / "..data")


class Keyed(LocalCluster):
    """Nodes a and b behind CURVE keys at ports of this host. `keys`: the key pairs of each, as they were made."""

    def __init__(self, place: Path, more: str = "", **settings):
        self._more = more  # of the roster
        self._ports = dict(zip("ab", free_ports(2), strict=True))
        self.keys = {name: [KeyPair.make()] for name in "ab"}
        self.files = {name: Mounted(place / name) for name in "ab"}
        self._fresh = 0
        of_one = {
            name: {
                "listen": f"tcp://127.0.0.1:{self._ports[name]}",
                "keys": str(place / name / "key"),
                "roster": str(place / name / "roster"),
            }
            for name in "ab"
        }
        super().__init__(place, "ab", of_one=of_one, trusted_network=True, **settings)
        self.tell({name: self.keys[name] for name in "ab"})

    def tell(self, known: dict[str, list[KeyPair]], own: dict[str, KeyPair] | None = None) -> None:
        """All nodes get a roster with these keys, and with the last of their own, or these."""
        roster = "".join(
            f'[nodes.{name}]\naddress = "tcp://127.0.0.1:{self._ports[name]}"\nkey = "{keys[0].public}"\n'
            + (f'next_key = "{keys[1].public}"\n' if len(keys) > 1 else "")
            for name, keys in known.items()
        )
        roster += self._more
        for name, files in self.files.items():
            key = (own or {}).get(name, self.keys[name][-1])
            files.put({"roster": roster, "key": f'curve\n    secret-key = "{key.secret}"\n'})

    def connections(self, name):
        return self.nodes[name]._daemon.service.peers.connections

    def proves(self, name, key):
        wait_until(lambda: self.connections(name).own == key, what=f"{name} proves its new key")

    def moves(self, source, target):
        """A chunk goes from one to the other."""
        self._fresh += 1
        put(self[source], f"chunk {self._fresh}", pattern(self._fresh, 5000))
        self[source].push(f"chunk {self._fresh}", to=target)
        assert read(self[target], f"chunk {self._fresh}", wait_s=10.0) == pattern(self._fresh, 5000)


@pytest.fixture
def cluster(place):
    with Keyed(place) as made:
        made.start("a", "b")
        yield made


def test_a_key_is_exchanged_while_the_node_runs_and_the_old_one_is_worth_nothing_then(cluster):
    cluster.moves("a", "b")
    old, new = cluster.keys["a"][0], KeyPair.make()
    cluster.tell({"a": [old, new], "b": cluster.keys["b"]}, own={"a": old})
    cluster.keys["a"].append(new)
    cluster.tell({"a": [old, new], "b": cluster.keys["b"]})
    cluster.proves("a", new)
    session = cluster.connections("b").of("a").number
    cluster.moves("a", "b")
    cluster.moves("b", "a")
    assert cluster.connections("b").of("a").number == session, "the connection stays"
    assert cluster.counter("a", "peers_lost") == cluster.counter("b", "peers_lost") == 0

    context = zmq.Context()
    try:  # who dials a meets the new key, and no other one
        entry = PeerEntry("a", f"tcp://127.0.0.1:{cluster._ports['a']}", new.public)
        with dialled(context, entry, cluster.keys["b"][0], 5.0) as probe:
            probe.send(encode(PeerFrame(1, 0, Ping())))
            wait_until(lambda: probe.poll(0), what="it is answered")
    finally:
        context.destroy(linger=0)

    cluster.nodes["b"].close()
    cluster.start("b")  # it dials a by the key that comes first in the roster, and then by the other one
    wait_until(lambda: _moved(cluster, "b", "a"), timeout_s=60.0, what="b reaches a by its new key")
    cluster.tell({"a": [new], "b": cluster.keys["b"]})
    wait_until(lambda: cluster.connections("b").roster.entry("a").keys == (new.public,), what="b has the new roster")
    wait_until(lambda: _moved(cluster, "a", "b"), timeout_s=60.0, what="a reaches b")
    assert cluster.connections("b").of("a").key == new.public

    context = zmq.Context()
    try:
        entry = PeerEntry("b", f"tcp://127.0.0.1:{cluster._ports['b']}", cluster.keys["b"][0].public)
        with dialled(context, entry, old, 5.0) as thief:
            thief.send(encode(PeerFrame(1, 0, Ping())))
            wait_until(lambda: cluster.counter("b", "peers_denied"), what="the old key is turned away")
    finally:
        context.destroy(linger=0)


def _moved(cluster, source, target):
    try:
        cluster.moves(source, target)
    except Exception:  # noqa: BLE001 - nobody there yet
        return False
    return True


def test_a_key_that_the_roster_does_not_have_yet_is_used_as_soon_as_it_has(cluster):
    old, new = cluster.keys["b"][0], KeyPair.make()
    cluster.keys["b"].append(new)
    cluster.tell({"a": cluster.keys["a"], "b": [old]})
    wait_until(lambda: cluster.connections("b")._keys._refused == new.public, what="b has seen it")
    cluster.moves("a", "b")
    assert cluster.connections("b").own == old
    cluster.tell({"a": cluster.keys["a"], "b": [old, new]})
    cluster.proves("b", new)


def no_descriptor(*_):
    raise zmq.ZMQError(errno.EMFILE)


def test_its_proxy_hears_of_it_by_the_new_key(place, monkeypatch, caplog):
    context, proxy = zmq.Context(), KeyPair.make()
    gate = Gate(context, proxy, admits=Everybody(), counters=Counter(), filters=[])
    router = context.socket(zmq.ROUTER)
    gate.guard(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def heard():
        gate.answer()
        with contextlib.suppress(zmq.Again):
            return str(router.recv_multipart(zmq.NOBLOCK, copy=False)[-1].get("User-Id"))

    try:
        address = f"tcp://127.0.0.1:{port}"
        told = f'[proxy]\naddress = "{address}"\nkey = "{proxy.public}"\n'
        with Keyed(place, told, proxy=address) as cluster:
            cluster.start("a")
            old, new = cluster.keys["a"][0], KeyPair.make()
            wait_until(lambda: heard() == old.public, what="it reports")
            cluster.keys["a"].append(new)
            with monkeypatch.context() as short:  # no descriptor is left for another line: it is tried again
                short.setattr(ProxyLine, "_monitor", no_descriptor)
                cluster.tell({"a": [old, new], "b": cluster.keys["b"]})
                cluster.proves("a", new)
                wait_until(lambda: "not with the node's new key" in caplog.text, what="it was tried")
                wait_until(lambda: heard() == old.public, what="it reports as before")
            wait_until(lambda: heard() == new.public, what="it reports by its new key")
            # It has another key now, or is none.
            for more in (told.replace(proxy.public, KeyPair.make().public), ""):
                cluster._more = more
                cluster.tell({"a": [old, new], "b": cluster.keys["b"]})
                wait_until(lambda: not [each for each in proxies_of(cluster) if each.is_up], what="it is left")
                assert not any(each.key == proxy.public for each in proxies_of(cluster))
    finally:
        router.close(0)
        gate.close()
        context.term()


def proxies_of(cluster):
    return list(cluster.nodes["a"]._daemon._proxies._all.values())


class Everybody:
    def __contains__(self, key):
        return True


@pytest.mark.parametrize(("what", "text"), [("key", 'secret-key = "x"'), ("roster", "[nodes.")])
def test_what_is_wrong_changes_nothing_and_is_said(cluster, what, text, caplog):
    files = {
        "key": f'secret-key = "{cluster.keys["b"][0].secret}"\n',
        "roster": (cluster.files["b"].place / "roster").read_text(),
    }
    cluster.files["b"].put({**files, what: text})
    wait_until(lambda: cluster.counter("b", "reread_failed") == 1, what="it was looked at")
    assert "stays as it was" in caplog.text
    cluster.moves("a", "b")
    cluster.files["b"].put(files)
    cluster.moves("b", "a")


def test_a_file_from_the_future_is_read_when_it_has_been_the_same_for_a_while(tmp_path, monkeypatch):
    """The clock of a file server may be ahead."""
    path, now = tmp_path / "file", [100.0]
    monkeypatch.setattr(reread.time, "monotonic", lambda: now[0])

    def write(text):
        path.write_text(text)
        os.utime(path, (4e9, 4e9 + len(text)))

    write("one")
    file = Reread(path.read_text, str(path), what="it")
    for text in ("hal", "half a", "whole"):
        write(text)
        assert not file.refresh()
        now[0] += SETTLE_S / 2
        assert not file.refresh()
    now[0] += SETTLE_S
    assert file.refresh()
    assert file.value == "whole"


def test_a_file_that_is_being_written_is_not_read(tmp_path):
    """Cut off where a node ends it makes sense: the others would be thrown out."""
    path = tmp_path / "roster.toml"
    entries = [f'[nodes.n{number}]\naddress = "ipc:///run/{number}"\n' for number in range(2)]

    def write(text):
        path.write_text(text)
        path.chmod(0o600)

    write("".join(entries))
    settled(path)
    counters = Counter[str]()
    reread = Reread(lambda: RosterFile.load(path, has_keys=False), str(path), what="it", counters=counters)
    write(entries[0])
    assert not reread.refresh()
    write("".join(entries) + "# again")
    assert not reread.refresh()
    settled(path)
    assert not reread.refresh(), "it says the same"
    assert not counters
    write(entries[0])
    settled(path)
    assert reread.refresh()
    os.utime(path, (2**33, 2**33))  # the clock of whoever wrote it is wrong
    write_at = path.stat().st_mtime_ns
    assert write_at > 2**33
    path.unlink()
    assert not reread.refresh()
    with pytest.raises(ConfigError):
        RosterFile.load(path, has_keys=False)
