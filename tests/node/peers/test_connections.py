"""Links between nodes over real sockets: how one stands, how it ends, and which epoch of a peer it belongs to."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess

import msgspec
import pytest
import zmq
from connection_stage import PING_S, TIMEOUT_S, Raw, welcomed, zmq_events

from pdx.errors import ConfigError, PeerUnknown
from pdx.node.peers.connection import ConnectionState, Ending, Epochs
from pdx.telemetry.host import host_id
from pdx.wire.messages import Done, Push, Refused, Welcome
from pdx.wire.proxy import PeerEntry

PUSH = Push([b"k" * 16])


# ---- a link that stands -------------------------------------------------------------------------


def test_a_peer_that_is_dialled_welcomes_and_both_talk(stage):
    alpha, beta = stage.pair()
    ((to_beta, welcome, schemes),) = alpha.core.saw("ready")
    ((to_alpha, offered),) = beta.core.saw("hello")
    assert (to_beta.name, to_beta.state, to_beta.epoch, to_beta.host, to_beta.pid, to_beta.why) == (
        "beta", ConnectionState.READY, 22, "host", 4242, "",
    )  # fmt: skip
    assert (to_alpha.name, to_alpha.state, to_alpha.epoch, to_alpha.host, to_alpha.pid) == (
        "alpha", ConnectionState.READY, 11, "host", 4242,
    )  # fmt: skip
    assert schemes == offered == ["tcp", "shm"]
    assert [region.token for region in welcome.regions] == [to_alpha.token] * 2

    beta.core.on_message = lambda peer, body, about: peer.send(Done(3), about)
    for number in range(1, 101):
        to_beta.send(PUSH, number)
    stage.until(lambda: len(alpha.core.saw("heard")) == 100)
    assert [about for _, _, about in alpha.core.saw("heard")] == list(range(1, 101))
    assert [about for _, _, about in beta.core.saw("heard")] == list(range(1, 101))
    assert not alpha.counters
    assert not beta.counters


def test_two_nodes_that_write_to_each_other_have_one_connection(stage):
    alpha, beta = stage.pair()
    ((to_alpha, welcome, schemes),) = beta.core.saw("ready")
    assert beta.connections.dial("alpha") is to_alpha
    assert schemes == ["tcp", "shm"]
    assert [peer.name for peer in alpha.connections.peers] == ["beta"]
    assert [peer.name for peer in beta.connections.peers] == ["alpha"]
    assert [region.token for region in welcome.regions] == [alpha.connections.of("beta").token] * 2
    assert alpha.connections.of("beta").token != to_alpha.token
    to_alpha.send(PUSH, 5)
    stage.until(lambda: alpha.core.saw("heard"))


@pytest.mark.parametrize("first", ["alpha", "beta"])
def test_two_that_dial_each_other_at_once_have_one_connection(stage, first):
    alpha, beta = stage.node("alpha", 11), stage.node("beta", 22)
    stage.introduce(alpha, beta)
    for name in ("alpha", "beta") if first == "alpha" else ("beta", "alpha"):
        (alpha if name == "alpha" else beta).connections.dial("beta" if name == "alpha" else "alpha")
    stage.until(lambda: alpha.core.saw("ready") and beta.core.saw("ready"))
    stage.pass_time(TIMEOUT_S)
    stage.until(lambda: stage.pass_time(PING_S) or not alpha.connections._rivals, "the other hello is refused")
    for node in (alpha, beta):
        assert [peer.state for peer in node.connections.peers] == [ConnectionState.READY]
        assert not node.core.saw("over")
        assert not node.connections._rivals
        assert not node.counters
    assert alpha.connections.of("beta").is_dialled
    assert not beta.connections.of("alpha").is_dialled


def test_a_peer_that_cannot_be_reached_is_heard_all_the_same(stage):
    """Each dials the other, and only one of them has the right address."""
    alpha, beta = stage.node("alpha", 11), stage.node("beta", 22)
    alpha.connections.told([PeerEntry("beta", f"ipc://{stage.place}/nobody.sock")])
    beta.connections.told([alpha.entry])
    alpha.connections.dial("beta")
    beta.connections.dial("alpha")
    stage.until(lambda: alpha.connections._rivals)
    stage.pass_time(TIMEOUT_S - 1.0)
    stage.until(lambda: alpha.core.saw("ready") and beta.core.saw("ready"))
    assert not alpha.core.saw("over")
    assert not beta.core.saw("over")
    stage.pass_time(PING_S)
    assert not beta.counters, "no message is dropped"


def test_a_peer_that_was_let_in_and_will_not_come_says_why(stage):
    """The node that has dialled finds out from the welcome that there is no channel for both."""
    alpha, beta = stage.node("alpha", 11), stage.node("beta", 22)
    stage.introduce(alpha, beta)
    beta.connections.dial("alpha")
    beta.core.me = msgspec.structs.replace(beta.core.me, schemes=())
    stage.until(lambda: alpha.core.saw("over"))
    [(peer, step, why)] = alpha.core.saw("over")
    assert step is Ending.TURN_DOWN
    assert "no channel in common" in why
    assert alpha.counters["peers_lost"] == 0
    stage.turn()
    assert alpha.connections.of("beta").why == why, "the status of a node in the roster says so until it comes again"


@pytest.fixture
def rival(stage, raw):
    """Alpha, which has dialled beta; beta; and a hello of beta's that waits at alpha."""
    alpha, beta = stage.pair()
    second = raw(alpha)
    second.hello(name="beta", epoch=22)
    stage.until(lambda: alpha.connections._rivals)
    assert len(alpha.core.saw("hello")) == 1, "the connection that stands may be good"
    return alpha, beta, second


@pytest.mark.parametrize("ending", ["lost unnoticed", "left by the peer", "ended here"])
def test_a_hello_beside_a_connection_is_heard_when_that_is_over(stage, rival, ending):
    """The peer's two sockets are read in any order, so what ends the first may come behind the second's hello."""
    alpha, beta, second = rival
    if ending == "lost unnoticed":
        alpha.connections.of("beta").fault = "it is gone"
        alpha.connections.tick()
        assert [event[0] for event in alpha.core.events[-2:]] == ["over", "hello"]
    elif ending == "left by the peer":
        (old,) = beta.connections.peers
        old.send(PUSH, 7)
        stage.until(lambda: alpha.core.saw("heard"))
        beta.connections.leave(old)
    else:
        alpha.connections.leave(alpha.connections.of("beta"), "no channel")
    assert isinstance(stage.until(second.hear), Welcome)
    assert not alpha.connections._rivals
    assert not alpha.connections.of("beta").is_dialled


def test_a_hello_beside_a_connection_that_stands_is_refused_after_a_while(stage, rival):
    alpha, beta, second = rival
    stage.pass_time(TIMEOUT_S / 2 + 2 * PING_S)
    assert stage.until(second.hear).text == "connected already"
    assert not alpha.connections._rivals
    assert [peer.state for peer in beta.connections.peers] == [ConnectionState.READY]


def test_dialling_a_peer_that_is_dialled_already_is_the_same_connection(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    peer = alpha.connections.dial("beta")
    assert peer.state is ConnectionState.DIALING
    assert alpha.connections.dial("beta") is peer
    peer.send(PUSH, 7)  # not ready: lost
    stage.until(lambda: alpha.core.saw("ready"))
    assert alpha.connections.dial("beta") is alpha.connections.of("beta") is peer
    assert len(beta.core.saw("hello")) == 1
    assert not beta.core.saw("heard")


def test_only_who_is_known_is_dialled(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    with pytest.raises(PeerUnknown, match="no node is named 'gamma'"):
        alpha.connections.dial("gamma")
    with pytest.raises(PeerUnknown, match="this node itself"):
        alpha.connections.dial("alpha")
    assert alpha.connections.peers == []


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
def test_ipv6_with_a_free_port(stage):
    alpha, beta = (stage.node(name, epoch, listen="tcp://[::1]:0") for name, epoch in (("alpha", 1), ("beta", 2)))
    assert not beta.connections.address.endswith(":0")
    stage.introduce(alpha, beta)
    alpha.connections.dial("beta")
    stage.until(lambda: alpha.core.saw("ready"))


def test_a_session_may_be_welcomed_later(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.core.on_hello = lambda session: None
    alpha.connections.dial("beta")
    stage.until(lambda: beta.core.saw("hello"))
    session = beta.core.saw("hello")[0][0]
    assert session.state is ConnectionState.NEW
    session.send(Done(1), 1)  # not open yet: lost
    beta.core.welcome(session)
    stage.until(lambda: alpha.core.saw("ready"))
    assert not alpha.core.saw("heard")
    beta.core.welcome(session)  # once is enough
    assert len([event for event in alpha.core.events if event[0] == "ready"]) == 1


def test_a_session_may_be_turned_down(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.core.on_hello = lambda session: beta.connections.leave(session, "no region yet")
    link = alpha.connections.dial("beta")
    stage.until(lambda: alpha.core.saw("over"))
    ((_, step, why),) = alpha.core.saw("over")
    assert (step, link.state) == (Ending.TURN_DOWN, ConnectionState.CLOSED)
    assert why == link.why == "it says: no region yet"
    assert beta.connections.peers == []
    assert not beta.core.saw("over")
    beta.core.on_hello = beta.core.welcome
    assert alpha.connections.dial("beta") is not link
    stage.until(lambda: alpha.core.saw("ready"))


# ---- links that end -----------------------------------------------------------------------------


def test_pings_both_ways_keep_a_quiet_link(stage):
    alpha, beta = stage.pair()
    link, session = alpha.connections.of("beta"), beta.connections.peers[0]
    for _ in range(12):
        before = link.heard_at, session.heard_at
        stage.pass_time(PING_S)
        assert link.heard_at > before[0]
        assert session.heard_at > before[1]
    assert not alpha.core.saw("over")
    assert not beta.core.saw("over")


@pytest.mark.parametrize("has_dialled", [True, False])
def test_a_peer_that_falls_silent_is_lost(stage, has_dialled):
    alpha, beta = stage.pair()
    node, silent = (beta, alpha) if has_dialled else (alpha, beta)
    silent.is_frozen = True
    stage.pass_time(TIMEOUT_S - 1.0)
    assert not node.core.saw("over")
    stage.pass_time(3.0)
    ((peer, step, why),) = node.core.saw("over")
    assert (peer.state, step, node.connections.peers) == (ConnectionState.CLOSED, Ending.LOST, [])
    assert "nothing heard" in why
    peer.send(PUSH, 7)  # nothing happens
    silent.is_frozen = False
    stage.until(lambda: silent.core.saw("over"), "it hears that it is over")


def test_a_node_that_was_stopped_itself_blames_nobody(stage):
    alpha, beta = stage.pair()
    stage.now += 1000.0  # nobody got a turn
    alpha.connections.tick()
    beta.connections.tick()
    stage.pass_time(PING_S)
    assert not alpha.core.saw("over")
    assert not beta.core.saw("over")


def test_a_peer_that_never_answers_is_lost_and_may_be_dialled_again(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.close()
    link = alpha.connections.dial("beta")
    stage.pass_time(TIMEOUT_S + 1.0)
    ((_, step, why),) = alpha.core.saw("over")
    assert step is Ending.LOST
    assert "does 'beta' run there?" in why
    assert alpha.connections.dial("beta") is not link
    stage.node("beta", 3)
    stage.until(lambda: alpha.core.saw("ready"), "it is reached as soon as it is there")


def test_the_first_that_waits_for_a_link_dialled_for_nobody_has_the_whole_time(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.close()
    alpha.connections.dial("beta", is_wanted=False)
    stage.pass_time(TIMEOUT_S - 0.5)
    alpha.connections.dial("beta")
    stage.pass_time(TIMEOUT_S - 0.5)
    assert not alpha.core.saw("over"), "it would be lost with what has just come"
    alpha.connections.dial("beta")
    stage.pass_time(1.0)
    assert alpha.core.saw("over"), "whoever comes later does not keep it for ever"
    alpha.connections.dial("beta", is_wanted=False)
    stage.pass_time(TIMEOUT_S - 0.5)
    alpha.connections.dial("beta")
    stage.node("beta", 3)
    stage.pass_time(1.0)
    stage.until(lambda: alpha.core.saw("ready"))
    assert len(alpha.core.saw("over")) == 1, "each dialling anew"


def test_leaving_says_bye(stage):
    alpha, beta = stage.pair()
    link = alpha.connections.of("beta")
    alpha.connections.leave(link)
    alpha.connections.leave(link)
    stage.until(lambda: beta.core.saw("over"))
    assert [step for _, step, _ in beta.core.saw("over")] == [Ending.BYE]
    assert link.state is ConnectionState.CLOSED
    assert not alpha.core.saw("over")
    alpha.connections.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)
    first, second = [session for session, _ in beta.core.saw("hello")]
    assert first.token != second.token
    assert first.number != second.number


def test_closing_says_bye_both_ways(stage):
    alpha, beta = stage.pair()
    gamma = stage.node("gamma", 33)
    stage.introduce(alpha, beta, gamma)
    gamma.connections.dial("alpha")
    stage.until(lambda: gamma.core.saw("ready"))
    alpha.close()
    stage.until(lambda: beta.core.saw("over") and gamma.core.saw("over"))
    assert beta.core.saw("over")[0][1:] == (Ending.BYE, "it said bye")
    assert gamma.core.saw("over")[0][1:] == (Ending.BYE, "it said bye")
    alpha.connections.close()


def test_leaving_a_peer_that_has_not_answered_yet(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.core.on_hello = lambda session: None
    link = alpha.connections.dial("beta")
    stage.until(lambda: beta.core.saw("hello"))
    alpha.connections.leave(link)
    stage.until(lambda: beta.core.saw("over"))
    session, step, _ = beta.core.saw("over")[0]
    assert step is Ending.BYE
    beta.core.welcome(session)  # too late: nothing happens
    beta.connections.leave(session, "too late")
    assert session.state is ConnectionState.CLOSED


# ---- epochs -------------------------------------------------------------------------------------


def test_a_peer_that_comes_in_another_life_ends_the_one_before(stage, raw):
    beta = stage.node("beta", 22)
    first, second, ghost = raw(beta), raw(beta), raw(beta)
    welcomed(stage, first, name="alpha", epoch=1)
    welcomed(stage, second, name="alpha", epoch=2)
    kinds = [(event[0], event[1].epoch, event[2]) for event in beta.core.events]
    assert kinds == [("hello", 1, ["tcp"]), ("over", 1, Ending.RESTARTED), ("hello", 2, ["tcp"])]
    ghost.hello(name="alpha", epoch=1)
    answer = stage.until(ghost.hear)
    assert isinstance(answer, Refused)
    assert "has ended" in answer.text
    assert [session.epoch for session in beta.connections.peers] == [2]


def test_the_same_name_on_another_kernel_proves_no_death(stage, raw):
    """Without keys two nodes may have been given one name, and the first may be writing still."""
    beta = stage.node("beta", 22)
    welcomed(stage, raw(beta), name="alpha", epoch=1, host="first")
    second = raw(beta)
    welcomed(stage, second, name="alpha", epoch=2, host="second")
    ((session, step, _),) = beta.core.saw("over")
    assert (session.epoch, step) == (1, Ending.LOST)
    welcomed(stage, raw(beta), name="alpha", epoch=3, host="second")
    assert [step for _, step, _ in beta.core.saw("over")] == [Ending.LOST, Ending.RESTARTED]


def test_the_same_name_proves_no_death_of_a_process_that_runs_here(stage, raw, caplog):
    """Without keys two nodes of one host may have been given one name."""
    beta = stage.node("beta", 22)
    welcomed(stage, raw(beta), name="alpha", epoch=1, host=host_id(), pid=os.getpid())
    ended = subprocess.Popen(["true"])
    ended.wait()
    welcomed(stage, raw(beta), name="alpha", epoch=2, host=host_id(), pid=ended.pid)
    assert f"process {os.getpid()} of this name runs" in caplog.text
    welcomed(stage, raw(beta), name="alpha", epoch=3, host=host_id(), pid=os.getpid())
    assert [step for _, step, _ in beta.core.saw("over")] == [Ending.LOST, Ending.RESTARTED]


def test_a_peer_that_welcomes_in_another_life_ended_the_one_before(stage, raw):
    alpha, old = stage.node("alpha", 11), stage.node("beta", 1)
    stage.introduce(alpha, old)
    old.connections.dial("alpha")
    stage.until(lambda: old.core.saw("ready"))
    stage.settle()
    stage.nodes.remove(old)  # killed: it says nothing any more
    old.is_frozen = True
    new = stage.node("beta", 2, listen=f"ipc://{stage.place}/other.sock")
    alpha.connections.told([new.entry])
    stage.pass_time(TIMEOUT_S + 1.0)
    assert [(peer.epoch, step) for peer, step, _ in alpha.core.saw("over")] == [(1, Ending.LOST)]
    alpha.connections.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)
    ghost = raw(alpha)
    ghost.hello(name="beta", epoch=1)
    assert "has ended" in stage.until(ghost.hear).text
    old.connections.close()


def test_a_hello_of_another_life_loses_the_link_to_the_one_before(stage, raw):
    alpha, _ = stage.pair()
    again = raw(alpha)
    again.hello(name="beta", epoch=23)
    stage.until(lambda: len(alpha.core.saw("hello")) == 2)
    ((link, step, why),) = alpha.core.saw("over")
    assert step is Ending.LOST
    assert "another node was started with it" in why
    assert [event[0] for event in alpha.core.events] == ["ready", "hello", "over", "hello"]


def test_a_peer_that_was_restarted_is_noticed_by_who_dialled_it(stage):
    alpha, beta = stage.pair()
    beta.core.on_message = lambda peer, body, about: pytest.fail("this one is dead")
    stage.nodes.remove(beta)
    beta.connections._last.clear()  # killed: it says no bye
    beta.connections.close()
    fresh = stage.node("beta", 33)
    link = alpha.connections.of("beta")
    # ZMQ connects anew by itself, and delivers what is sent then to a node that does not know this session. What is
    # sent before it has noticed is lost, so this goes on as pings would.
    stage.until(lambda: alpha.core.saw("over") or link.send(PUSH, 7))
    assert alpha.core.saw("over")[0][1:] == (Ending.LOST, "it says: say hello first")
    assert not fresh.core.events
    alpha.connections.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)
    assert alpha.connections.of("beta").epoch == 33


def test_the_same_life_that_dials_anew_gets_a_new_session(stage, raw):
    beta = stage.node("beta", 22)
    first, second = raw(beta), raw(beta)
    welcomed(stage, first, name="alpha", epoch=1)
    welcomed(stage, second, name="alpha", epoch=1)
    ((old, step, _),) = beta.core.saw("over")
    (new,) = beta.connections.peers
    assert step is Ending.LOST
    assert old.token != new.token
    first.send(PUSH, 7)
    second.send(PUSH, 7)
    stage.until(lambda: beta.core.saw("heard"))
    assert isinstance(stage.until(first.hear), Refused)
    assert [session for session, _, _ in beta.core.saw("heard")] == [new]


def test_a_hello_that_outlived_its_connection_is_no_sign_of_life(stage, raw):
    """Else a process that died just after it dialled would end the one that took its place."""
    beta = stage.node("beta", 22)
    with zmq_events(beta) as wait_for:
        with Raw(stage, beta) as dead:
            dead.hello(name="alpha", epoch=1)
            dead.socket.setsockopt(zmq.LINGER, 5000)
            wait_for(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        wait_for(zmq.EVENT_DISCONNECTED)
        living = raw(beta)
        wait_for(zmq.EVENT_HANDSHAKE_SUCCEEDED)  # ZMQ has one thread, so it is done with the old one
    welcomed(stage, living, name="alpha", epoch=2)
    assert beta.counters["messages_dropped"] == 1
    assert [(session.epoch) for session, _ in beta.core.saw("hello")] == [2]
    assert not beta.core.saw("over")


def test_epochs_are_remembered_up_to_a_bound():
    epochs = Epochs()
    epochs.begin("a", 0)
    for epoch in range(1, 200):
        epochs.begin("a", epoch)
        epochs.begin("a", epoch)
        assert epochs.is_over("a", epoch - 1)
        assert not epochs.is_over("a", epoch)
    assert [epochs.is_over("a", epoch) for epoch in (198, 199, 150, 0)] == [True, False, True, False]
    for number in range(5000):
        epochs.begin(str(number), 1)
    assert not epochs.is_over("a", 198), "it is forgotten"
    assert len(epochs._known) == 4096


def test_names_that_the_roster_has_no_longer_are_not_kept(stage):
    """Hosts that come and go under names of their own would otherwise be remembered for ever."""
    alpha, beta = stage.pair()
    for number in range(20):
        alpha.connections.told([beta.entry, PeerEntry(f"pod-{number}", f"ipc://{stage.place}/nobody.sock")])
        alpha.connections.dial(f"pod-{number}")
        stage.pass_time(TIMEOUT_S + 1.0)
    assert alpha.connections.of("pod-19").why
    alpha.connections.told([])
    assert list(alpha.connections._last) == ["beta"], "that one is connected"
    alpha.connections.leave(alpha.connections.of("beta"))
    alpha.connections.told([])
    assert alpha.connections.of("beta") is None


# ---- exceptions that nobody expected ------------------------------------------------------------


def fail(*arguments):
    raise RuntimeError("injected")


@pytest.mark.parametrize("where", ["a message", "a tick"])
@pytest.mark.parametrize("side", ["dialled", "accepted"])
def test_an_exception_ends_that_connection_only(stage, side, where, monkeypatch):
    alpha, beta = stage.pair()
    gamma = stage.node("gamma", 33)
    stage.introduce(alpha, beta, gamma)
    node, other = (alpha, beta) if side == "dialled" else (beta, alpha)
    gamma.connections.dial(node.name)
    stage.until(lambda: gamma.core.saw("ready"))
    end = node.connections.of(other.name)
    if where == "a message":
        node.core.on_message = fail
        other.connections.of(node.name).send(PUSH if side == "accepted" else Done(3), 7)
    else:
        monkeypatch.setattr(end, "send", fail)
        stage.pass_time(2 * PING_S)
    stage.until(lambda: node.core.saw("over") and other.core.saw("over"))
    assert [(peer, step) for peer, step, _ in node.core.saw("over")] == [(end, Ending.LOST)]
    assert node.counters["internal_errors"] == 1
    assert [peer.name for peer in node.connections.peers] == ["gamma"]
    alpha.connections.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)


def test_an_exception_in_a_hello_turns_that_peer_away(stage, raw):
    beta = stage.node("beta", 22)
    beta.core.on_hello = fail
    peer = raw(beta)
    assert isinstance(welcomed(stage, peer), Refused)
    assert beta.counters["internal_errors"] == 1
    assert not beta.connections.peers


def test_no_descriptor_left_for_a_link_is_an_error_that_its_caller_expects(stage, monkeypatch):
    alpha, beta = stage.node("alpha", 11), stage.node("beta", 22)
    stage.introduce(alpha, beta)

    def full(kind):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(alpha.context, "socket", full)
    with pytest.raises(ConfigError, match="beta"):
        alpha.connections.dial("beta")
