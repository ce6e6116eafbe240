"""Conformance of channels: all bytes arrive where they belong, notifications behind them, and nothing lands outside of
grants."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter
from typing import ClassVar

import pytest

from pdx.errors import ChannelBroken, ChannelError
from pdx.testing.channel_stage import MIB, Bell, Peer, Side, Stage, landed
from pdx.testing.waiting import DEADLINE_S, wait_until
from pdx.transports.channel import (
    MAX_NOTIFY_BYTES,
    MAX_PIECES,
    MAX_UNTAKEN_BYTES,
    Channel,
    Piece,
    Region,
    Transfer,
)

_KIB = 1 << 10
_CALM_ROUNDS = 100
_SHAPES: dict[str, list[int]] = {
    "one byte": [1],
    "one": [MIB],
    "few large": [12 * MIB, 12 * MIB],
    "as many as possible": [517] * MAX_PIECES,
    "odd sizes": [1, 4095, 4096, 4097, 65_537, 300_001, 3, 1_048_577],
    "mixed": [4 * _KIB] * 100 + [2 * MIB] * 3 + [64 * _KIB] * 16,
}


def scattered(sizes: list[int], *, seed: int) -> tuple[list[Piece], int]:
    """Pieces of these sizes in an order and at places of their own on both sides, with gaps, and the memory needed."""
    order = random.Random(seed)
    places: list[list[int]] = []
    end = 0
    for _ in range(2):
        at, where = 64, [0] * len(sizes)
        for index in order.sample(range(len(sizes)), len(sizes)):
            where[index] = at
            at += sizes[index] + order.randrange(1, 200)
        places.append(where)
        end = max(end, at + 64)
    pieces = [Piece(*piece) for piece in zip(*places, sizes, strict=True)]
    order.shuffle(pieces)
    return pieces, end


def connected(writer: Side, reader: Side, *spans: tuple[int, int]) -> Channel:
    return writer.connect(reader.session(*spans)[1])


def settle(transfers: list[Transfer]) -> None:
    """Wait until all are over, or until none has ended for a while."""
    left, rounds = transfers, 0
    while left and rounds < _CALM_ROUNDS:
        before, left = left, [transfer for transfer in left if not transfer.poll()]
        rounds = rounds + 1 if len(left) == len(before) else 0
        time.sleep(0.005)


class Writes:
    """What happens to bytes when all goes well."""

    region: ClassVar[type[Region]]

    @pytest.mark.parametrize("shape", _SHAPES)
    def test_every_byte_arrives_and_no_other_changes(self, stage: Stage, shape: str) -> None:
        """Scattered pieces of all sizes; each piece is granted by itself, and everything around it is guarded."""
        pieces, nbytes = scattered(_SHAPES[shape], seed=len(shape))
        writer, reader = stage.side(nbytes), stage.side(nbytes)
        before, source = bytes(reader.view), bytes(writer.view)
        token, remote = reader.session(*((piece.remote, piece.nbytes) for piece in pieces))
        channel = writer.connect(remote)
        assert stage.written(channel, pieces, b"done") == ""
        assert stage.notified(reader, 1) == [b"done"]
        assert reader.take()[0].token == token
        assert bytes(reader.view) == landed(before, source, pieces)
        assert bytes(writer.view) == source

    def test_a_notification_comes_once_and_behind_its_bytes(self, stage: Stage) -> None:
        """Whenever one is there, its bytes are, too, however many writes are in flight."""
        writer, reader = stage.side(), stage.side()
        channel = connected(writer, reader, (0, 8 * MIB))
        sizes = [MIB, 4096, 256 * _KIB, 64] * 6
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        transfers = [
            channel.write([Piece(end - size, end - size, size)], bytes([index]))
            for index, (end, size) in enumerate(zip(ends, sizes, strict=True))
        ]

        checked = 0

        def all_checked() -> bool:
            nonlocal checked
            for payload in reader.payloads()[checked:]:
                end, size = ends[payload[0]], sizes[payload[0]]
                assert reader.view[end - size : end] == writer.view[end - size : end], (
                    f"write {payload[0]} was not there"
                )
                checked += 1
            return checked >= len(sizes)

        stage.until(all_checked, "all writes are there")
        assert set(stage.finish(transfers)) == {""}
        assert Counter(reader.payloads()) == Counter(bytes([index]) for index in range(len(sizes)))
        assert all(transfer.poll() for transfer in transfers)  # once over, always over

    def test_several_writers_with_a_thread_each_and_one_listener(self, stage: Stage) -> None:
        """At the same time, with the numbers of their writes the same; each keeps its own token and its own span."""
        writers, reader = [stage.side(), stage.side()], stage.side()
        share = 2 * MIB
        errors: list[str] = []
        tokens, expected = [], b""

        def write(lane: int, channel: Channel) -> None:
            pieces = [Piece(lane * share + at, lane * share + at, 32 * _KIB) for at in range(0, share, 32 * _KIB)]
            errors.extend(stage.finish([channel.write([piece], bytes([lane])) for piece in pieces]))

        threads = []
        for lane in range(4):
            token, remote = reader.session((lane * share, share))
            tokens.append(token)
            expected += bytes(writers[lane % 2].view[lane * share : (lane + 1) * share])
            threads.append(threading.Thread(target=write, args=(lane, writers[lane % 2].connect(remote))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [""] * 256
        stage.notified(reader, 256)
        assert Counter((each.token, each.payload) for each in reader.take()) == {
            (token, bytes([lane])): 64 for lane, token in enumerate(tokens)
        }
        assert bytes(reader.view) == expected

    def test_writes_over_one_channel_are_independent(self, stage: Stage) -> None:
        """Many in flight, some of the same bytes, waited for in the opposite order."""
        writer, reader = stage.side(), stage.side()
        channel = connected(writer, reader, (0, 8 * MIB))
        pieces = [Piece(index // 2 * 16 * _KIB, (511 - index) * 16 * _KIB, 16 * _KIB) for index in range(512)]
        expected = landed(bytes(reader.view), writer.view, pieces)
        transfers = [channel.write([piece], b"") for piece in pieces]
        for transfer in reversed(transfers):
            assert stage.finish([transfer]) == [""]
        assert stage.notified(reader, 512) == [b""] * 512
        assert bytes(reader.view) == expected

    def test_a_write_wakes_who_waits_for_its_channel_and_nobody_else(self, stage: Stage) -> None:
        """Otherwise, with a hundred peers, a write to one of them would wake a hundred threads."""
        writer, reader = stage.side(), stage.side()
        bells = [Bell(stage), Bell(stage)]
        remotes = [reader.session((0, MIB))[1] for _ in bells]
        channels = [
            writer.region.connect(remote, timeout_s=DEADLINE_S, wake=bell)
            for remote, bell in zip(remotes, bells, strict=True)
        ]
        for channel, own, other in zip(channels, bells, bells[::-1], strict=True):
            own.clear()
            other.clear()
            assert stage.written(channel, [Piece(0, 0, 4096)]) == ""
            if not writer.region.is_polled:
                stage.until(own.is_set, "its own `wake` was set")
            assert not other.is_set()

    def test_both_directions_at_once(self, stage: Stage) -> None:
        sides = [stage.side(), stage.side()]
        half = 4 * MIB
        ways = [connected(sides[0], sides[1], (half, half)), connected(sides[1], sides[0], (half, half))]
        pieces = [Piece(at, half + at, 128 * _KIB) for at in range(0, half, 128 * _KIB)]
        transfers = [channel.write([piece], b"") for piece in pieces for channel in ways]
        assert set(stage.finish(transfers)) == {""}
        for side, other in (sides, reversed(sides)):
            assert len(stage.notified(side, 32)) == 32
            assert side.view[half:] == other.view[:half]

    def test_to_and_from_another_process(self, stage: Stage, peer: Peer) -> None:
        side = stage.side()
        pieces, _ = scattered([4096] * 300 + [MIB, 3], seed=8)
        source = bytes(side.view)
        expected = landed(peer.bytes(0, 8 * MIB), source, pieces)
        _, remote = peer.session((0, 8 * MIB))
        channel = side.connect(remote)
        assert stage.written(channel, pieces, b"there") == ""
        assert peer.do("payloads", 1) == [b"there".hex()]
        assert peer.bytes(0, 8 * MIB) == expected
        _, back = side.session((0, 8 * MIB))
        peer.write(peer.connect(back), pieces, b"back")
        assert peer.do("finish") == [""]
        assert stage.notified(side, 1) == [b"back"]
        assert bytes(side.view) == landed(source, expected, pieces)

    @pytest.mark.parametrize(
        "pieces",
        [
            [],
            [Piece(0, 0, 1)] * (MAX_PIECES + 1),
            [Piece(8 * MIB, 0, 1)],
            [Piece(0, 8 * MIB - 1, 2)],
            [Piece(-1, 0, 2)],
            [Piece(0, 0, 0)],
            [Piece(0, 0, 64), Piece(1 << 60, 0, 1)],
        ],
        ids=["none", "too many", "local", "remote end", "local < 0", "empty", "far away"],
    )
    def test_writes_outside_a_region_do_not_begin(self, stage: Stage, pieces: list[Piece]) -> None:
        """They are the caller's mistake: `ValueError`, and the channel goes on."""
        writer, reader = stage.side(), stage.side()
        before = bytes(reader.view)
        channel = connected(writer, reader, (0, 8 * MIB))
        with pytest.raises(ValueError, match="pieces|outside"):
            channel.write(pieces, b"")
        with pytest.raises(ValueError, match="notification"):
            channel.write([Piece(0, 0, 1)], bytes(MAX_NOTIFY_BYTES + 1))
        assert stage.written(channel, [Piece(0, 0, 1)], b"good") == ""
        assert stage.notified(reader, 1) == [b"good"]
        assert bytes(reader.view[1:]) == before[1:]

    def test_a_reader_of_another_size(self, stage: Stage) -> None:
        """Bounds are those of the region written to."""
        writer, reader = stage.side(MIB), stage.side(2 * MIB)
        channel = connected(writer, reader, (0, 2 * MIB))
        assert stage.written(channel, [Piece(0, MIB, MIB)]) == ""
        assert reader.view[MIB:] == writer.view
        with pytest.raises(ValueError, match="outside"):
            channel.write([Piece(0, MIB + 1, MIB)], b"")

    def test_notifications_that_nobody_takes_are_bounded(self, stage: Stage) -> None:
        """A writer cannot fill the reader's memory with them: it waits, or its notifications are lost, until some are
        taken. Each session has its own bound; one that is expelled at its bound is over, and so are its writes."""
        writer, reader = stage.side(), stage.side()
        listener = reader.region.listen()
        token, remote = reader.session((0, 8 * MIB))
        expelled, channel = writer.connect(remote), connected(writer, reader, (0, 8 * MIB))
        payloads = [number.to_bytes(4) + bytes(MAX_NOTIFY_BYTES - 5) + b"\1" for number in range(100)]
        ended = [expelled.write([Piece(0, 0, 64)], payload) for payload in payloads]
        transfers = [channel.write([Piece(0, 0, 64)], payload) for payload in payloads]
        settle(ended + transfers)
        stage.until(lambda: any(each.poll() for each in ended), "one of those has landed")
        assert stage.written(connected(writer, reader, (0, 8 * MIB)), [Piece(0, 0, 64)], b"other") == ""
        listener.expel(token)
        assert set(stage.finish(ended)) == ({"", "ChannelBroken"} if self.region.checks_writes else {""})
        held = stage.until(listener.take, "some of them are heard")
        own = [each.payload for each in held if each.token != token]
        assert sum(map(len, own)) <= MAX_UNTAKEN_BYTES + 16 * MAX_NOTIFY_BYTES
        reader.seen += [each for each in held if each.token != token]
        stage.until(lambda: b"other" in reader.payloads(), "the other one is heard")
        if self.region.checks_writes:
            assert sorted(stage.notified(reader, 1 + len(payloads))) == [*payloads, b"other"]
        assert set(stage.finish(transfers)) == {""}

        def hears_later() -> bool:
            """Earlier ones, more than there is room for, may have come only now."""
            assert stage.written(channel, [Piece(0, 0, 64)], b"later") == ""
            return b"later" in reader.payloads()

        stage.until(hears_later, "who took them hears of what is written later")


class Grants:
    """Sessions, spans, and what is refused at the receiver."""

    region: ClassVar[type[Region]]

    def _refused(self, stage: Stage, channel: Channel, reader: Side, pieces: list[Piece]) -> None:
        before, count = bytes(reader.view), len(reader.take())
        assert stage.written(channel, pieces, b"bad") == "WriteRefused"
        assert bytes(reader.view) == before
        assert len(reader.take()) == count

    @pytest.mark.parametrize("count", [1, 200])
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

    @pytest.mark.parametrize(
        ("others", "own", "piece"),
        [
            ((), (), Piece(0, 0, 1)),
            ((), ((0, MIB), (MIB, MIB)), Piece(0, MIB - 1, 2)),
            (((0, MIB),), ((MIB, MIB),), Piece(0, 0, 4096)),
        ],
        ids=["none", "two, which may be of two chunks", "another session's"],
    )
    def test_a_piece_lies_in_one_span_of_its_own_session(
        self, stage: Stage, checks: None, others: list[tuple[int, int]], own: list[tuple[int, int]], piece: Piece
    ) -> None:
        writer, reader = stage.side(), stage.side()
        reader.session(*others)
        self._refused(stage, writer.connect(reader.session(*own)[1]), reader, [piece])

    def test_grants_come_and_go_while_connected(self, stage: Stage, checks: None) -> None:
        """A write to a revoked span is refused; to one that is granted later it is not."""
        writer, reader = stage.side(), stage.side()
        token, remote = reader.session((0, MIB))
        listener = reader.region.listen()
        channel = writer.connect(remote)
        assert stage.written(channel, [Piece(0, 0, MIB)]) == ""
        assert wait_until(lambda: listener.revoke(token, 0, MIB), "nothing lands there any more")
        assert listener.revoke(token, 0, MIB), "also one that is not granted any more"
        self._refused(stage, channel, reader, [Piece(0, 0, MIB)])
        listener.grant(token, MIB, MIB)
        assert stage.written(writer.connect(remote), [Piece(0, MIB, MIB)]) == ""

    def test_nothing_lands_where_it_was_taken_back(self, stage: Stage, checks: None, peer: Peer) -> None:
        """A peer keeps writing: as soon as `revoke` is True the memory has another owner, and does not change."""
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

    @pytest.mark.parametrize("kind", ["unknown", "expelled", "almost right"])
    def test_a_wrong_token_opens_nothing(self, stage: Stage, kind: str) -> None:
        """If the receiver cannot tell, such a write is at least not notified."""
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
        """Its channel breaks, its grants are gone; the other session goes on. Expelling twice changes nothing."""
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
