"""Conformance of channels: abort, close, death, silence, restart, leaks, and made-up details."""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdx.errors import ChannelBroken, ChannelError
from pdx.testing.channel_stage import MIB, Peer, Side, Stage
from pdx.testing.waiting import DEADLINE_S, wait_until
from pdx.transports.channel import MAX_DETAIL_BYTES, TOKEN_BYTES, Channel, Piece, Region, RemoteRegion, Transfer

_PROMPT_S = 20.0  # what must not wait for a silent peer takes less than this, on a loaded machine
_ROUNDS = 30
_MAX_GROWTH_BYTES = 12 * MIB


def _flood(channel: Channel, count: int = 24) -> list[Transfer]:
    """More than sockets and queues hold."""
    return [channel.write([Piece(at % 8 * MIB, at % 8 * MIB, MIB)], bytes([at])) for at in range(count)]


def _promptly(action: Callable[[], object]) -> None:
    begin = time.monotonic()
    action()
    assert time.monotonic() - begin < _PROMPT_S


class Endings:
    """A writer or a reader stops of its own will."""

    region: ClassVar[type[Region]]

    def test_abort_before_it_begins(self, stage: Stage) -> None:
        """An aborted write is over soon; without an error it has arrived. The channel goes on."""
        writer, reader = stage.side(), stage.side()
        channel = writer.connect(reader.session((0, 8 * MIB))[1])
        transfers = _flood(channel)
        for transfer in reversed(transfers):
            transfer.abort()
            transfer.abort()
        errors = stage.finish(transfers)
        assert set(errors) <= {"", "TransferAborted"}
        for transfer in transfers:
            transfer.abort()  # a no-op by now
        assert stage.finish(transfers) == errors
        assert stage.written(channel, [Piece(0, 0, 16)], b"last") == ""
        arrived = {bytes([at]) for at, error in enumerate(errors) if not error} | {b"last"}
        stage.until(lambda: arrived <= set(reader.payloads()), "all that have no error are notified")

    def test_close_ends_what_is_in_flight(self, stage: Stage) -> None:
        """All transfers are over at once, local bytes are free, and writes afterwards are broken from the beginning."""
        writer, reader = stage.side(), stage.side()
        channel = writer.connect(reader.session((0, 8 * MIB))[1])
        transfers = _flood(channel)
        channel.close()
        assert all(transfer.poll() for transfer in transfers)
        assert set(stage.finish(transfers)) <= {"", "ChannelBroken"}
        channel.close()
        late = channel.write([Piece(0, 0, 16)], b"")
        assert late.poll()
        assert isinstance(late.error, ChannelBroken)

    def test_a_second_channel_after_the_first_is_closed(self, stage: Stage) -> None:
        """The session outlives its connection."""
        writer, reader = stage.side(), stage.side()
        _, remote = reader.session((0, 8 * MIB))
        for number in range(3):
            channel = writer.connect(remote)
            assert stage.written(channel, [Piece(0, 0, MIB)], bytes([number])) == ""
            channel.close()
        assert stage.notified(reader, 3) == [b"\0", b"\1", b"\2"]

    @pytest.mark.parametrize("who", ["writer", "reader", "listener"])
    def test_closing_a_side_ends_what_is_in_flight(self, stage: Stage, who: str) -> None:
        """From either end, with writes in flight, twice."""
        writer, reader = stage.side(), stage.side()
        transfers = _flood(writer.connect(reader.session((0, 8 * MIB))[1]))
        closes = {
            "writer": writer.region.close,
            "reader": reader.region.close,
            "listener": reader.region.listen().close,
        }
        closes[who]()
        closes[who]()
        assert set(stage.finish(transfers)) <= {"", "ChannelBroken"}

    def test_nothing_lands_behind_a_closed_listener(self, stage: Stage, checks: None) -> None:
        """When `close` has returned, the memory is its owner's alone."""
        writer, reader = stage.side(), stage.side()
        transfers = _flood(writer.connect(reader.session((0, 8 * MIB))[1]))
        reader.region.listen().close()
        mine = secrets.token_bytes(8 * MIB)
        reader.view[:] = mine
        stage.finish(transfers)
        assert bytes(reader.view) == mine

    def test_nothing_is_left_behind(self, stage: Stage) -> None:
        reader, writer = stage.side(), stage.side()
        listener = reader.region.listen()

        def one_round() -> None:
            token, remote = reader.session((0, 8 * MIB))
            channel = writer.connect(remote)
            assert stage.written(channel, [Piece(0, 0, MIB), Piece(0, 2 * MIB, 4096)], b"x") == ""
            reader.take()
            channel.close()
            listener.expel(token)
            wait_until(lambda: listener.revoke(token, 0, 8 * MIB) or not self.region.checks_writes, "the span is free")

        for _ in range(20):  # a library's pools grow when they are first needed
            one_round()
        before = _holdings()
        for _ in range(_ROUNDS):
            one_round()
        wait_until(lambda: _holdings()[:2] <= before[:2], f"no more than {before}, not {_holdings()}")
        gc.collect()
        assert _resident_bytes() - before[2] < _MAX_GROWTH_BYTES


def _holdings() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Deaths:
    """A process dies, is stopped, or comes back."""

    region: ClassVar[type[Region]]
    death_s: ClassVar[float]

    def _stopped_in_the_middle(self, stage: Stage, peer: Peer) -> tuple[Channel, list[Transfer]]:
        """A flood of writes to a peer that stopped just before."""
        side = stage.side()
        channel = side.connect(peer.session((0, 8 * MIB))[1])
        assert stage.written(channel, [Piece(0, 0, MIB)]) == ""
        peer.stop()
        transfers = _flood(channel)
        if self.region.checks_writes:  # else the technology may not need the receiver's processor
            assert not all(transfer.poll() for transfer in transfers)
        return channel, transfers

    def test_death_before_connecting_and_while_idle(self, stage: Stage, peer: Peer) -> None:
        side, (_, remote) = stage.side(), peer.session((0, MIB))
        channel = side.connect(remote)
        assert stage.written(channel, [Piece(0, 0, MIB)]) == ""
        peer.kill()
        with pytest.raises(ChannelError):
            side.region.connect(remote, timeout_s=5.0)
        assert stage.finish([channel.write([Piece(0, 0, MIB)], b"")], self.death_s) == ["ChannelBroken"]

    def test_a_stopped_peer_cannot_be_connected_to(self, stage: Stage, checks: None, peer: Peer) -> None:
        """Connecting fails within its deadline, where the technology needs the peer's processor."""
        _, remote = peer.session((0, MIB))
        side = stage.side()
        peer.stop()
        with pytest.raises(ChannelBroken):
            side.region.connect(remote, timeout_s=0.3)

    def test_death_with_writes_in_flight(self, stage: Stage, peer: Peer) -> None:
        """All of them are soon over; those that did not arrive are broken."""
        channel, transfers = self._stopped_in_the_middle(stage, peer)
        peer.kill()
        errors = stage.finish(transfers, self.death_s)
        assert set(errors) <= {"", "ChannelBroken"}
        if self.region.checks_writes:
            assert "ChannelBroken" in errors
        assert stage.finish([channel.write([Piece(0, 0, 16)], b"")], self.death_s) == ["ChannelBroken"]

    def test_a_stopped_reader_holds_up_nobody(self, stage: Stage, peer: Peer) -> None:
        """A half-open peer: aborting and closing return at once, and then all transfers are over."""
        channel, transfers = self._stopped_in_the_middle(stage, peer)
        for transfer in transfers:
            _promptly(transfer.abort)
        _promptly(channel.close)
        assert all(transfer.poll() for transfer in transfers)
        assert set(stage.finish(transfers)) <= {"", "ChannelBroken", "TransferAborted"}

    def test_a_reader_that_goes_on(self, stage: Stage, peer: Peer) -> None:
        """Writes that waited for it arrive or break; none is lost silently."""
        _, transfers = self._stopped_in_the_middle(stage, peer)
        peer.go_on()
        errors = stage.finish(transfers)
        assert set(errors) <= {"", "ChannelBroken"}
        notified = peer.do("payloads", 1 + errors.count(""))  # the first is that of the write before the stop
        assert {bytes([at]).hex() for at, error in enumerate(errors) if not error} <= set(notified)

    @pytest.mark.parametrize("end", ["kill", "stop"])
    def test_the_memory_a_lost_writer_wrote_to_comes_free(self, stage: Stage, peer: Peer, end: str) -> None:
        """A writer is killed or stopped in the middle of a write: once it is expelled, nothing of it lands any more."""
        if end == "stop" and not self.region.checks_writes:
            pytest.skip(f"{self.region.scheme}: only a dead peer is known not to write")
        reader = stage.side()
        token, remote = reader.session((0, 8 * MIB))
        channel = peer.connect(remote)
        peer.do("storm", channel, [0, 0, 8 * MIB], 40)
        stage.notified(reader, 1)
        getattr(peer, end)()
        reader.region.listen().expel(token)
        wait_until(lambda: reader.region.listen().revoke(token, 0, 8 * MIB), "the span is free", self.death_s)
        mine = secrets.token_bytes(8 * MIB)
        reader.view[:] = mine
        if end == "stop":
            peer.go_on()
            assert set(peer.do("finish")) <= {"", "ChannelBroken"}
        assert bytes(reader.view) == mine

    def test_a_reader_that_restarts(self, stage: Stage, new_peer: Callable[[], Peer]) -> None:
        """A new process, a new token, a new channel; the old one stays broken, and its secret opens nothing."""
        side, peer = stage.side(), new_peer()
        old, remote = self._channel_to(side, peer)
        assert stage.written(old, [Piece(0, 0, MIB)]) == ""
        peer.kill()
        again = new_peer()
        fresh, _ = self._channel_to(side, again)
        assert stage.written(fresh, [Piece(0, MIB, MIB)], b"again") == ""
        assert again.do("payloads", 1) == [b"again".hex()]
        assert stage.finish([old.write([Piece(0, 0, MIB)], b"")], self.death_s) == ["ChannelBroken"]
        with pytest.raises(ChannelError):
            side.region.connect(remote)

    @staticmethod
    def _channel_to(side: Side, peer: Peer) -> tuple[Channel, RemoteRegion]:
        _, remote = peer.session((0, 8 * MIB))
        return side.connect(remote), remote


class Malformed:
    """Details of a region that no listener gave."""

    region: ClassVar[type[Region]]
    is_in_one_process: ClassVar[bool]

    def _connect(self, stage: Stage) -> Callable[..., str]:
        """A function that connects, in another process if possible, and returns its error's name, or ""."""
        here = stage.side(MIB) if self.is_in_one_process else stage.peer(MIB)

        def connect(remote: RemoteRegion, timeout_s: float = 0.5) -> str:
            if isinstance(here, Peer):
                found = here.connect(remote, timeout_s)
                return found["error"] if isinstance(found, dict) else ""
            try:
                here.region.connect(remote, timeout_s=timeout_s).close()
            except ChannelError as error:
                return type(error).__name__
            return ""

        return connect

    @pytest.mark.hypothesis
    def test_made_up_details_are_refused(self, stage: Stage) -> None:
        """Any bytes at all: an error of PDX's, never a crash."""
        connect = self._connect(stage)

        @settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.binary(max_size=300) | st.recursive(_LEAVES, _nested, max_leaves=8).map(msgspec.msgpack.encode))
        def refused(detail: bytes) -> None:
            remote = RemoteRegion(self.region.scheme, MIB, secrets.token_bytes(TOKEN_BYTES), detail)
            assert connect(remote) in ("ChannelBroken", "ChannelUnavailable")

        refused()
        remote = RemoteRegion(self.region.scheme, MIB, secrets.token_bytes(TOKEN_BYTES), b"\xc1" * MAX_DETAIL_BYTES)
        assert connect(remote) in ("ChannelBroken", "ChannelUnavailable")

    def test_damaged_details_do_no_harm(self, stage: Stage) -> None:
        """A valid detail, truncated, with a byte changed or of another scheme: an error of PDX's, or a channel, never a
        crash."""
        connect = self._connect(stage)
        _, remote = stage.side(MIB).session((0, MIB))
        detail = remote.detail
        allowed = {"", "ChannelBroken", "ChannelUnavailable"}
        for at in range(0, len(detail), max(1, len(detail) // 10)):
            changed = detail[:at] + bytes([detail[at] ^ 0x55]) + detail[at + 1 :]
            for damaged in (detail[:at], changed):
                fake = RemoteRegion(remote.scheme, remote.nbytes, remote.token, damaged)
                assert connect(fake) in allowed
        assert connect(RemoteRegion("other", remote.nbytes, remote.token, detail)) == "ChannelUnavailable"
        assert connect(remote, DEADLINE_S) == ""

    def test_a_lie_about_the_size_writes_nothing(self, stage: Stage, checks: None) -> None:
        """The writer believes that the region is larger; the receiver does not."""
        writer, reader = stage.side(4 * MIB), stage.side(MIB)
        before = bytes(reader.view)
        _, remote = reader.session((0, MIB))
        channel = writer.connect(RemoteRegion(remote.scheme, 64 * MIB, remote.token, remote.detail))
        assert stage.written(channel, [Piece(0, 0, 16), Piece(0, MIB, MIB)]) == "WriteRefused"
        assert bytes(reader.view) == before


_LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=40)


def _nested(children: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(children, max_size=6) | st.dictionaries(st.text(max_size=8), children, max_size=4)
