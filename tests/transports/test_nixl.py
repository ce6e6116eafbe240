"""NIXL passes the suite, over what UCX finds best here and over nothing but TCP; and what is NIXL's own."""

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
from kept import kept
from ucx_conformance import UcxConformance, stage_of

from pdx.errors import ChannelBroken
from pdx.testing.channel_conformance import BetweenKindsOfMemory
from pdx.testing.channel_faults import Endings, Malformed
from pdx.testing.channel_stage import MIB, Stage
from pdx.testing.channel_writes import Grants, Writes
from pdx.testing.waiting import wait_until
from pdx.transports.channel import Piece, RemoteRegion
from pdx.transports.nixl import onesided
from pdx.transports.nixl.onesided import BYE, HELLO, MAX_CONNECTIONS, WRITE, Ledger, compose, this_process
from pdx.transports.nixl.region import NixlRegion
from pdx.transports.over_ucx import sealed, unsealed


class NixlTcpRegion(NixlRegion):
    """As between hosts without RDMA."""

    settings: ClassVar[dict[str, str]] = {"TLS": "tcp"}


class TestNixl(BetweenKindsOfMemory):
    region = NixlRegion
    test_a_wrong_token_opens_nothing = Grants.test_a_wrong_token_opens_nothing
    test_damaged_details_do_no_harm = Malformed.test_damaged_details_do_no_harm
    test_abort_before_it_begins = Endings.test_abort_before_it_begins
    test_notifications_that_nobody_takes_are_bounded = Writes.test_notifications_that_nobody_takes_are_bounded
    _connect = Malformed._connect


@pytest.mark.long
class TestAllOfNixl(UcxConformance):
    region = NixlRegion


@pytest.mark.long
class TestNixlOverTcp(UcxConformance):
    region = NixlTcpRegion


@pytest.fixture
def stage() -> Iterator[Stage]:
    with stage_of(NixlRegion) as stage:
        yield stage


def test_it_does_without_torch() -> None:
    """`import nixl` may import torch, which takes seconds."""
    code = (
        "import sys; from pdx.transports.nixl.region import NixlRegion\n"
        "NixlRegion.availability(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "False"


def test_an_expelled_peer_can_write_but_nobody_hears_of_it(stage: Stage) -> None:
    """The limit of one-sided writes: this is why `revoke` stays False until the peer has stopped."""
    writer, reader = stage.side(), stage.side()
    token, remote = reader.session((0, MIB))
    listener = reader.region.listen()
    channel = writer.connect(remote)
    listener.expel(token)
    assert stage.written(channel, [Piece(0, 0, MIB)], b"late") == ""
    assert reader.view[:MIB] == writer.view[:MIB]
    wait_until(lambda: listener.take() or listener.dropped, "the notification comes")
    assert not listener.take()
    assert not listener.revoke(token, 0, MIB)
    channel.close()
    wait_until(lambda: listener.revoke(token, 0, MIB), "the writer has said goodbye")


def test_a_sealed_detail_opens_with_its_token_alone() -> None:
    """Whatever is changed, the library behind never sees it."""
    token = secrets.token_bytes(16)
    made = sealed(RemoteRegion("nixl", 4096, token, b"body"))
    assert unsealed(made) == b"body"
    changes = [{"detail": each} for each in (made.detail[:-1], made.detail + b"x", b"")]
    changes += [{"detail": bytes([made.detail[0] ^ 1]) + made.detail[1:]}, {"token": secrets.token_bytes(16)}]
    for change in (*changes, {"scheme": "ucx"}):
        with pytest.raises(ChannelBroken):
            unsealed(msgspec.structs.replace(made, **change))


def ledger_of(clock: Callable[[], float] = time.monotonic) -> Ledger:
    return Ledger("nixl", MIB, threading.Event(), b"", clock)


class TestLedger:
    """What a receiver that sees nothing may conclude."""

    def _opened(self) -> tuple[Ledger, bytes]:
        ledger, token = ledger_of(), secrets.token_bytes(16)
        ledger.invite(token)
        ledger.grant(token, 0, 4096)
        return ledger, token

    def test_a_session_that_nobody_was_heard_of_is_never_over(self) -> None:
        """Its writer may be connecting right now."""
        ledger, token = self._opened()
        ledger.expel(token)
        assert not ledger.revoke(token, 0, 4096)

    def test_goodbye_of_all_connections_ends_an_expelled_session(self) -> None:
        """Not of one, and not before it is expelled."""
        ledger, token = self._opened()
        for name in (b"1" * 8, b"2" * 8):
            ledger.hear(compose(token, HELLO, name, this_process()))
        ledger.hear(compose(token, BYE, b"1" * 8, b""))
        ledger.expel(token)
        assert not ledger.revoke(token, 0, 4096)
        ledger.hear(compose(token, BYE, b"2" * 8, b""))
        assert ledger.revoke(token, 0, 4096)

    def test_an_open_session_keeps_what_it_was_granted(self) -> None:
        """Even when its writer has gone: it may come again."""
        ledger, token = self._opened()
        ledger.hear(compose(token, HELLO, b"1" * 8, this_process()))
        ledger.hear(compose(token, BYE, b"1" * 8, b""))
        assert not ledger.revoke(token, 0, 4096)
        assert ledger.revoke(token, 4096, 4096)

    def test_a_process_that_cannot_be_told_is_never_gone(self) -> None:
        """Of another host, or nonsense."""
        nested = b"\x95" + this_process()[1:] + b"\x91" * 100_000 + b"\xc0"
        not_utf8 = b"\x94\xa1\xff\xa1x\x01\x01"
        for process in (b"", b"\xc1", not_utf8, nested, this_process().replace(b"pid:[", b"pxd:[")):
            ledger, token = self._opened()
            ledger.hear(compose(token, HELLO, b"1" * 8, process))
            ledger.expel(token)
            assert not ledger.revoke(token, 0, 4096)

    def test_a_session_with_more_connections_than_are_kept_is_never_over(self) -> None:
        """The ones too many may be writing still."""
        ledger, token = self._opened()
        names = [number.to_bytes(8) for number in range(MAX_CONNECTIONS + 1)]
        for name in names:
            ledger.hear(compose(token, HELLO, name, this_process()))
        ledger.expel(token)
        for name in names:
            ledger.hear(compose(token, BYE, name, b""))
        assert ledger.dropped == 1
        assert not ledger.revoke(token, 0, 4096)

    def test_strangers_are_dropped_and_are_no_sign_of_life(self) -> None:
        """Too short, an unknown token, an unknown kind, an expelled session."""
        ledger, token = self._opened()
        stranger = secrets.token_bytes(16)
        for message in (b"", b"x" * 24, compose(stranger, WRITE, bytes(8), b""), compose(token, 9, bytes(8), b"")):
            ledger.hear(message)
        ledger.expel(token)
        assert not ledger.revoke(token, 0, 4096), "its writer may be connecting right now"
        ledger.hear(compose(token, WRITE, bytes(8), b""))
        assert ledger.dropped == 5
        assert not ledger.take()

    def test_sessions_that_are_over_are_not_kept(self) -> None:
        """A span that nobody asks about, as the one for measuring, keeps none of them, whichever end comes first."""
        ledger = ledger_of()
        nothing = kept(ledger)
        for number in range(100):
            token = number.to_bytes(16)
            ledger.invite(token)
            ledger.grant(token, 0, 4096)
            ledger.hear(compose(token, HELLO, b"1" * 8, this_process()))
            ends = [lambda token=token: ledger.expel(token)]
            ends.insert(number % 2, lambda token=token: ledger.hear(compose(token, BYE, b"1" * 8, b"")))
            for end in ends:
                end()
        assert kept(ledger) == nothing

    def test_sessions_of_dead_processes_go_as_others_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody asks about their spans, and they said no goodbye."""
        now, sizes = 0.0, []
        ledger, alive = ledger_of(lambda: now), this_process()
        boot, namespace, pid, started = msgspec.msgpack.decode(alive)
        ends = msgspec.msgpack.encode([boot, namespace, pid + 1, started])
        exists, lives = SimpleNamespace(started=started), lambda of: is_there or (of == pid and number < 60)
        monkeypatch.setattr(onesided, "process_stat", lambda of: exists if lives(of) else None)
        for number in range(100):
            token = number.to_bytes(16)
            ledger.invite(token)
            ledger.grant(token, 0, 4096)
            ledger.hear(compose(token, HELLO, b"1" * 8, alive if number == 7 else ends))
            is_there = True
            ledger.expel(token)
            is_there, now = False, now + onesided.LOOK_S
            sizes.append(kept(ledger).total())
        assert max(sizes[10:60]) == max(sizes[:10]), "the last, the one that lives, and one beside it"
        assert sizes[-1] < sizes[59], "and that one when it has died"

    def test_a_question_for_each_span_is_one_look_at_the_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until it is worth to look again."""
        now = 0.0
        ledger, token = ledger_of(lambda: now), secrets.token_bytes(16)
        ledger.invite(token)
        for offset in range(0, MIB, 4096):
            ledger.grant(token, offset, 4096)
        ledger.hear(compose(token, HELLO, b"1" * 8, this_process()))
        ledger.expel(token)
        looks: list[int] = []
        monkeypatch.setattr(onesided, "process_stat", looks.append)  # the process is gone
        assert not any(ledger.revoke(token, offset, 4096) for offset in range(0, MIB, 4096))
        assert not looks, "it existed just now"
        now = onesided.LOOK_S
        assert all(ledger.revoke(token, offset, 4096) for offset in range(0, MIB, 4096))
        assert len(looks) == 1
