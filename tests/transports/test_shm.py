"""Shared memory passes the suite; what only it can get wrong."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from pdx.errors import ChannelBroken, ChannelUnavailable
from pdx.security.unix_peer import Credentials
from pdx.testing.channel_conformance import ChannelConformance
from pdx.testing.channel_stage import MIB, Stage
from pdx.testing.waiting import wait_until
from pdx.transports import local, shm
from pdx.transports.channel import Memory, Piece, RemoteRegion
from pdx.transports.local import Address
from pdx.transports.shm import Mapping, ShmRegion
from pdx.transports.streams.frames import ACK_BYTES, OK, pack_body, pack_greeting, pack_write, unpack_ack


class TestShm(ChannelConformance):
    region = ShmRegion


def address_of(remote: RemoteRegion) -> Address:
    return msgspec.msgpack.decode(remote.detail, type=Address)


@contextmanager
def file_of(nbytes):
    """A descriptor of a file of zeros."""
    fd = os.memfd_create("pdx-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def greeted(remote, fds):
    """A raw stream that hands over these files, and the answer to its greeting."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(f"\0pdx-shm-{address_of(remote).name}")
        sock.sendall(pack_greeting(remote.token))
        socket.send_fds(sock, [b"\0\0"], fds)
        answer = sock.recv(ACK_BYTES)
        yield sock, unpack_ack(answer)[1] if answer else None


def test_a_peer_is_invited_without_opening_a_file(monkeypatch):
    """A process that has no descriptor left goes on: what its address says was read once."""
    with Stage(ShmRegion) as stage:
        side = stage.side(MIB)
        first = address_of(side.session()[1])
        opened = []
        monkeypatch.setattr(Path, "read_text", lambda path: opened.append(path))
        assert address_of(side.session()[1]) == first
        assert not opened


def test_only_a_file_that_holds_all_of_it_can_be_registered(tmp_path):
    path, link = tmp_path / "short", tmp_path / "link"
    path.write_bytes(bytes(4096))
    link.symlink_to(path)
    for file, nbytes, why in ((None, 4096, "file"), (path, 8192, "smaller"), (link, 4096, "cannot open")):
        with pytest.raises(ChannelUnavailable, match=why):
            ShmRegion.register(Memory(memoryview(bytearray(nbytes)), file))


@pytest.mark.parametrize("field", ["boot", "network"])
def test_a_peer_elsewhere_is_not_for_us(field):
    """Same name, another host: this is not the listener that was meant."""
    with Stage(ShmRegion) as stage:
        side = stage.side(MIB)
        _, remote = side.session((0, MIB))
        elsewhere = msgspec.structs.replace(address_of(remote), **{field: "another"})
        fake = msgspec.structs.replace(remote, detail=msgspec.msgpack.encode(elsewhere))
        with pytest.raises(ChannelUnavailable, match="another"):
            side.region.connect(fake)


def test_another_user_is_not_listened_to(monkeypatch):
    with Stage(ShmRegion) as stage:
        side = stage.side(MIB)
        _, remote = side.session((0, MIB))
        monkeypatch.setattr(local, "peer_of", lambda stream: Credentials(1, os.geteuid() + 1))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"\0pdx-shm-{address_of(remote).name}")
            assert sock.recv(1) == b""
        assert side.region.listen().faults["greeting"] == 1


def test_another_user_is_not_told_the_token(monkeypatch):
    """Anybody may take a name in the abstract namespace when its owner is gone."""
    with Stage(ShmRegion) as stage, socket.socket(socket.AF_UNIX) as server:
        side = stage.side(MIB)
        _, remote = side.session((0, MIB))
        name = secrets.token_hex(16)
        server.bind(f"\0pdx-shm-{name}")
        server.listen()
        detail = msgspec.msgpack.encode(msgspec.structs.replace(address_of(remote), name=name))
        monkeypatch.setattr(local, "peer_of", lambda stream: Credentials(1, os.geteuid() + 1))
        with pytest.raises(ChannelBroken, match="user"):
            side.region.connect(msgspec.structs.replace(remote, detail=detail))
        taken, _ = server.accept()
        with taken:
            assert taken.recv(1000) == b""


def test_what_is_handed_over_must_be_a_file(tmp_path):
    with Stage(ShmRegion) as stage:
        side = stage.side(MIB)
        _, remote = side.session((0, MIB))
        readable, writable = os.pipe()
        with greeted(remote, [readable]) as (_, status):
            assert status not in (None, OK)
        os.close(readable)
        os.close(writable)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(f"\0pdx-shm-{address_of(remote).name}")
            sock.sendall(pack_greeting(remote.token) + b"\xff\xff")  # the length of more than may be
            assert sock.recv(1) == b""
        assert side.region.listen().faults["silence"] == 0, "they are not even waited for"
        with file_of(0) as empty, greeted(remote, [empty]) as (_, status):
            assert status not in (None, OK)
        with file_of(4096) as good, greeted(remote, [good]) as (_, status):
            assert status == OK


def test_a_write_from_beyond_the_writers_memory(tmp_path):
    """CVE-2026-103764: the writer's offsets are checked against what was mapped."""
    with Stage(ShmRegion) as stage, file_of(4096) as fd:
        side = stage.side(MIB)
        before = bytes(side.view)
        token, remote = side.session((0, MIB))
        for piece in (Piece(0, 0, 4097), Piece(4096, 0, 1), Piece(1 << 48, 0, 1)):
            with greeted(remote, [fd]) as (sock, status):
                assert status == OK
                sock.sendall(b"".join(pack_write(0, pack_body([piece], b""))))
                assert sock.recv(1) == b""
        assert bytes(side.view) == before
        assert not side.take()
        wait_until(lambda: side.region.listen().revoke(token, 0, MIB), "the span is free")


def test_a_copy_behind_which_the_writer_has_closed_is_not_notified(monkeypatch):
    """Its memory may have held something else by then."""
    with Stage(ShmRegion) as stage, file_of(4096) as fd:
        side = stage.side(MIB)
        token, remote = side.session((0, MIB))
        with greeted(remote, [fd]) as (sock, _):
            frame = b"".join(pack_write(0, pack_body([Piece(0, 0, 4096)], b"late")))
            move = ctypes.memmove

            def slow(*arguments):
                move(*arguments)
                sock.shutdown(socket.SHUT_RDWR)

            monkeypatch.setattr(shm.ctypes, "memmove", slow)
            sock.sendall(frame + frame)  # with bytes still to be read the end of the stream is not the next thing
            wait_until(lambda: side.region.listen().faults["lost"], "the stream is given up")
        assert not side.take()
        wait_until(lambda: side.region.listen().revoke(token, 0, MIB), "the span is free")


def test_the_peers_memory_cannot_be_written_through_its_mapping():
    with file_of(8192) as fd:
        mapping = Mapping.open(fd)
        lines = Path("/proc/self/maps").read_text().splitlines()
        permissions = [line.split()[1] for line in lines if line.startswith(f"{mapping.address:x}-")]
        mapping.close()
    assert permissions == ["r--s"]
