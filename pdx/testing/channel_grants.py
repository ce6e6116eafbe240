"""Conformance of channels: nobody writes where it was not let."""

from __future__ import annotations

import secrets
from typing import ClassVar

import pytest

from pdx.errors import ChannelBroken, ChannelError
from pdx.testing.channel_stage import MIB, Peer, Side, Stage
from pdx.testing.waiting import wait_until
from pdx.transports.channel import TOKEN_BYTES, Channel, Piece, Region


class Grants:
    """Sessions, spans, and what is refused at the receiver."""

    region: ClassVar[type[Region]]

    def _refused(self, stage: Stage, channel: Channel, reader: Side, pieces: list[Piece]) -> None:
        before, count = bytes(reader.view), len(reader.take())
        assert stage.written(channel, pieces, b"bad") == "WriteRefused"
        assert bytes(reader.view) == before
        assert len(reader.take()) == count

    @pytest.mark.parametrize("count", [1, 3, 200])
    def test_a_write_outside_the_grants_changes_nothing(self, stage: Stage, checks: None, count: int) -> None:
        """One bad piece among good ones, of all sizes: none of them lands, and the next good write does."""
        writer, reader = stage.side(), stage.side()
        _, remote = reader.session((0, MIB), (4 * MIB, MIB))
        channel = writer.connect(remote)
        good = [Piece(0, at * 4096, 4096) for at in range(count - 1)]
        self._refused(stage, channel, reader, [*good, Piece(0, 2 * MIB, 16)])
        self._refused(stage, channel, reader, [*good, Piece(0, MIB - 8, 16)])
        self._refused(stage, channel, reader, [*good, Piece(0, 4 * MIB - 1, MIB)])
        self._refused(stage, channel, reader, [Piece(0, 2 * MIB, 2 * MIB), *good])
        again = writer.connect(remote)
        assert stage.written(again, [Piece(0, 4 * MIB, MIB)], b"good") == ""
        assert stage.notified(reader, 1) == [b"good"]
        assert reader.view[4 * MIB : 5 * MIB] == writer.view[:MIB]

    def test_a_piece_lies_in_one_span(self, stage: Stage, checks: None) -> None:
        """Two spans side by side may belong to two chunks; a piece across both is a mistake."""
        writer, reader = stage.side(), stage.side()
        _, remote = reader.session((0, MIB), (MIB, MIB))
        self._refused(stage, writer.connect(remote), reader, [Piece(0, MIB - 1, 2)])

    def test_a_piece_may_lie_anywhere_inside_its_span(self, stage: Stage) -> None:
        """At its end, in its middle."""
        writer, reader = stage.side(), stage.side()
        _, remote = reader.session((0, MIB), (MIB, 2 * MIB))
        channel = writer.connect(remote)
        assert stage.written(channel, [Piece(0, MIB + 5, 7), Piece(0, 3 * MIB - 9, 9), Piece(0, MIB - 1, 1)]) == ""

    def test_a_session_without_grants_may_write_nothing(self, stage: Stage, checks: None) -> None:
        """Connecting alone allows nothing."""
        writer, reader = stage.side(), stage.side()
        self._refused(stage, writer.connect(reader.session()[1]), reader, [Piece(0, 0, 1)])

    def test_grants_are_of_one_session(self, stage: Stage, checks: None) -> None:
        """What one peer may write to, another may not."""
        writer, reader = stage.side(), stage.side()
        reader.session((0, MIB))
        _, remote = reader.session((MIB, MIB))
        self._refused(stage, writer.connect(remote), reader, [Piece(0, 0, 4096)])

    def test_grants_come_and_go_while_connected(self, stage: Stage, checks: None) -> None:
        """A span that was taken back is refused; one that is given later is not."""
        writer, reader = stage.side(), stage.side()
        token, remote = reader.session((0, MIB))
        listener = reader.region.listen()
        channel = writer.connect(remote)
        assert stage.written(channel, [Piece(0, 0, MIB)]) == ""
        assert wait_until(lambda: listener.revoke(token, 0, MIB), "nothing lands there any more")
        assert listener.revoke(token, 0, MIB)
        self._refused(stage, channel, reader, [Piece(0, 0, MIB)])
        listener.grant(token, MIB, MIB)
        assert stage.written(writer.connect(remote), [Piece(0, MIB, MIB)]) == ""

    def test_nothing_lands_where_it_was_taken_back(self, stage: Stage, checks: None, peer: Peer) -> None:
        """A peer that writes on and on: as soon as `revoke` is True the memory is another's, and stays as it is."""
        nbytes = 4 * MIB  # a write takes a while, so that one is landing when the span is taken back
        reader = stage.side()
        token, remote = reader.session((0, nbytes), (nbytes, MIB))
        channel = peer.connect(remote)
        mine = secrets.token_bytes(nbytes)
        peer.do("storm", channel, [0, 0, nbytes], 100)
        stage.notified(reader, 3)
        wait_until(lambda: reader.region.listen().revoke(token, 0, nbytes), "nothing lands there any more")
        reader.view[:nbytes] = mine
        errors = peer.do("finish")
        assert set(errors) <= {"", "WriteRefused", "ChannelBroken"}
        assert reader.view[:nbytes] == mine
        assert len(reader.take()) >= errors.count("")

    def test_the_same_listener_each_time(self, stage: Stage) -> None:
        """A region has one."""
        region = stage.side().region
        assert region.listen() is region.listen()

    def test_a_span_that_was_never_granted_is_free(self, stage: Stage) -> None:
        """Nothing can be landing there, whatever the session."""
        reader = stage.side()
        token, _ = reader.session((0, MIB))
        assert reader.region.listen().revoke(token, 2 * MIB, MIB)
        assert reader.region.listen().revoke(secrets.token_bytes(TOKEN_BYTES), 0, MIB)

    @pytest.mark.parametrize("kind", ["unknown", "expelled", "almost right"])
    def test_a_wrong_token_opens_nothing(self, stage: Stage, kind: str) -> None:
        """Where the receiver cannot tell, at least nobody hears of such a write."""
        writer, reader = stage.side(), stage.side()
        token, remote = reader.session((0, MIB))
        wrong = {
            "unknown": secrets.token_bytes(16),
            "expelled": token,
            "almost right": token[:-1] + bytes([token[-1] ^ 1]),
        }
        if kind == "expelled":
            reader.region.listen().expel(token)
        fake = type(remote)(remote.scheme, remote.nbytes, wrong[kind], remote.detail)
        if self.region.checks_writes:
            with pytest.raises(ChannelBroken):
                writer.region.connect(fake)
            return
        try:
            stage.written(writer.region.connect(fake), [Piece(0, 0, 16)], b"bad")
        except ChannelError:
            return
        assert not reader.take()

    def test_an_expelled_session_is_over(self, stage: Stage) -> None:
        """Its channel breaks, its grants are gone; the other session goes on. Twice is as good as once."""
        writer, reader = stage.side(), stage.side()
        token, remote = reader.session((0, MIB))
        other = writer.connect(reader.session((4 * MIB, MIB))[1])
        channel = writer.connect(remote)
        assert stage.written(channel, [Piece(0, 0, MIB)], b"first") == ""
        assert stage.notified(reader, 1) == [b"first"]  # a notification may come later than the write is over
        reader.region.listen().expel(token)
        reader.region.listen().expel(token)
        if self.region.checks_writes:
            assert stage.written(channel, [Piece(0, 0, MIB)], b"second") == "ChannelBroken"
            assert wait_until(lambda: reader.region.listen().revoke(token, 0, MIB), "the span is free")
        assert stage.written(other, [Piece(0, 4 * MIB, MIB)], b"third") == ""
        assert stage.notified(reader, 2) == [b"first", b"third"]
