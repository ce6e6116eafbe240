"""TCP passes the suite, and stands what comes over an open port: whatever a stream says, it ends that stream only."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import sys
import termios
import threading
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import msgspec
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdx.errors import ChannelBroken, ChannelUnavailable
from pdx.testing.channel_conformance import ChannelConformance
from pdx.testing.channel_stage import MIB, Stage
from pdx.testing.waiting import wait_until
from pdx.transports.channel import MAX_PIECES, Memory, Piece, RemoteRegion
from pdx.transports.streams import frames, inbound, outbound
from pdx.transports.streams import sockets as sockets_module
from pdx.transports.tcp import Address, TcpRegion


class TestTcp(ChannelConformance):
    region = TcpRegion


class Target:
    """A listener with one session that may write to the first half of its memory, attacked over raw sockets."""

    def __init__(self, stage):
        self.stage = stage
        self.side = stage.side(4 * MIB)
        self.token, self.remote = self.side.session((0, 2 * MIB))
        self.listener = self.side.region.listen()
        address = msgspec.msgpack.decode(self.remote.detail, type=Address)
        self.address = (address.host, address.port)
        self.before = self.digest()
        self._good = stage.side(4 * MIB).connect(self.side.session((3 * MIB, MIB))[1])

    def digest(self):
        return hashlib.blake2b(self.side.view[: 3 * MIB]).digest()

    def stream(self, *data, host="127.0.0.1"):
        sock = socket.create_connection(self.address, timeout=10.0, source_address=(host, 0))
        for each in data:
            sock.sendall(each)
        return sock

    def greeting(self, token=None):
        return frames.pack_greeting(token or self.token)

    def greeted(self, *data):
        """A stream with a right greeting."""
        sock = self.stream(self.greeting())
        assert self.answer(sock) == frames.OK
        for each in data:
            sock.sendall(each)
        return sock

    def answer(self, sock):
        """The next acknowledgement; None if the listener has closed the stream instead."""
        try:
            data = sock.recv(frames.ACK_BYTES, socket.MSG_WAITALL)
        except ConnectionResetError:
            return None
        return frames.unpack_ack(data)[1] if data else None

    def frame(self, pieces, *, number=0, notify=b"evil", body=None):
        """All of a write but its payload."""
        return b"".join(frames.pack_write(number, frames.pack_body(pieces, notify) if body is None else body))

    def ended(self, sock):
        """The listener has closed this stream."""
        with sock:
            try:
                return sock.recv(1) == b""
            except ConnectionResetError:
                return True

    def is_unharmed(self, fault=None):
        """It still serves others, nobody heard of anything, not a byte has changed; `fault` was counted."""
        if fault is not None:
            wait_until(lambda: self.listener.faults[fault], f"{fault} is counted, not only {self.listener.faults}")
        payload = secrets.token_bytes(8)
        assert self.stage.written(self._good, [Piece(0, 3 * MIB, MIB)], payload) == ""
        wait_until(lambda: payload in self.side.payloads(), "the good one is notified")
        assert not [each for each in self.side.take() if each.token == self.token]
        assert self.digest() == self.before


@pytest.fixture
def target():
    with Stage(TcpRegion) as stage:
        target = Target(stage)
        yield target
        target.__dict__.clear()  # pytest holds it a little longer, and it holds mappings


def no_more(sock):
    """Nothing more will be said; the listener may have hung up already."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


HALF = [Piece(0, 0, 4096)]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "greeting"),
        (b"PDX\x01" + bytes(100), "greeting"),
        (frames.pack_greeting(bytes(16))[:-1], "silence"),
    ],
    ids=["http", "another version", "cut short"],
)
def test_garbage_instead_of_a_greeting(target, data, fault):
    sock = target.stream(data)
    no_more(sock)
    assert target.ended(sock)
    target.is_unharmed(fault)


def test_a_wrong_token(target):
    """CVE-2026-93838: a greeting has one length, and nothing in it is decoded."""
    with target.stream(target.greeting(b"\xff\xff\xff\xff" + bytes(12))) as sock:
        assert target.answer(sock) == frames.UNKNOWN
        assert sock.recv(1) == b""
    target.is_unharmed("token")


@settings(max_examples=examples(40), database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(min_size=1, max_size=600), is_greeted=st.booleans())
def test_random_bytes(target, data, is_greeted):
    """Before and behind a greeting."""
    sock = target.greeted(data) if is_greeted else target.stream(data)
    no_more(sock)
    assert target.ended(sock)
    assert target.digest() == target.before


FRAMES_THAT_CANNOT_BE = {
    "ahead": lambda frame: frame(HALF, number=1),
    "far ahead": lambda frame: frame(HALF, number=2**64 - 1),
    "no msgpack": lambda frame: frame(HALF, body=b"\xc1"),
    "an empty piece": lambda frame: frame(HALF, body=msgspec.msgpack.encode([[[0, 0, 0]], b""])),
    "beyond all memory": lambda frame: frame(HALF, body=msgspec.msgpack.encode([[[0, 2**63, 1]], b""])),
    "too many pieces": lambda frame: frame([Piece(0, 0, 1)] * (MAX_PIECES + 1)),
    "notification too long": lambda frame: frame(HALF, notify=bytes(70_000)),
    "body too long, of which nothing comes": lambda frame: frame(HALF, body=bytes(1 << 20))[: frames.HEAD_BYTES],
}


def test_frames_that_cannot_be(target):
    """CVE-2026-93838, CVE-2026-103764: each ends its stream before a byte of its payload is looked at."""
    for name, frame in FRAMES_THAT_CANNOT_BE.items():
        sock = target.greeted()
        with suppress(ConnectionResetError, BrokenPipeError):  # it saw enough
            sock.sendall(frame(target.frame) + bytes(4096))
        assert target.ended(sock), name
    wait_until(lambda: target.listener.faults["frame"] == len(FRAMES_THAT_CANNOT_BE), "each is counted")
    target.is_unharmed()


@pytest.mark.parametrize("changed", [0, 3, 4, 11, 12, 15, 16, 17, 20, 24, 28, 40, frames.HEAD_BYTES - 1])
def test_a_damaged_head_writes_nothing_outside_the_grants(target, changed):
    """CVE-2026-103764: no number in a header decides where bytes go before it was checked."""
    frame = bytearray(target.frame([Piece(0, 2 * MIB, 4096)]))
    frame[changed] ^= 0xFF
    with target.greeted(bytes(frame)) as sock:
        with suppress(ConnectionResetError, BrokenPipeError):  # it saw enough
            sock.sendall(bytes(4096))
        no_more(sock)
        assert target.answer(sock) in (None, frames.REFUSED)
    target.is_unharmed()


def test_a_replayed_frame(target):
    """A write that is over does not come again, though its span is granted still."""
    frame = target.frame(HALF, notify=b"once")
    with target.greeted(frame, bytes(4096)) as sock:
        assert target.answer(sock) == frames.OK
        own = bytes(range(256)) * 16
        target.side.view[:4096] = own
        sock.sendall(frame + bytes(4096))
        assert target.ended(sock)
    wait_until(lambda: target.listener.faults["frame"], "it is counted")
    assert target.side.view[:4096] == own
    assert [each.payload for each in target.side.take() if each.token == target.token] == [b"once"]


def test_a_refused_write_is_taken_off_the_stream(target):
    """What follows it is understood, and refused or not for itself."""
    with target.greeted() as sock:
        for number in range(3):
            sock.sendall(target.frame([Piece(0, 0, 10), Piece(0, 2 * MIB, MIB)], number=number) + bytes(MIB + 10))
            assert target.answer(sock) == frames.REFUSED
        target.is_unharmed("refused")
        sock.sendall(target.frame(HALF, number=3, notify=b"good") + bytes(4096))
        assert target.answer(sock) == frames.OK
    assert bytes(target.side.view[:4096]) == bytes(4096)


@pytest.mark.parametrize("nbytes", [frames.HEAD_BYTES // 2, frames.HEAD_BYTES + 1000])
def test_a_frame_cut_short_frees_its_span(target, nbytes):
    """The peer stays, silent, in the middle of a frame: its span is in use until it is expelled, and then free."""
    frame = target.frame(HALF) + bytes([7]) * 4096
    sock = target.greeted(frame[:nbytes])
    is_landing = nbytes >= frames.HEAD_BYTES
    if is_landing:
        # Asked with another size, it takes nothing back and only says whether something is landing.
        wait_until(lambda: not target.listener.revoke(target.token, 0, 1), "the write has begun")
        assert not target.listener.revoke(target.token, 0, 2 * MIB)
    target.listener.expel(target.token)
    wait_until(lambda: target.listener.revoke(target.token, 0, 2 * MIB), "the span is free")
    mine = bytes(target.side.view[:4096])
    assert target.ended(sock)
    assert target.side.view[:4096] == mine
    target.before = target.digest()
    target.is_unharmed()


def test_half_a_greeting_has_a_deadline(target, monkeypatch):
    """Somebody who sends a byte now and then is not waited for: the deadline is for the whole greeting."""
    looks = iter([0.0])

    def monotonic():
        """Behind the first byte it is over."""
        return time.monotonic() + next(looks, 601.0)

    monkeypatch.setattr(inbound, "GREETING_S", 600.0)
    monkeypatch.setattr(sockets_module, "time", SimpleNamespace(monotonic=monotonic))
    assert target.ended(target.stream(target.greeting()[:1]))
    target.is_unharmed("silence")


def served():
    """How many streams have a thread."""
    return sum(thread.name == "pdx-tcp-receive" for thread in threading.enumerate())


def test_strangers_are_few(target, monkeypatch):
    """Who does not greet takes a place for some seconds, not a thread and a descriptor for each that comes."""
    monkeypatch.setattr(inbound, "GREETING_S", 600)  # so that none is gone before the last is there
    before, most = served(), inbound.MAX_STRANGERS_OF_AN_ORIGIN
    strangers = [target.stream() for _ in range(most)]
    wait_until(lambda: served() == before + most, "all are there")
    for number in range(3):
        strangers.append(target.stream())
        assert target.ended(strangers[number]), "the one that had the most time"
    wait_until(lambda: served() == before + most, "no more than before")
    with target.greeted():  # from where they come
        pass
    for sock in strangers:
        sock.close()
    wait_until(lambda: served() == before, "their places are free")
    target.is_unharmed("strangers")


def test_strangers_do_not_keep_others_out(target, monkeypatch):
    """All places are taken, and who greets from elsewhere has one at once. It keeps it when he has greeted."""
    monkeypatch.setattr(inbound, "GREETING_S", 600)
    before, strangers = served(), []
    for host in range(inbound.MAX_STRANGERS // inbound.MAX_STRANGERS_OF_AN_ORIGIN):
        strangers += [target.stream(host=f"127.0.1.{host + 1}") for _ in range(inbound.MAX_STRANGERS_OF_AN_ORIGIN)]
    wait_until(lambda: served() == before + inbound.MAX_STRANGERS, "all places are taken")
    honest = target.stream(target.greeting(), host="127.0.2.1")
    assert target.answer(honest) == frames.OK
    assert target.ended(strangers[0])
    strangers += [target.stream(host="127.0.3.1") for _ in range(inbound.MAX_STRANGERS)]
    wait_until(lambda: target.listener.faults["strangers"] >= inbound.MAX_STRANGERS, "all have come")
    honest.sendall(target.frame(HALF, notify=b"good") + bytes(4096))
    assert target.answer(honest) == frames.OK
    for sock in [*strangers, honest]:
        sock.close()
    wait_until(lambda: [each.payload for each in target.side.take()] == [b"good"], "it is heard")


def test_streams_of_a_session_are_bounded(target):
    streams = [target.greeted() for _ in range(inbound.MAX_STREAMS_OF_A_SESSION)]
    assert target.ended(target.stream(target.greeting()))
    for sock in streams:
        sock.close()
    target.is_unharmed("greeting")


@pytest.fixture
def sockets():
    """Channels over so much memory to a peer that is nothing but sockets: (channel, its streams at the peer)."""
    with ExitStack() as stack:

        def connect(nbytes, rcvbuf=0):
            region = TcpRegion.register(Memory(memoryview(bytearray(nbytes))))
            stack.callback(region.close)
            server, streams = stack.enter_context(socket.create_server(("127.0.0.1", 0))), []
            if rcvbuf:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)

            def serve():
                for _ in range(TcpRegion.streams):
                    streams.append(stack.enter_context(server.accept()[0]))
                    streams[-1].recv(4096)
                    streams[-1].sendall(frames.pack_ack(0, frames.OK))

            thread = threading.Thread(target=serve)
            thread.start()
            detail = msgspec.msgpack.encode(Address(*server.getsockname()[:2]))
            channel = region.connect(RemoteRegion("tcp", nbytes, b"t" * 16, detail))
            thread.join()
            return channel, streams

        yield connect


@pytest.mark.parametrize(
    ("ack", "size"),
    [((0, frames.OK), 64 * MIB), ((1, frames.OK), 4096), ((0, frames.UNKNOWN), 4096), ((0, 9), 4096)],
    ids=["before all was sent", "never begun", "no answer to a write", "no status"],
)
def test_an_acknowledgement_that_cannot_be_breaks_the_channel(sockets, ack, size):
    """A peer that says it has a write which is not wholly sent does not free the bytes of that write."""
    channel, streams = sockets(size)
    transfer = channel.write([Piece(0, 0, size)], b"")
    assert streams[0].recv(4096)  # it has begun
    streams[0].sendall(frames.pack_ack(*ack))
    assert streams[0].recv(min(size - 4096, 8 * MIB) or 1)
    wait_until(transfer.poll, "it is over")
    assert isinstance(transfer.error, ChannelBroken)


def unread(sock):
    """Bytes that have come and were not received."""
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_peer_that_stops_reading_is_heard_all_the_same(sockets):
    """What it had received by then is over, though the next write is stuck half sent."""
    size = 64 * MIB
    channel, streams = sockets(size, rcvbuf=MIB)
    channel._streams[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB // 8)
    first = channel.write([Piece(0, 0, 4096)], b"")
    assert streams[0].recv(frames.HEAD_BYTES + 4096, socket.MSG_WAITALL)
    second = channel.write([Piece(0, 0, size)], b"")
    wait_until(lambda: unread(streams[0]) > outbound._AT_ONCE_BYTES + MIB // 8, "its thread is sending")
    streams[0].sendall(frames.pack_ack(0, frames.OK))
    wait_until(first.poll, "the first one is over")
    assert first.error is None
    assert not second.poll()


def test_it_listens_on_its_address_only(target):
    """CVE-2025-47277 and many others."""
    port = target.address[1]
    assert target.address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.7", "not-a-host.invalid"])  # noqa: S104
def test_addresses_that_nobody_can_be_reached_at(host):
    region = TcpRegion.register(Memory(memoryview(bytearray(4096))), host=host)
    with pytest.raises(ChannelUnavailable):
        region.listen()
    region.close()


def test_names_are_not_looked_up(target):
    """What a peer says is an address or nothing."""
    fake = msgspec.structs.replace(target.remote, detail=msgspec.msgpack.encode(Address("localhost", 1)))
    with pytest.raises(ChannelUnavailable, match="address"):
        target.side.region.connect(fake)


def test_ipv6():
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    memories = [Memory(memoryview(bytearray([value]) * 4096)) for value in (1, 2)]
    writer, reader = (TcpRegion.register(memory, host="::1") for memory in memories)
    token = secrets.token_bytes(16)
    try:
        try:
            listener = reader.listen()
        except ChannelUnavailable as error:
            pytest.skip(str(error))
        remote = listener.invite(token)
        listener.grant(token, 0, 4096)
        transfer = writer.connect(remote).write([Piece(0, 0, 4096)], b"")
        wait_until(transfer.poll, "it is over")
        assert transfer.error is None
        assert bytes(memories[1].view) == b"\1" * 4096
    finally:
        writer.close()
        reader.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n\r\n\r\n",
        frames.pack_ack(1 + frames.MAX_REASON_BYTES, frames.UNREACHABLE),
    ],
    ids=["nothing", "http", "a reason without end"],
)
def test_a_listener_that_is_none_of_ours(answer):
    """Connecting fails; what it answers is read to a bound."""
    region = TcpRegion.register(Memory(memoryview(bytearray(4096))))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        detail = msgspec.msgpack.encode(Address(*server.getsockname()[:2]))
        with pytest.raises(ChannelBroken):
            region.connect(RemoteRegion("tcp", 4096, secrets.token_bytes(16), detail))
        thread.join()
    region.close()
