"""CUDA IPC when something is wrong: no way between GPUs, dead processes, drivers that refuse, made-up handles."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest
from cuda_world import LAG_S, one_gpu, strangers
from fake_cuda import FakeCuda, fake_cuda

from pdx.cli import loopback
from pdx.cuda.gpu import Gpu
from pdx.cuda.memory import DeviceMemory, num_mapped
from pdx.errors import ChannelBroken, ChannelUnavailable
from pdx.telemetry.host import process_stat
from pdx.testing.channel_stage import MIB, GpuBlock, HostFile, LegacyGpuBlock, Peer, SecondGpuBlock, SideMemory, Stage
from pdx.testing.waiting import wait_until
from pdx.transports import local
from pdx.transports.channel import GpuMemory, Piece, RemoteRegion
from pdx.transports.cuda_ipc import CudaIpcRegion, CudaSource
from pdx.transports.registry import find
from pdx.transports.streams.frames import ACK_BYTES, OK, UNREACHABLE, pack_greeting, unpack_ack

HOLDINGS = ("handles", "reserved", "mapped", "registered", "streams", "events")


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with one_gpu() as fake:
        yield fake


def stage_of(*memories: type[SideMemory], world=one_gpu) -> Stage:
    return Stage(CudaIpcRegion, memories=memories, world=world)


def held(fake: FakeCuda) -> dict[str, int]:
    """What this process has of the driver, but for contexts."""
    return {kind: count for kind, count in fake.counts().items() if kind in HOLDINGS} | {"ours": num_mapped()}


def changed(before: dict[str, int], now: dict[str, int]) -> set[str]:
    return {kind for kind in before | now if before.get(kind) != now.get(kind)}


def all_back(fake: FakeCuda, before: dict[str, int]) -> None:
    wait_until(lambda: held(fake) == before, f"{before} again, not {held(fake)}")


# ---- what cannot be ------------------------------------------------------------------------


def test_gpus_without_peer_access_are_refused_at_connect():
    with strangers() as fake, stage_of(GpuBlock, SecondGpuBlock, world=strangers) as stage:
        writer, reader = stage.side(), stage.side()
        before = held(fake)
        with pytest.raises(ChannelUnavailable, match="no peer access") as refusal:
            writer.region.connect(reader.session((0, MIB))[1])
        assert all(gpu.uuid in str(refusal.value) for gpu in (Gpu.find("0"), Gpu.find("1")))
        assert reader.region.listen().faults["unreachable"] == 1
        all_back(fake, before)


def test_host_to_host_is_for_shm(fake):
    with stage_of(HostFile) as stage:
        writer, reader = stage.side(MIB), stage.side(MIB)
        _, remote = reader.session((0, MIB))
        assert fake.counts()["contexts"] == 0, "a node that might get a peer with a GPU takes no memory on it for that"
        with pytest.raises(ChannelUnavailable, match="shm") as refusal:
            writer.region.connect(remote)
        assert "the peer cannot" not in str(refusal.value)  # it was not even asked
        # Nor if the writer believes that the reader's memory is a GPU's.
        address = msgspec.structs.replace(local.address_in(remote), gpu="GPU-somewhere")
        with pytest.raises(ChannelUnavailable, match="peer cannot reach.*shm"):
            writer.region.connect(msgspec.structs.replace(remote, detail=msgspec.msgpack.encode(address)))


def test_without_a_gpu_it_says_what_would_help():
    with fake_cuda(gpus=0):
        found = CudaIpcRegion.availability()
        assert not found.is_ok
        assert "NO_DEVICE" in found.why
        assert "driver" in found.fix
        with pytest.raises(ChannelUnavailable, match="NO_DEVICE"), stage_of(HostFile) as stage:
            stage.side(MIB)


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_channels_of_host_memory_refuse_memory_of_a_gpu(fake, scheme):
    with closing(GpuBlock(MIB)) as block:
        with pytest.raises(ChannelUnavailable, match=f"{scheme} moves host memory.*cuda_ipc"):
            find(scheme).register(block.memory)
        assert isinstance(block.memory, GpuMemory)
        for name in ("view", "path"):
            with pytest.raises(ChannelUnavailable, match="GpuMemory"):
                getattr(block.memory, name)


def test_the_loopback_of_the_command_line_moves_memory_of_a_gpu(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PDX_SIDES", "")
    trial = loopback.measure("cuda_ipc", tmp_path, 4 * MIB, one_gpu)
    assert (trial.state, trial.why) == ("ok", "")
    assert not list(tmp_path.iterdir())  # no file stood in for it
    assert not fake.leftovers()


# ---- processes that die --------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(GpuBlock, LegacyGpuBlock), (GpuBlock, HostFile), (HostFile, GpuBlock)])
def test_nothing_of_a_killed_writer_stays_mapped(fake, kinds):
    """Killed at random moments: while it connects, writes, is idle."""
    with stage_of(*kinds) as stage:
        reader = stage.side()
        before = held(fake)
        for count in (_CONNECTING, random.randrange(6), random.randrange(6)):
            token, remote = reader.session((0, 8 * MIB))
            peer = stage.peer()
            stage.side(4096).close()  # the next peer is of the same kind
            _storm_and_kill(stage, reader, peer, remote, count)
            wait_until(lambda token=token: reader.region.listen().revoke(token, 0, 8 * MIB), "the span is free")
            own = {"registered"} if kinds[0] is HostFile else set()  # page-locked once a writer has come so far
            wait_until(lambda own=own: not changed(before, held(fake)) - own, f"{before} again")
        assert not reader.region.listen().faults["broken"]
    assert not fake.leftovers()


_CONNECTING = -1


def _storm_and_kill(stage: Stage, reader, peer: Peer, remote: RemoteRegion, count: int) -> None:
    """Kill it when `count` writes of many have landed, or while it connects, just before that, or just behind it."""
    seen = len(reader.take())
    if count == _CONNECTING:
        peer.send("connect", msgspec.msgpack.encode(remote).hex(), 5.0)
        wait_until(lambda: reader.region.listen().faults or reader.region.listen()._joined, "it has come")
    else:
        peer.do("storm", peer.connect(remote), [0, 0, 2 * MIB], 30)
        stage.notified(reader, seen + count)
    peer.kill()


@pytest.mark.parametrize("kind", [LegacyGpuBlock, HostFile])
def test_a_killed_reader_leaves_nothing_in_the_writer(fake, kind):
    with stage_of(kind, GpuBlock) as stage:
        side, peer = stage.side(), stage.peer()
        before, descriptors = held(fake), len(os.listdir("/proc/self/fd"))
        _, remote = peer.session((0, 8 * MIB))
        channel = side.connect(remote)
        transfers = [channel.write([Piece(0, 0, 2 * MIB)], b"") for _ in range(30)]
        stage.until(lambda: transfers[2].poll(), "some have landed")
        peer.kill()
        assert set(stage.finish(transfers)) <= {"", "ChannelBroken"}
        channel.close()
        all_back(fake, before)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "no descriptor is left")


@pytest.mark.parametrize("kind", [GpuBlock, LegacyGpuBlock])
def test_a_writer_that_dies_during_a_copy(fake, kind):
    """Its bytes do not count; the span is not free before the copy is over, and then nothing is mapped any more."""
    with stage_of(GpuBlock, kind) as stage:
        reader, peer = stage.side(), stage.peer()
        before = held(fake)
        token, remote = reader.session((0, 8 * MIB))
        channel = peer.connect(remote)
        with fake.hold():
            copies = fake.calls["cuMemcpyAsync"]
            peer.write(channel, [Piece(0, 0, MIB)], b"late")
            wait_until(lambda: fake.calls["cuMemcpyAsync"] > copies, "the copy has begun")
            peer.kill()
            assert not reader.region.listen().revoke(token, 0, 8 * MIB)
        wait_until(lambda: reader.region.listen().revoke(token, 0, 8 * MIB), "the span is free")
        all_back(fake, before)
        assert not reader.take()
        assert not reader.region.listen().faults["broken"]


def is_exiting(pid):
    stat = process_stat(pid)
    return stat is None or stat.is_exiting


def test_legacy_memory_goes_when_its_process_begins_to_die(fake):
    """Its memory may be gone before its connection is: a copy behind that does not count."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        gpu = Gpu.find("0")
        with closing(GpuBlock(MIB)) as target:
            block = DeviceMemory.create(gpu, MIB)
            source = CudaSource(gpu, block, pid=process.pid)
            copies = [(target.memory.address, source.address, 4096)]
            source.copy(copies)
            process.kill()
            wait_until(lambda: is_exiting(process.pid), "it is dying")
            with pytest.raises(ConnectionError, match="died"):
                source.copy(copies)
            source.close()
    assert is_exiting(process.pid)  # nor is it there when it was waited for
    assert not fake.leftovers()


# ---- drivers that refuse -------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuStreamCreate"])
def test_an_error_of_cuda_ends_that_channel_alone(fake, caplog, call):
    with stage_of(GpuBlock) as stage, caplog.at_level(logging.WARNING):
        writer, reader = stage.side(), stage.side()
        other = writer.connect(reader.session((4 * MIB, MIB))[1])
        assert stage.written(other, [Piece(0, 4 * MIB, MIB)]) == ""
        _, remote = reader.session((0, MIB))
        channel = writer.connect(remote)
        before = held(fake)
        fake.fail(call)
        assert stage.written(channel, [Piece(0, 0, 4096)], b"bad") == "ChannelBroken"
        fake.heal()
        assert call in caplog.text
        assert reader.region.listen().faults["broken"] == 1
        assert stage.written(other, [Piece(0, 4 * MIB, MIB)], b"good") == ""
        wait_until(lambda: held(fake)["mapped"] < before["mapped"], "the broken channel's mapping is gone")
        assert stage.written(writer.connect(remote), [Piece(0, 0, MIB)], b"again") == ""
        assert stage.notified(reader, 3) == [b"", b"good", b"again"]


def test_the_copies_before_a_refused_one_are_waited_for(fake):
    """Else they would land behind the end of the write, where others may write by then."""
    with stage_of(GpuBlock) as stage:
        writer, reader = stage.side(), stage.side()
        token, remote = reader.session((0, 8 * MIB))
        channel = writer.connect(remote)
        with fake.hold():
            fake.fail("cuMemcpyAsync", after=1)
            before = fake.calls["cuEventRecord"]
            transfer = channel.write([Piece(0, 0, 4096), Piece(0, MIB, 4096)], b"bad")
            wait_until(lambda: fake.calls["cuEventRecord"] > before, "somebody waits for the first copy")
            assert not transfer.poll()
            assert not reader.region.listen().revoke(token, 0, 8 * MIB)
        assert stage.finish([transfer]) == ["ChannelBroken"]


@pytest.mark.parametrize("kinds", [(HostFile, GpuBlock), (GpuBlock, HostFile)])
def test_whatever_call_fails_nothing_is_left(kinds):
    """The n-th call of the driver fails, while a channel opens and writes. What it was given it gives back."""
    for number in range(0, 30, 3):
        with one_gpu() as fake, stage_of(*kinds) as stage:
            writer, reader = stage.side(MIB), stage.side(MIB)
            _, remote = reader.session((0, MIB))
            fake.fail(after=number)
            try:
                channel = writer.region.connect(remote)
                assert stage.written(channel, [Piece(0, 0, MIB)]) in ("", "ChannelBroken")
                fake.heal()
                channel.close()
            except (ChannelUnavailable, ChannelBroken):
                pass
            own = sum(kind is GpuBlock for kind in kinds)
            wait_until(lambda own=own: num_mapped() == own, "the channel is gone")
            stage.close()
            assert num_mapped() == 0
            assert not fake.leftovers()


@pytest.mark.parametrize("kinds", [(HostFile, GpuBlock), (GpuBlock, HostFile)])
@pytest.mark.parametrize("refusal", ["", "read only"])
def test_host_memory_is_page_locked_where_the_driver_lets_us(caplog, kinds, refusal):
    """And given back; where it does not, copies are made all the same, and somebody hears of it."""
    is_refused = refusal == "read only" and kinds[0] is HostFile
    with (
        fake_cuda(read_only_register=refusal != "read only", lag_s=LAG_S) as fake,
        stage_of(*kinds) as stage,
        caplog.at_level(logging.WARNING),
    ):
        writer, reader = stage.side(), stage.side()
        channel = writer.connect(reader.session((0, 8 * MIB))[1])
        if is_refused:
            wait_until(lambda: "copies slowly" in caplog.text, "it is logged")
        else:
            wait_until(lambda: sum(nbytes for _, nbytes in fake.host.spans()) == 8 * MIB, "it is registered")
        assert stage.written(channel, [Piece(0, 0, 8 * MIB)]) == ""
        assert bytes(reader.view) == bytes(writer.view)
        reader.region.close()
        assert fake.counts()["registered"] == 0


# ---- what strangers hand over --------------------------------------------------------------


@contextmanager
def handed(remote: RemoteRegion, packed: bytes, fd: int) -> Iterator[tuple[socket.socket, int | None]]:
    """A raw stream that hands this over, and the answer to its greeting."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(f"\0pdx-cuda_ipc-{local.address_in(remote).name}")
        sock.sendall(pack_greeting(remote.token))
        local.hand_over(sock, packed, fd)
        answer = sock.recv(ACK_BYTES)
        yield sock, unpack_ack(answer)[1] if answer else None


def test_what_is_handed_over_is_checked(fake):
    with stage_of(GpuBlock) as stage, closing(GpuBlock(4 * MIB)) as block:
        reader = stage.side(MIB)
        _, remote = reader.session((0, MIB))
        handle, fd = block.memory.export()
        before = held(fake)
        good = msgspec.msgpack.encode(handle)
        other = os.memfd_create("not-a-gpu", os.MFD_CLOEXEC)
        os.ftruncate(other, handle.nbytes)
        replace = msgspec.structs.replace
        ipc = replace(handle, kind="ipc")
        cases = [
            (b"", fd),
            (b"\xc1", fd),
            (b"\x91" * 500, fd),
            (good[:-1], fd),
            (good, -1),  # no descriptor
            (good, other),  # no memory of a GPU
            (msgspec.msgpack.encode(None), -1),
            (msgspec.msgpack.encode(replace(handle, nbytes=64 * MIB)), fd),  # more than there is
            (msgspec.msgpack.encode(replace(handle, nbytes=4097)), fd),  # no whole granules
            (msgspec.msgpack.encode(ipc), -1),  # no legacy handle in it
            (msgspec.msgpack.encode(replace(ipc, data=bytes(64))), -1),
            (msgspec.msgpack.encode(replace(ipc, data=bytes(64), pid=1)), -1),
        ]
        for packed, descriptor in cases:
            with handed(remote, packed, descriptor) as (_, status):
                assert status in (None, UNREACHABLE), (packed, status)
        all_back(fake, before)
        with handed(remote, good, fd) as (_, status):
            assert status == OK
        all_back(fake, before)
        for descriptor in (fd, other):
            os.close(descriptor)
