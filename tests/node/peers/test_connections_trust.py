"""What a node does not believe of its peers, and the bounds of what they may make it hold or do."""

from __future__ import annotations

import logging
import stat

import pytest
from connection_stage import RawHost, welcomed, write_roster

import pdx.node.peers.connections
import pdx.security.peer_socket
from pdx.errors import ConfigError, NodeRunning, PeerUnknown
from pdx.memory.slot import Slot
from pdx.node.peers.connection import ConnectionState, Ending
from pdx.transports.channel import RemoteRegion
from pdx.wire import messages
from pdx.wire.proxy import PeerEntry
from pdx.wire.verbs import Status

PUSH = messages.Push([b"k" * 16])
HELLO = messages.Hello(messages.VERSION, 7, "peer", "raw", epoch=5, host="h", schemes=["tcp"])
WELCOME = messages.Welcome(22, 7, name="beta", host="h", regions=[RemoteRegion("tcp", 1, b"t" * 16, b"")])


# ---- what is not believed -----------------------------------------------------------------------


def test_replayed_messages_are_dropped(stage, raw):
    beta = stage.node("beta")
    peer = raw(beta)
    welcomed(stage, peer)
    for about, seq in ((7, 2), (8, 1), (9, 100), (10, 99), (11, 100), (12, 101)):
        peer.send(PUSH, about, seq=seq)
    stage.until(lambda: len(beta.core.saw("heard")) >= 3)
    assert [about for _, _, about in beta.core.saw("heard")] == [7, 9, 12]
    assert beta.counters["messages_dropped"] == 3


def test_who_has_no_session_may_only_say_hello(stage, raw):
    """CVE-2026-92972: nothing is taken from who is not a member. A bye gets no answer."""
    beta = stage.node("beta")
    peer = raw(beta)
    said = [PUSH, messages.Release(1, True), messages.Admit([]), messages.Done(1), messages.Ping(), WELCOME]
    for body in said:
        peer.send(messages.Bye())
        peer.send(body)
        assert stage.until(peer.hear) == messages.Refused("PeerRefused", "say hello first")
    assert not beta.core.events
    assert beta.counters["hellos_missing"] == len(said)


NOT_A_PEERS = [
    HELLO,
    messages.Fill([]),
    messages.Abort([]),
    messages.Delete([]),
    messages.Mark("t" * 16, "e", 1),
    Status(),
]


def test_a_peer_is_heard_only_within_its_rights_and_when_it_was_welcomed(stage, raw):
    beta = stage.node("beta")
    beta.core.on_hello = lambda session: None
    peer = raw(beta)
    peer.hello()
    peer.send(messages.Admit([b"k" * 16], 100), 1)
    stage.until(lambda: beta.counters["messages_dropped"])
    beta.core.welcome(beta.connections.of("raw"))
    for body in NOT_A_PEERS:
        peer.send(body)
    peer.send(PUSH)
    stage.until(lambda: beta.core.saw("heard"))
    assert [event[0] for event in beta.core.events] == ["hello", "heard"]
    assert beta.counters["messages_dropped"] == 1 + len(NOT_A_PEERS)


def test_a_peer_that_was_dialled_is_heard_only_within_its_rights(stage):
    alpha = stage.node("alpha")
    with RawHost(stage, "beta") as beta:
        alpha.connections.take_proxy_list([beta.entry])
        alpha.connections.dial("beta")
        stage.until(beta.hear)
        beta.send(messages.Done(1), 1, seq=1)  # before the welcome
        beta.send(WELCOME, seq=2)
        for seq, body in enumerate((WELCOME, *NOT_A_PEERS), start=3):
            beta.send(body, seq=seq)
        beta.send(messages.Done(1), 2, seq=100)
        stage.until(lambda: alpha.core.saw("heard"))
        assert [event[0] for event in alpha.core.events] == ["ready", "hello", "heard"]
        assert alpha.counters["messages_dropped"] == 2 + len(NOT_A_PEERS)


def test_frames_that_are_no_messages(stage, raw):
    beta = stage.node("beta")
    peer, stranger = raw(beta), raw(beta)
    welcomed(stage, peer)
    for frames in ([b""], [b"a", b"b"], [messages.encode(messages.PeerFrame(9, 7, PUSH))[:-1]], [b"\xc1" * 9]):
        peer.socket.send_multipart(frames)
        stranger.socket.send_multipart(frames)
    stage.until(lambda: beta.counters["messages_dropped"] == 8)
    peer.send(PUSH)
    stage.until(lambda: beta.core.saw("heard"))


def test_a_frame_beyond_the_limit_ends_that_connection_only(stage, raw):
    """CVE-2026-93838: nothing that a peer says makes a node allocate without bound."""
    beta = stage.node("beta")
    peer, other = raw(beta), raw(beta)
    welcomed(stage, peer, name="big")
    welcomed(stage, other, name="small")
    peer.socket.send(bytes(messages.MAX_FRAME_BYTES + 1))
    session = beta.connections.of("big")
    stage.until(lambda: session.fault or session.send(messages.Ping()), "ZMQ ends it")
    beta.connections.tick()
    assert beta.core.saw("over") == [(session, Ending.LOST, pdx.security.peer_socket.GONE)]
    other.send(PUSH)
    stage.until(lambda: beta.core.saw("heard"))


def test_a_welcome_that_is_refused_says_why_and_bye(stage):
    alpha = stage.node("alpha", 1)
    with RawHost(stage, "beta") as beta:
        alpha.connections.take_proxy_list([beta.entry])
        link = alpha.connections.dial("beta")
        stage.until(beta.hear)
        beta.send(messages.Welcome(22, 7, name="gamma", host="h", regions=WELCOME.regions), seq=1)
        assert "the roster has a wrong address" in stage.until(beta.hear).text
        assert stage.until(beta.hear) == messages.Bye()
        ((_, step, said),) = alpha.core.saw("over")
        assert step is Ending.TURN_DOWN
        assert "the roster has a wrong address" in said
        assert link.state is ConnectionState.CLOSED


# ---- bounds -------------------------------------------------------------------------------------


def test_a_peer_that_does_not_read_is_lost_and_blocks_nobody(stage, raw, monkeypatch):
    """CVE-2025-30202: a slow reader makes nobody wait, and its backlog is bounded."""
    monkeypatch.setattr(pdx.security.peer_socket, "HIGH_WATER", 8)
    beta = stage.node("beta")
    slow = raw(beta)
    welcomed(stage, slow)
    (session,) = beta.connections.peers
    slots = [Slot(1 << 40, 1 << 40, 1 << 60)] * 10_000
    sent = 0
    while not session.fault and sent < 1000:
        session.send(messages.Admitted(granted_slots=slots), 1)
        sent += 1
    assert session.fault == "it does not read what it is sent"
    beta.connections.tick()
    assert beta.core.saw("over")[0][1] is Ending.LOST


def test_there_is_a_most_of_sessions(stage, raw, monkeypatch):
    """CVE-2026-94624: peers without end exhausted the sockets."""
    monkeypatch.setattr(pdx.node.peers.connections, "MAX_SESSIONS", 3)
    beta = stage.node("beta")
    for number in range(3):
        welcomed(stage, raw(beta), name=f"peer{number}")
    surplus = raw(beta)
    surplus.hello(name="peer3")
    assert stage.until(surplus.hear) == messages.Refused("PeerRefused", "3 peers are here already")
    welcomed(stage, raw(beta), name="peer1")  # in the place of its own session
    assert len(beta.connections.peers) == 3


# ---- addresses and the roster -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["tcp://10.0.0.1:7700", "ipc://relative", ""])
def test_without_a_file_only_addresses_of_this_host_are_believed(stage, caplog, where):
    """CVE-2026-116176, CVE-2026-92972: an address that somebody names is not dialled."""
    alpha = stage.node("alpha")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            alpha.connections.take_proxy_list([PeerEntry("beta", where)])
    assert len(caplog.records) == (1 if where else 0)
    with pytest.raises(PeerUnknown):
        alpha.connections.dial("beta")
    assert alpha.connections.known == []


def test_a_peer_with_a_key_is_not_dialled_without_one(stage):
    alpha = stage.node("alpha")
    alpha.connections.take_proxy_list([PeerEntry("beta", "tcp://127.0.0.1:1", "k" * 40)])
    with pytest.raises(ConfigError, match="needs its own"):
        alpha.connections.dial("beta")


def test_with_a_file_the_file_decides(stage, caplog, raw):
    where = f"ipc://{stage.place}/beta.sock"
    roster = write_roster(stage.place / "roster.toml", {"beta": (where, "")})
    alpha = stage.node("alpha", roster=roster)
    beta = stage.node("beta", 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            alpha.connections.take_proxy_list(
                [beta.entry, PeerEntry("gamma", "tcp://127.0.0.1:9"), PeerEntry("beta", where)]
            )
            alpha.connections.take_proxy_list([PeerEntry("beta", "tcp://127.0.0.1:9")])
    warned = [record.args[0] for record in caplog.records if record.name == "pdx.security.roster"]
    assert sorted(warned) == ["beta", "gamma"]
    with pytest.raises(PeerUnknown):
        alpha.connections.dial("gamma")
    alpha.connections.dial("beta")
    stage.until(lambda: alpha.core.saw("ready"))
    stranger = raw(alpha)
    stranger.hello(name="gamma")
    assert "in the roster" in stage.until(stranger.hear).text


def test_the_socket_is_this_users_alone_and_has_one_owner(stage):
    alpha = stage.node("alpha")
    path = stage.place / "alpha.sock"
    assert {stat.S_IMODE(each.stat().st_mode) for each in stage.place.iterdir()} == {0o600}
    with pytest.raises(NodeRunning, match="another node already listens"):
        stage.node("alpha", 2)
    assert path.exists()
    alpha.close()
    assert not path.exists()
    stage.node("alpha", 3)


def test_an_address_that_is_taken(stage):
    alpha = stage.node("alpha", listen="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="cannot listen"):
        stage.node("beta", listen=alpha.connections.address)
