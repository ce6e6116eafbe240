"""Links between nodes over real sockets: how one stands, how it ends, and which life of a peer it belongs to."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess

import pytest
import zmq
from link_stage import PING_S, TIMEOUT_S, Raw, welcomed
from zmq.utils.monitor import recv_monitor_message

from pdx.errors import ConfigError, PeerUnknown
from pdx.node.peers.handshake import LinkState, LinkStep, SessionState, SessionStep
from pdx.node.peers.lives import Lives
from pdx.telemetry.host import host_id
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Refused
from pdx.wire.peer_messages import Coming, Want

WANT = Want(7, [b"k" * 16])


# ---- a link that stands -------------------------------------------------------------------------


def test_a_peer_that_is_dialled_welcomes_and_both_talk(stage):
    alpha, beta = stage.pair()
    ((link, welcome, schemes),) = alpha.core.saw("ready")
    ((session, offered),) = beta.core.saw("hello")
    assert (link.name, link.state, link.epoch, link.host, link.pid, link.why) == (
        "beta", LinkState.READY, 22, "host", 4242, "",
    )  # fmt: skip
    assert (session.name, session.state, session.epoch, session.host, session.pid) == (
        "alpha", SessionState.OPEN, 11, "host", 4242,
    )  # fmt: skip
    assert schemes == offered == ["tcp", "shm"]
    assert [region.token for region in welcome.regions] == [session.token] * 2

    beta.core.on_message = lambda end, body: end.send(Coming(body.want, 3))
    for number in range(1, 101):
        link.send(Want(number, []))
    stage.until(lambda: len(alpha.core.saw("heard")) == 100)
    assert [body.want for _, body in alpha.core.saw("heard")] == list(range(1, 101))
    assert [body.want for _, body in beta.core.saw("told")] == list(range(1, 101))
    assert not alpha.counters
    assert not beta.counters


def test_two_nodes_that_write_to_each_other_have_two_links(stage):
    alpha, beta = stage.pair()
    beta.links.dial("alpha")
    stage.until(lambda: beta.core.saw("ready"))
    assert [link.name for link in alpha.links.links] == ["beta"]
    assert [session.name for session in alpha.links.sessions] == ["beta"]
    assert alpha.links.sessions[0].token != beta.links.sessions[0].token


def test_dialling_a_peer_that_is_dialled_already_is_the_same_link(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    link = alpha.links.dial("beta")
    assert link.state is LinkState.DIALING
    assert alpha.links.dial("beta") is link
    link.send(WANT)  # not ready: lost
    stage.until(lambda: alpha.core.saw("ready"))
    assert alpha.links.dial("beta") is alpha.links.link("beta") is link
    assert len(beta.core.saw("hello")) == 1
    assert not beta.core.saw("told")


def test_only_who_is_known_is_dialled(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    with pytest.raises(PeerUnknown, match="no node is named 'gamma'"):
        alpha.links.dial("gamma")
    with pytest.raises(PeerUnknown, match="this node itself"):
        alpha.links.dial("alpha")
    assert alpha.links.links == []


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize(
    "listen",
    [
        "tcp://127.0.0.1:0",
        pytest.param("tcp://[::1]:0", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")),
    ],
)
def test_loopback_tcp_with_a_free_port(stage, listen):
    alpha = stage.node("alpha", listen=listen)
    beta = stage.node("beta", 2, listen=listen)
    assert not beta.links.address.endswith(":0")
    stage.introduce(alpha, beta)
    alpha.links.dial("beta")
    stage.until(lambda: alpha.core.saw("ready"))


def test_a_session_may_be_welcomed_later(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.core.on_hello = lambda session: None
    alpha.links.dial("beta")
    stage.until(lambda: beta.core.saw("hello"))
    session = beta.core.saw("hello")[0][0]
    assert session.state is SessionState.NEW
    session.send(Coming(1, 1))  # not open yet: lost
    beta.core.welcome(session)
    stage.until(lambda: alpha.core.saw("ready"))
    assert not alpha.core.saw("heard")
    beta.core.welcome(session)  # once is enough
    with pytest.raises(KeyError):
        session.turn_down("too late")


def test_a_session_may_be_turned_down(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.core.on_hello = lambda session: session.turn_down("no region yet")
    link = alpha.links.dial("beta")
    stage.until(lambda: alpha.core.saw("lost"))
    ((_, step, why),) = alpha.core.saw("lost")
    assert (step, link.state) == (LinkStep.TURNED_DOWN, LinkState.CLOSED)
    assert why == link.why == "it says: no region yet"
    assert beta.links.sessions == []
    assert not beta.core.saw("over")
    beta.core.on_hello = beta.core.welcome
    assert alpha.links.dial("beta") is link
    stage.until(lambda: alpha.core.saw("ready"))


# ---- links that end -----------------------------------------------------------------------------


def test_pings_both_ways_keep_a_quiet_link(stage):
    alpha, beta = stage.pair()
    link, session = alpha.links.link("beta"), beta.links.sessions[0]
    for _ in range(12):
        before = link.heard_at, session.heard_at
        stage.pass_time(PING_S)
        stage.until(lambda before=before: link.heard_at > before[0] and session.heard_at > before[1])
    assert not alpha.core.saw("lost")
    assert not beta.core.saw("over")


def test_a_peer_that_falls_silent_is_lost(stage):
    alpha, beta = stage.pair()
    beta.is_frozen = True
    stage.pass_time(TIMEOUT_S - 1.0)
    assert not alpha.core.saw("lost")
    stage.pass_time(3.0)
    ((link, step, why),) = alpha.core.saw("lost")
    assert (link.state, step) == (LinkState.CLOSED, LinkStep.LOST)
    assert "nothing heard from" in why


def test_a_peer_that_dialled_and_fell_silent_is_over(stage):
    alpha, beta = stage.pair()
    alpha.is_frozen = True
    stage.pass_time(TIMEOUT_S + 2.0)
    ((session, step),) = beta.core.saw("over")
    assert (session.state, step) == (SessionState.OVER, SessionStep.SILENT)
    assert beta.links.sessions == []
    session.send(WANT)  # nothing happens
    alpha.is_frozen = False
    stage.until(lambda: alpha.core.saw("lost"), "alpha hears that its session is over")


def test_a_node_that_was_stopped_itself_blames_nobody(stage):
    alpha, beta = stage.pair()
    stage.now += 1000.0  # nobody got a turn
    alpha.links.tick()
    beta.links.tick()
    stage.pass_time(PING_S)
    assert not alpha.core.saw("lost")
    assert not beta.core.saw("over")


def test_a_peer_that_never_answers_is_lost_and_may_be_dialled_again(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.close()
    link = alpha.links.dial("beta")
    stage.pass_time(TIMEOUT_S + 1.0)
    ((_, step, why),) = alpha.core.saw("lost")
    assert step is LinkStep.LOST
    assert "does 'beta' run there?" in why
    assert alpha.links.dial("beta") is link
    stage.node("beta", 3)
    stage.until(lambda: alpha.core.saw("ready"), "it is reached as soon as it is there")


def test_the_first_that_waits_for_a_link_dialled_for_nobody_has_the_whole_time(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.close()
    alpha.links.dial("beta", is_wanted=False)
    stage.pass_time(TIMEOUT_S - 0.5)
    alpha.links.dial("beta")
    stage.pass_time(TIMEOUT_S - 0.5)
    assert not alpha.core.saw("lost"), "it would be lost with what has just come"
    alpha.links.dial("beta")
    stage.pass_time(1.0)
    assert alpha.core.saw("lost"), "whoever comes later does not keep it for ever"
    alpha.links.dial("beta", is_wanted=False)
    stage.pass_time(TIMEOUT_S - 0.5)
    alpha.links.dial("beta")
    stage.node("beta", 3)
    stage.pass_time(1.0)
    stage.until(lambda: alpha.core.saw("ready"))
    assert len(alpha.core.saw("lost")) == 1, "each dialling anew"


def test_leaving_says_bye(stage):
    alpha, beta = stage.pair()
    link = alpha.links.link("beta")
    link.leave()
    link.leave()
    stage.until(lambda: beta.core.saw("over"))
    assert [step for _, step in beta.core.saw("over")] == [SessionStep.BYE]
    assert link.state is LinkState.CLOSED
    assert not alpha.core.saw("lost")
    alpha.links.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)
    first, second = [session for session, _ in beta.core.saw("hello")]
    assert first.token != second.token
    assert first.number != second.number


def test_closing_says_bye_both_ways(stage):
    alpha, beta = stage.pair()
    beta.links.dial("alpha")
    stage.until(lambda: beta.core.saw("ready"))
    alpha.close()
    stage.until(lambda: beta.core.saw("over") and beta.core.saw("lost"))
    assert beta.core.saw("over")[0][1] is SessionStep.BYE
    assert beta.core.saw("lost")[0][1:] == (LinkStep.LOST, "it said bye")
    alpha.links.close()


def test_leaving_a_peer_that_has_not_answered_yet(stage):
    alpha, beta = stage.node("alpha"), stage.node("beta", 2)
    stage.introduce(alpha, beta)
    beta.core.on_hello = lambda session: None
    link = alpha.links.dial("beta")
    stage.until(lambda: beta.core.saw("hello"))
    link.leave()
    stage.until(lambda: beta.core.saw("over"))
    session, step = beta.core.saw("over")[0]
    assert step is SessionStep.BYE
    beta.core.welcome(session)  # too late: nothing happens
    session.turn_down("too late")
    assert session.state is SessionState.OVER


# ---- lives --------------------------------------------------------------------------------------


def test_a_peer_that_comes_in_another_life_ends_the_one_before(stage, raw):
    beta = stage.node("beta", 22)
    first, second, ghost = raw(beta), raw(beta), raw(beta)
    welcomed(stage, first, name="alpha", epoch=1)
    welcomed(stage, second, name="alpha", epoch=2)
    kinds = [(event[0], event[1].epoch, *event[2:]) for event in beta.core.events]
    assert kinds == [("hello", 1, ["tcp"]), ("over", 1, SessionStep.RESTARTED), ("hello", 2, ["tcp"])]
    ghost.hello(name="alpha", epoch=1)
    answer = stage.until(ghost.hear)
    assert isinstance(answer, Refused)
    assert "has ended" in answer.text
    assert [session.epoch for session in beta.links.sessions] == [2]


def test_the_same_name_on_another_kernel_proves_no_death(stage, raw):
    """Without keys two nodes may have been given one name, and the first may be writing still."""
    beta = stage.node("beta", 22)
    welcomed(stage, raw(beta), name="alpha", epoch=1, host="first")
    second = raw(beta)
    welcomed(stage, second, name="alpha", epoch=2, host="second")
    ((session, step),) = beta.core.saw("over")
    assert (session.epoch, step) == (1, SessionStep.SILENT)
    welcomed(stage, raw(beta), name="alpha", epoch=3, host="second")
    assert [step for _, step in beta.core.saw("over")] == [SessionStep.SILENT, SessionStep.RESTARTED]


def test_the_same_name_proves_no_death_of_a_process_that_runs_here(stage, raw, caplog):
    """Without keys two nodes of one host may have been given one name."""
    beta = stage.node("beta", 22)
    welcomed(stage, raw(beta), name="alpha", epoch=1, host=host_id(), pid=os.getpid())
    ended = subprocess.Popen(["true"])
    ended.wait()
    welcomed(stage, raw(beta), name="alpha", epoch=2, host=host_id(), pid=ended.pid)
    assert f"process {os.getpid()} of this name runs" in caplog.text
    welcomed(stage, raw(beta), name="alpha", epoch=3, host=host_id(), pid=os.getpid())
    assert [step for _, step in beta.core.saw("over")] == [SessionStep.SILENT, SessionStep.RESTARTED]


def test_a_peer_that_welcomes_in_another_life_ended_the_one_before(stage, raw):
    alpha, old = stage.node("alpha", 11), stage.node("beta", 1)
    stage.introduce(alpha, old)
    old.links.dial("alpha")
    stage.until(lambda: old.core.saw("ready"))
    stage.nodes.remove(old)  # killed: it says nothing any more
    old.is_frozen = True
    new = stage.node("beta", 2, listen=f"ipc://{stage.place}/other.sock")
    alpha.links.told([new.entry])
    alpha.links.dial("beta")
    stage.until(lambda: alpha.core.saw("ready"))
    assert [(session.epoch, step) for session, step in alpha.core.saw("over")] == [(1, SessionStep.RESTARTED)]
    old.links.close()


def test_a_hello_of_another_life_loses_the_link_to_the_one_before(stage, raw):
    alpha, _ = stage.pair()
    again = raw(alpha)
    again.hello(name="beta", epoch=23)
    stage.until(lambda: alpha.core.saw("hello"))
    ((link, step, why),) = alpha.core.saw("lost")
    assert step is LinkStep.LOST
    assert "started anew" in why
    assert [event[0] for event in alpha.core.events] == ["ready", "lost", "hello"]


def test_a_peer_that_was_restarted_is_noticed_by_who_dialled_it(stage):
    alpha, beta = stage.pair()
    beta.core.on_message = lambda end, body: pytest.fail("this one is dead")
    stage.nodes.remove(beta)
    beta.links._reception._sessions.clear()  # killed: it says no bye
    beta.links.close()
    fresh = stage.node("beta", 33)
    link = alpha.links.link("beta")
    # ZMQ connects anew by itself, and delivers what is sent then to a node that does not know this session. What is
    # sent before it has noticed is lost, so this goes on as pings would.
    stage.until(lambda: alpha.core.saw("lost") or link.send(WANT))
    assert alpha.core.saw("lost")[0][1:] == (LinkStep.LOST, "it says: say hello first")
    assert not fresh.core.events
    alpha.links.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)
    assert link.epoch == 33


def test_the_same_life_that_dials_anew_gets_a_new_session(stage, raw):
    beta = stage.node("beta", 22)
    first, second = raw(beta), raw(beta)
    welcomed(stage, first, name="alpha", epoch=1)
    welcomed(stage, second, name="alpha", epoch=1)
    ((old, step),) = beta.core.saw("over")
    (new,) = beta.links.sessions
    assert step is SessionStep.SILENT
    assert old.token != new.token
    first.send(WANT)
    second.send(WANT)
    stage.until(lambda: beta.core.saw("told"))
    assert isinstance(stage.until(first.hear), Refused)
    assert [session for session, _ in beta.core.saw("told")] == [new]


def test_a_hello_that_outlived_its_connection_is_no_sign_of_life(stage, raw):
    """Else a process that died just after it dialled would bury the one that took its place."""
    beta = stage.node("beta", 22)
    monitor = beta.links._door._router.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    with Raw(stage, beta) as dead:
        dead.hello(name="alpha", epoch=1)
        dead.socket.setsockopt(zmq.LINGER, 5000)
        _wait_for(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED, beta.links._door)
    _wait_for(monitor, zmq.EVENT_DISCONNECTED, beta.links._door)
    living = raw(beta)
    _wait_for(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED, beta.links._door)  # one thread: it is done with the old one
    beta.links._door._router.disable_monitor()
    monitor.close()
    welcomed(stage, living, name="alpha", epoch=2)
    assert beta.counters["dropped_messages"] == 1
    assert [(session.epoch) for session, _ in beta.core.saw("hello")] == [2]
    assert not beta.core.saw("over")


def _wait_for(monitor, event, door):
    while True:
        wait_until(lambda: door.heed() or monitor.poll(0), what=f"{event!r}")
        if recv_monitor_message(monitor)["event"] == event:
            return


def test_lives_are_remembered_up_to_a_bound():
    lives = Lives()
    assert lives.begin("a", 0) is None
    for epoch in range(1, 200):
        assert lives.begin("a", epoch) == epoch - 1
        assert lives.begin("a", epoch) is None
    assert lives.now("a") == 199
    assert [lives.is_over("a", epoch) for epoch in (198, 199, 150, 0)] == [True, False, True, False]
    for number in range(5000):
        lives.begin(str(number), 1)
    assert lives.now("a") is None
    assert len(lives._now) == len(lives._ended) == 4096


# ---- exceptions that nobody expected ------------------------------------------------------------


def fail(*arguments):
    raise RuntimeError("injected")


def test_an_exception_in_what_a_peer_says_ends_its_session_only(stage):
    alpha, beta = stage.pair()
    gamma = stage.node("gamma", 33)
    stage.introduce(alpha, beta, gamma)
    gamma.links.dial("beta")
    stage.until(lambda: gamma.core.saw("ready"))
    beta.core.on_message = fail
    alpha.links.link("beta").send(WANT)
    stage.until(lambda: beta.core.saw("over"))
    ((session, step),) = beta.core.saw("over")
    assert (session.name, step) == ("alpha", SessionStep.SILENT)
    assert beta.counters["internal_errors"] == 1
    assert [session.name for session in beta.links.sessions] == ["gamma"]
    stage.until(lambda: alpha.core.saw("lost"))


def test_an_exception_in_what_a_dialled_peer_says_ends_that_link_only(stage):
    alpha, beta = stage.pair()
    beta.core.on_message = lambda end, body: end.send(Coming(body.want, 3))
    alpha.core.on_message = fail
    alpha.links.link("beta").send(WANT)
    stage.until(lambda: alpha.core.saw("lost"))
    assert alpha.links.link("beta").state is LinkState.CLOSED
    assert alpha.counters["internal_errors"] == 1
    alpha.links.dial("beta")
    stage.until(lambda: len(alpha.core.saw("ready")) == 2)


def test_an_exception_in_a_hello_turns_that_peer_away(stage, raw):
    beta = stage.node("beta", 22)
    beta.core.on_hello = fail
    peer = raw(beta)
    assert isinstance(welcomed(stage, peer), Refused)
    assert beta.counters["internal_errors"] == 1
    assert not beta.links.sessions


@pytest.mark.parametrize("side", ["link", "session"])
def test_an_exception_in_a_tick_ends_that_link_or_session_only(stage, side, monkeypatch):
    alpha, beta = stage.pair()
    node = alpha if side == "link" else beta
    end = alpha.links.link("beta") if side == "link" else beta.links.sessions[0]
    monkeypatch.setattr(end, "ping", fail)
    stage.pass_time(2 * PING_S)
    assert node.counters["internal_errors"] == 1
    assert node.core.saw("lost" if side == "link" else "over")


def test_no_descriptor_left_for_a_link_is_an_error_that_its_caller_expects(stage, monkeypatch):
    alpha, beta = stage.node("alpha", 11), stage.node("beta", 22)
    stage.introduce(alpha, beta)

    def full(kind):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(alpha.context, "socket", full)
    with pytest.raises(ConfigError, match="beta"):
        alpha.links.dial("beta")
