"""Links between nodes over real sockets: how one stands, how it ends, and which epoch of a peer it belongs to."""

from __future__ import annotations

import errno
import os
import subprocess

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

    assert alpha.connections.dial("beta") is to_beta
    assert beta.connections.dial("alpha") is to_alpha, "one connection carries both directions"
    ((_, back, _),) = beta.core.saw("ready")
    assert [region.token for region in back.regions] == [to_beta.token] * 2
    assert to_alpha.token != to_beta.token
    beta.core.on_message = lambda peer, body, about: peer.send(Done(3), about)
    for number in range(1, 101):
        to_beta.send(PUSH, number)
    stage.until(lambda: len(alpha.core.saw("heard")) == 100)
    assert [about for _, _, about in alpha.core.saw("heard")] == list(range(1, 101))
    assert [about for _, _, about in beta.core.saw("heard")] == list(range(1, 101))
    assert not alpha.counters
    assert not beta.counters


@pytest.mark.parametrize("first", ["alpha", "beta"])
def test_two_that_dial_each_other_at_once_have_one_connection(stage, first):
    alpha, beta = stage.node("alpha", 11), stage.node("beta", 22)
    stage.introduce(alpha, beta)
    for name in ("alpha", "beta") if first == "alpha" else ("beta", "alpha"):
        (alpha if name == "alpha" else beta).connections.dial("beta" if name == "alpha" else "alpha")
    stage.until(lambda: alpha.core.saw("ready") and beta.core.saw("ready"))
    stage.pass_time(2 * TIMEOUT_S)
    for node in (alpha, beta):
        assert [peer.state for peer in node.connections.peers] == [ConnectionState.READY]
        assert not node.core.saw("over")
        assert not node.counters
    assert alpha.connections.of("beta").is_dialled
    assert not beta.connections.of("alpha").is_dialled


def test_a_peer_that_cannot_be_reached_is_heard_all_the_same(stage):
    """Each dials the other, and only one of them has the right address. Nobody else is dialled."""
    alpha, beta = stage.node("alpha", 11), stage.node("beta", 22)
    for name, why in (("gamma", "no node is named 'gamma'"), ("alpha", "this node itself")):
        with pytest.raises(PeerUnknown, match=why):
            alpha.connections.dial(name)
    alpha.connections.take_proxy_list([PeerEntry("beta", f"ipc://{stage.place}/nobody.sock")])
    beta.connections.take_proxy_list([alpha.entry])
    alpha.connections.dial("beta")
    beta.connections.dial("alpha")
    stage.pass_time(0.5)
    to_alpha = beta.connections.of("alpha")
    stage.until(lambda: to_alpha.heard_at > to_alpha.dialled_at, "alpha has the hello, and lets it wait")
    assert not alpha.core.saw("hello")
    stage.pass_time(TIMEOUT_S - 1.5)
    stage.until(lambda: alpha.core.saw("ready") and beta.core.saw("ready"))
    assert not alpha.core.saw("over")
    assert not beta.core.saw("over")
    stage.pass_time(PING_S)
    assert not beta.counters, "no message is dropped"


@pytest.fixture
def rival(stage, raw):
    """Alpha, which has dialled beta; beta; and a hello of beta's that waits at alpha."""
    alpha, beta = stage.pair()
    second = raw(alpha)
    second.hello(name="beta", epoch=22)
    stage.until(lambda: second.socket.poll(0), "it is looked whether it is there")
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
    assert not alpha.connections.of("beta").is_dialled
    alpha.connections.leave(alpha.connections.of("beta"), "enough")
    assert isinstance(stage.until(second.hear), Refused)
    assert len(alpha.core.saw("hello")) == 2, "a hello is heard once"


def test_a_hello_beside_a_connection_that_stands_is_refused_after_a_while(stage, rival):
    alpha, beta, second = rival
    stage.pass_time(TIMEOUT_S / 2 + 2 * PING_S)
    assert stage.until(second.hear).text == "connected already"
    assert [peer.state for peer in beta.connections.peers] == [ConnectionState.READY]
    alpha.connections.leave(alpha.connections.of("beta"), "enough")
    assert len(alpha.core.saw("hello")) == 1, "it waits no longer"


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


@pytest.mark.parametrize("has_dialled", [True, False])
def test_a_peer_that_falls_silent_is_lost(stage, has_dialled):
    alpha, beta = stage.pair()
    node, silent = (beta, alpha) if has_dialled else (alpha, beta)
    stage.pass_time(2 * TIMEOUT_S)
    assert not node.core.saw("over"), "a quiet one is kept by pings"
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
    session = beta.connections.of("alpha")
    alpha.connections.leave(link)
    alpha.connections.leave(link)
    stage.until(lambda: beta.core.saw("over"))
    assert beta.core.saw("over") == [(session, Ending.BYE, "it said bye")]
    beta.core.welcome(session)  # too late: nothing happens
    beta.connections.leave(session, "too late")
    assert link.state is ConnectionState.CLOSED
    assert not alpha.core.saw("over")
    alpha.connections.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)
    first, second = [session for session, _ in beta.core.saw("hello")]
    assert first.token != second.token
    assert first.number != second.number


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


def test_the_same_name_proves_no_death_where_its_process_may_run(stage, raw, caplog):
    """Without keys two nodes, of two hosts or of one, may have been given one name, and the first may be writing
    still."""
    beta = stage.node("beta", 22)
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {"host": host_id(), "pid": os.getpid()}
    for epoch, where in enumerate(({"host": "first"}, here, {**here, "pid": ended.pid}, here), start=1):
        welcomed(stage, raw(beta), name="alpha", epoch=epoch, **where)
    assert f"process {os.getpid()} of this name runs" in caplog.text
    assert [step for _, step, _ in beta.core.saw("over")] == [Ending.LOST, Ending.LOST, Ending.RESTARTED]


def test_a_peer_that_was_restarted_is_noticed_by_who_dialled_it(stage):
    alpha, beta = stage.pair()
    beta.core.on_message = lambda peer, body, about: pytest.fail("this one is dead")
    stage.nodes.remove(beta)
    for peer in beta.connections.peers:
        peer.fault = "killed: it says no bye"
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
        epochs.begin(str(number), 2)
    assert not epochs.is_over("a", 198), "it is forgotten"
    assert [epochs.is_over(str(number), 1) for number in range(5000)] == [False] * 904 + [True] * 4096


def test_names_that_the_roster_has_no_longer_are_not_kept(stage):
    """Hosts that come and go under names of their own would otherwise be remembered for ever."""
    alpha, beta = stage.pair()
    for number in range(4):
        alpha.connections.take_proxy_list([beta.entry, PeerEntry(f"pod-{number}", f"ipc://{stage.place}/nobody.sock")])
        alpha.connections.dial(f"pod-{number}")
        stage.pass_time(TIMEOUT_S + 1.0)
    assert alpha.connections.of("pod-3").why
    alpha.connections.take_proxy_list([])
    assert alpha.connections.known == ["beta"], "that one is connected"
    alpha.connections.leave(alpha.connections.of("beta"))
    alpha.connections.take_proxy_list([])
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
