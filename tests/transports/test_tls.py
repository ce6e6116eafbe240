"""TLS passes the suite of channels, and stands who listens, changes, cuts off, or answers in another one's place."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import sys
import threading
import time

import msgspec
import pytest

pytest.importorskip("cryptography", reason="makes certificates: pip install '.[tls]'")

from pdx.errors import ChannelBroken, ChannelError, ChannelUnavailable
from pdx.extras import install
from pdx.testing.channel_conformance import BetweenKindsOfMemory, ChannelConformance
from pdx.testing.channel_stage import MIB, Stage
from pdx.testing.waiting import wait_until
from pdx.transports.channel import Availability, Memory, Piece, RemoteRegion
from pdx.transports.streams import frames, inbound, sealed
from pdx.transports.tcp import Address, TcpRegion
from pdx.transports.tls import TlsRegion


class TestTls(BetweenKindsOfMemory):
    """What differs from tcp, which passes all of it."""

    region = TlsRegion


@pytest.mark.long
class TestAllOfTls(ChannelConformance):
    region = TlsRegion


@pytest.fixture
def stage():
    with Stage(TlsRegion) as made:
        yield made


def address_of(remote):
    return msgspec.msgpack.decode(remote.detail, type=Address)


def at(remote, port, **changes):
    """The same region at another port of this host."""
    address = msgspec.structs.replace(address_of(remote), port=port, **changes)
    return msgspec.structs.replace(remote, detail=msgspec.msgpack.encode(address))


def test_what_is_missing_is_named_as_the_package_index_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert TlsRegion.availability() == Availability(False, "cryptography is not installed", install("tls"))


class Between:
    """Somebody on the way, who passes on what `changed` makes of what the writer sends; None: cut it off."""

    def __init__(self, remote, changed=lambda data, before: data):
        self._remote, self._changed = address_of(remote), changed
        self.seen = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._ends = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection((self._remote.host, self._remote.port))
                self._ends += [near, far]
                for source, target, changed in ((near, far, self._changed), (far, near, lambda data, before: data)):
                    thread = threading.Thread(target=self._pass, args=(source, target, changed), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source, target, changed):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                fresh = changed(data, passed)
                if fresh is None:
                    break
                passed += len(data)
                target.sendall(fresh)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        for each in [self._server, *self._ends]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in [self._server, *self._ends]:
            each.close()


@pytest.fixture
def between():
    made = []
    yield lambda *args: made.append(Between(*args)) or made[-1]
    for each in made:
        each.close()


def written(channel, nbytes, notify=b"told"):
    transfer = channel.write([Piece(0, 0, nbytes)], notify)
    wait_until(transfer.poll, "it is over")
    return transfer.error


def test_nothing_of_what_is_written_or_shown_is_on_the_network(stage, between):
    writer, reader = stage.side(MIB), stage.side(MIB)
    token, remote = reader.session((0, MIB))
    secret = secrets.token_bytes(64)
    writer.view[:MIB] = secret * (MIB // 64)
    ear = between(remote)
    channel = writer.region.connect(at(remote, ear.port))
    assert written(channel, MIB, b"what is said") is None
    assert bytes(reader.view[:MIB]) == bytes(writer.view[:MIB])
    assert len(ear.seen) > MIB
    for known in (secret[:8], token, b"what is said", frames.pack_greeting(token)[:4]):
        assert known not in ear.seen
    channel.close()


@pytest.mark.parametrize("changed", ["flipped", "cut"])
def test_what_was_changed_or_cut_off_on_the_way_does_not_count(stage, between, changed):
    writer, reader = stage.side(4 * MIB), stage.side(4 * MIB)
    _, remote = reader.session((0, 4 * MIB))
    late = 2 * MIB

    def change(data, before):
        if before < late:
            return data
        return None if changed == "cut" else bytes([data[0] ^ 1]) + data[1:]

    man = between(remote, change)
    channel = writer.region.connect(at(remote, man.port))
    assert isinstance(written(channel, 4 * MIB), ChannelBroken)
    wait_until(lambda: reader.region.listen().faults["lost"], "the reader has seen it")
    assert reader.take() == []
    channel.close()


def test_who_answers_with_another_certificate_is_told_nothing(stage):
    """Not even the token, by which it could write itself."""
    reader = stage.side(MIB)
    _, remote = reader.session((0, MIB))
    other, _ = sealed.reader_context()
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            sock = server.accept()[0]
            with contextlib.suppress(OSError), other.wrap_socket(sock, server_side=True) as stream:
                heard.append(stream.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ChannelBroken, match="not the one that was told"):
            stage.side(MIB).region.connect(at(remote, server.getsockname()[1]))
        thread.join()
    assert b"".join(heard) == b""


def test_nobody_steps_down_to_plain_tcp(stage):
    writer, reader = stage.side(MIB), stage.side(MIB)
    token, remote = reader.session((0, MIB))
    with pytest.raises(ChannelUnavailable, match="no certificate"):
        writer.region.connect(at(remote, address_of(remote).port, digest=b""))
    with pytest.raises(ChannelUnavailable, match="cannot be reached over tls"):
        writer.region.connect(msgspec.structs.replace(remote, scheme="tcp"))
    plain = TcpRegion.register(Memory(memoryview(bytearray(MIB))))
    try:
        with pytest.raises(ChannelBroken):
            plain.connect(RemoteRegion("tcp", MIB, token, remote.detail))
    finally:
        plain.close()
    assert reader.region.listen().faults["silence"] == 1
    assert reader.take() == []


def test_an_older_version_is_refused(stage):
    reader = stage.side(MIB)
    _, remote = reader.session((0, MIB))
    old = sealed.writer_context()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    address = address_of(remote)
    with socket.create_connection((address.host, address.port)) as sock, pytest.raises(ssl.SSLError):
        old.wrap_socket(sock)


def test_who_shakes_hands_for_ever_goes(stage, monkeypatch):
    """A byte now and then does not keep a place."""
    monkeypatch.setattr(inbound, "GREETING_S", 0.5)
    reader = stage.side(MIB)
    _, remote = reader.session((0, MIB))
    address, listener = address_of(remote), reader.region.listen()
    come, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = sealed.writer_context().wrap_bio(come, going)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = going.read()
    with socket.create_connection((address.host, address.port)) as sock:
        sock.settimeout(0.1)
        began = time.monotonic()
        for byte in hello[:-1]:
            try:
                sock.sendall(bytes([byte]))
                if not sock.recv(1):
                    break
            except TimeoutError:
                assert time.monotonic() - began < 30
            except ConnectionError:  # it was closed before it had read the last byte
                break
        else:
            pytest.fail("it was let finish")
    wait_until(lambda: listener.faults["silence"] == 1, "it is counted")


def test_what_is_no_tls_ends_that_stream_only(stage):
    reader = stage.side(MIB)
    token, remote = reader.session((0, MIB))
    address = address_of(remote)
    for data in (b"", frames.pack_greeting(token), b"\x16\x03\x01\xff\xff" + bytes(1 << 16)):
        with socket.create_connection((address.host, address.port)) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            while sock.recv(4096):
                pass
    channel = stage.side(MIB).region.connect(remote)
    assert written(channel, MIB) is None
    channel.close()


def test_many_acknowledgements_that_come_at_once_are_all_heard(stage):
    """They are in one piece of what was received, and `poll` says nothing of those that were not taken."""
    writer, reader = stage.side(4 * MIB), stage.side(4 * MIB)
    channel = writer.region.connect(reader.session((0, 4 * MIB))[1])
    transfers = [channel.write([Piece(at * 64, at * 64, 64)], b"") for at in range(1000)]
    wait_until(lambda: all(each.poll() for each in transfers), "all are over", timeout_s=60.0)
    assert [each.error for each in transfers if isinstance(each.error, ChannelError)] == []
    channel.close()
