"""Conformance of channels: bytes arrive, all of them, where they belong, and notifications behind them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import ClassVar

import pytest

from pdx.testing.channel_stage import MIB, Bell, Peer, Side, Stage, landed
from pdx.testing.waiting import DEADLINE_S
from pdx.transports.channel import (
    MAX_NOTIFY_BYTES,
    MAX_PIECES,
    MAX_UNTAKEN_BYTES,
    NOTIFICATION_BYTES,
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
    "many small": [4 * _KIB] * 2000,
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
    """A channel that may write to these spans."""
    return writer.connect(reader.session(*spans)[1])


def settle(transfers: list[Transfer]) -> None:
    """Wait until all are over, or no more of them have been for a while."""
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
        """Scattered pieces of all sizes; each piece is granted by itself, and everything beside it is guarded."""
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

    def test_few_large_pieces(self, stage: Stage) -> None:
        """Two pieces of 64 MB."""
        pieces = [Piece(0, 70 * MIB, 64 * MIB), Piece(70 * MIB, 5, 64 * MIB)]
        writer, reader = stage.side(134 * MIB), stage.side(134 * MIB)
        expected = landed(bytes(reader.view), writer.view, pieces)
        assert stage.written(connected(writer, reader, (0, 134 * MIB)), pieces) == ""
        assert bytes(reader.view) == expected

    def test_the_same_local_bytes_may_go_to_several_places(self, stage: Stage) -> None:
        """Local pieces may overlap."""
        writer, reader = stage.side(), stage.side()
        pieces = [Piece(100, index * 8192, 4096) for index in range(64)]
        expected = landed(bytes(reader.view), writer.view, pieces)
        assert stage.written(connected(writer, reader, (0, 8 * MIB)), pieces) == ""
        assert bytes(reader.view) == expected

    def test_a_notification_comes_once_and_behind_its_bytes(self, stage: Stage) -> None:
        """Whenever one is there, the bytes it speaks of are, however many writes are in flight."""
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

    def test_writes_over_one_channel_are_independent(self, stage: Stage) -> None:
        """Many in flight, waited for in the opposite order."""
        writer, reader = stage.side(), stage.side()
        channel = connected(writer, reader, (0, 8 * MIB))
        pieces = [Piece(index * 16 * _KIB, (511 - index) * 16 * _KIB, 16 * _KIB) for index in range(512)]
        expected = landed(bytes(reader.view), writer.view, pieces)
        transfers = [channel.write([piece], b"") for piece in pieces]
        for transfer in reversed(transfers):
            assert stage.finish([transfer]) == [""]
        assert stage.notified(reader, 512) == [b""] * 512
        assert bytes(reader.view) == expected

    def test_several_threads_with_a_channel_each(self, stage: Stage) -> None:
        """Four writers' threads into one listener, each session with its own span."""
        writer, reader = stage.side(), stage.side()
        share = 2 * MIB
        errors: list[str] = []

        def write(lane: int, channel: Channel) -> None:
            pieces = [Piece(lane * share + at, lane * share + at, 32 * _KIB) for at in range(0, share, 32 * _KIB)]
            errors.extend(stage.finish([channel.write([piece], bytes([lane])) for piece in pieces]))

        channels = [connected(writer, reader, (lane * share, share)) for lane in range(4)]
        threads = [threading.Thread(target=write, args=each) for each in enumerate(channels)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [""] * 256
        assert Counter(stage.notified(reader, 256)) == {bytes([lane]): 64 for lane in range(4)}
        assert bytes(reader.view) == bytes(writer.view)

    def test_two_writers_and_one_listener(self, stage: Stage) -> None:
        """At the same time, with the numbers of their writes the same; each keeps its own token."""
        first, second, reader = stage.side(), stage.side(), stage.side()
        tokens, channels, pieces = [], [], []
        for index, writer in enumerate([first, second]):
            token, remote = reader.session((index * 4 * MIB, 4 * MIB))
            tokens.append(token)
            channels.append(writer.connect(remote))
            pieces.append([Piece(at, index * 4 * MIB + at, MIB) for at in range(0, 4 * MIB, MIB)])
        transfers = [channels[index].write([pieces[index][n]], bytes([index])) for n in range(4) for index in range(2)]
        assert set(stage.finish(transfers)) == {""}
        stage.notified(reader, 8)
        assert Counter((n.token, n.payload) for n in reader.take()) == {(tokens[i], bytes([i])): 4 for i in range(2)}
        assert bytes(reader.view) == bytes(first.view[: 4 * MIB]) + bytes(second.view[: 4 * MIB])

    def test_a_write_wakes_who_waits_for_its_channel_and_nobody_else(self, stage: Stage) -> None:
        """With a hundred peers a write to one of them would cost a hundred threads their sleep."""
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
        """Each side writes and receives."""
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
        """Bytes and notifications in both directions."""
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

    def test_the_longest_notification(self, stage: Stage) -> None:
        """It arrives whole, and one with NULs, too."""
        writer, reader = stage.side(), stage.side()
        channel = connected(writer, reader, (0, 4096))
        payload = random.Random(1).randbytes(MAX_NOTIFY_BYTES - 2) + b"\0\0"
        assert stage.written(channel, [Piece(0, 0, 4096)], payload) == ""
        assert stage.notified(reader, 1) == [payload]

    @pytest.mark.parametrize(
        "pieces",
        [
            [],
            [Piece(0, 0, 1)] * (MAX_PIECES + 1),
            [Piece(8 * MIB, 0, 1)],
            [Piece(0, 8 * MIB - 1, 2)],
            [Piece(-1, 0, 2)],
            [Piece(0, -1, 2)],
            [Piece(0, 0, 0)],
            [Piece(0, 0, -1)],
            [Piece(0, 0, 64), Piece(1 << 60, 0, 1)],
        ],
        ids=["none", "too many", "local", "remote end", "local < 0", "remote < 0", "empty", "size < 0", "far away"],
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
        """A writer does not fill the reader's memory with them: it waits, or is not heard, until some are taken."""
        writer, reader = stage.side(), stage.side()
        channel = connected(writer, reader, (0, 8 * MIB))
        payloads = [number.to_bytes(4) + bytes(MAX_NOTIFY_BYTES - 4) for number in range(200)]
        transfers = [channel.write([Piece(0, 0, 64)], payload) for payload in payloads]
        settle(transfers)
        held = stage.until(reader.region.listen().take, "some of them are heard")
        assert sum(len(each.payload) for each in held) <= MAX_UNTAKEN_BYTES + 16 * MAX_NOTIFY_BYTES
        reader.seen += held
        if self.region.checks_writes:
            assert sorted(stage.notified(reader, len(payloads))) == payloads
        assert set(stage.finish(transfers)) == {""}

        def hears_later() -> bool:
            """Of those before it, more than there is room for may have come only now."""
            assert stage.written(channel, [Piece(0, 0, 64)], b"later") == ""
            return b"later" in reader.payloads()

        stage.until(hears_later, "who took them hears of what is written later")

    def test_notifications_without_a_word_are_bounded(self, stage: Stage) -> None:
        """Each costs memory, however little it says."""
        writer, reader = stage.side(), stage.side()
        bound = MAX_UNTAKEN_BYTES // NOTIFICATION_BYTES
        channel = connected(writer, reader, (0, 8 * MIB))
        transfers = [channel.write([Piece(0, 0, 1)], b"") for _ in range(bound + bound // 4)]
        settle(transfers)
        held = stage.until(reader.region.listen().take, "some of them are heard")
        assert len(held) <= bound + 16
        reader.seen += held
        if self.region.checks_writes:
            stage.notified(reader, len(transfers))
        assert set(stage.finish(transfers)) == {""}

    def test_a_writer_that_is_not_heard_keeps_no_other_waiting(self, stage: Stage) -> None:
        """The bound is each session's own; a session that is expelled at its bound is over, and so are its writes."""
        writer, reader = stage.side(), stage.side()
        token, remote = reader.session((0, 8 * MIB))
        channel = writer.connect(remote)
        transfers = [channel.write([Piece(0, 0, 64)], bytes(MAX_NOTIFY_BYTES)) for _ in range(100)]
        settle(transfers)
        assert stage.written(connected(writer, reader, (0, 8 * MIB)), [Piece(0, 0, 64)], b"other") == ""
        reader.region.listen().expel(token)
        errors = stage.finish(transfers)
        assert set(errors) == ({"", "ChannelBroken"} if self.region.checks_writes else {""})
        stage.until(lambda: b"other" in reader.payloads(), "the other one is heard")
