"""What goes over tcp may be encoded: the suite passes so, bytes are fewer, and who cannot decode gets them plain."""

from __future__ import annotations

import random
import select
import socket
import threading
from contextlib import suppress
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from pdx.errors import ProtocolError
from pdx.testing.channel_conformance import ChannelConformance
from pdx.testing.channel_stage import MIB, Stage
from pdx.transports.channel import Piece
from pdx.transports.streams import coded, frames
from pdx.transports.tcp import Address, TcpRegion


class EncodingTcp(TcpRegion):
    codec: str = "lossless"


@pytest.mark.long
class TestEncodingTcp(ChannelConformance):
    region: ClassVar[type[TcpRegion]] = EncodingTcp


def kv(nbytes: int) -> bytes:
    values = np.random.default_rng(0).standard_normal(nbytes // 2 + 1).astype("<f4").view("<u4")
    return (values >> 16).astype("<u2").tobytes()[:nbytes]


def through_a_pipe(parts: list[bytes], change: dict[int, int] | None = None) -> list[bytes]:
    """What a reader has of these spans, whose stream has other bytes at some places."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        blocks, sent = coded.Blocks([memoryview(part) for part in parts]), bytearray()
        while blocks:
            sent += b"".join(blocks.take())
        for at, value in (change or {}).items():
            sent[at] = value

        def send() -> None:
            with suppress(BrokenPipeError):  # the reader has seen enough
                theirs.sendall(sent)
                theirs.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        into = [bytearray(len(part)) for part in parts]
        try:
            coded.receive(ours, [memoryview(each) for each in into])
            assert not ours.recv(1), "nothing is left"
        finally:
            ours.close()
            thread.join()
        return [bytes(each) for each in into]


@pytest.mark.parametrize("sizes", [[1], [100_000, 1, 2 * MIB + 7]])
def test_every_byte_comes_back(sizes: list[int]) -> None:
    parts = [kv(size) if at % 2 else random.Random(size).randbytes(size) for at, size in enumerate(sizes)]
    assert through_a_pipe(parts) == parts


@pytest.mark.parametrize("seed", range(6))
def test_what_is_damaged_on_the_way_ends_the_stream_or_is_found_by_digests(seed: int) -> None:
    random_ = random.Random(seed)
    parts = [kv(100_000)]
    at = random_.randrange(4 if seed < 3 else 60_000)
    try:
        found = through_a_pipe(parts, {at: random_.randrange(256)})
    except (ProtocolError, OSError):
        return
    assert [len(each) for each in found] == [100_000]


def test_fewer_bytes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    real = coded.Blocks.take

    def counted(self):
        block = real(self)
        sent.append(sum(len(each) for each in block))
        return block

    monkeypatch.setattr(coded.Blocks, "take", counted)
    with Stage(EncodingTcp) as stage:
        ours, theirs = stage.side(4 * MIB), stage.side(4 * MIB)
        ours.region.memory.view[: 2 * MIB] = kv(2 * MIB)
        token, remote = theirs.session((0, 4 * MIB))
        channel = ours.connect(remote)
        assert stage.written(channel, [Piece(0, MIB, 2 * MIB), Piece(5, 100, 77)], b"n") == ""
        assert bytes(theirs.region.memory.view[MIB : 3 * MIB]) == kv(2 * MIB)
    assert 0 < sum(sent) < 2 * MIB * 0.75


def test_a_reader_that_does_not_decode_gets_bytes_as_they_are() -> None:
    with Stage(EncodingTcp) as stage:
        ours, theirs = stage.side(4 * MIB), stage.side(4 * MIB)
        theirs.region.listen().takes_coded = False  # as of a release before
        token, remote = theirs.session((0, 4 * MIB))
        address = msgspec.msgpack.decode(remote.detail, type=Address)
        old = msgspec.msgpack.encode([address.host, address.port])
        channel = ours.connect(msgspec.structs.replace(remote, detail=old))
        assert stage.written(channel, [Piece(0, 0, 2 * MIB)], b"n") == ""
        assert theirs.region.memory.view[: 2 * MIB] == ours.region.memory.view[: 2 * MIB]


def test_who_sends_what_nobody_offered_to_decode_is_cut_off() -> None:
    with Stage(EncodingTcp) as stage:
        theirs = stage.side(MIB)
        theirs.region.listen().takes_coded = False
        token, remote = theirs.session((0, MIB))
        address = msgspec.msgpack.decode(remote.detail, type=Address)
        with socket.create_connection((address.host, address.port)) as stream:
            body = frames.pack_body([Piece(0, 0, 100_000)], b"n", is_coded=True)
            stream.sendall(frames.pack_greeting(token) + b"".join(frames.pack_write(0, body)))
            stream.settimeout(20)
            while stream.recv(1000):
                pass
        assert theirs.region.listen().faults["frame"] == 1


def test_a_reader_that_acknowledges_what_was_not_sent_is_not_believed() -> None:
    """Else the writer's memory would be given to others while it is read."""
    with Stage(EncodingTcp) as stage, socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = stage.side(32 * MIB), stage.side(32 * MIB)
        token, remote = theirs.session((0, 32 * MIB))
        detail = msgspec.msgpack.encode(Address(*server.getsockname()[:2], decodes=True))
        streams: list[socket.socket] = []

        def hasty() -> None:
            for _ in range(EncodingTcp.streams):
                stream, _ = server.accept()
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                streams.append(stream)
                stream.recv(frames.GREETING_BYTES, socket.MSG_WAITALL)
                stream.sendall(frames.pack_answer(frames.OK))

        thread = threading.Thread(target=hasty)
        thread.start()
        channel = ours.connect(msgspec.structs.replace(remote, detail=detail))
        thread.join()
        try:
            transfer = channel.write([Piece(0, 0, 32 * MIB)], b"n")
            [first, *_], _, _ = select.select(streams, [], [], 60)  # by one of them it goes
            assert first.recv(frames.HEAD_BYTES, socket.MSG_WAITALL)
            first.sendall(frames.pack_ack(0, frames.OK))
            assert stage.finish([transfer]) == ["ChannelBroken"]
        finally:
            for stream in streams:
                stream.close()
