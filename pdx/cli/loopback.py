"""A real transfer through one channel, between two processes of this host; and what memcpy does, to compare with.

    python -m pdx.cli.loopback measure SCHEME FOLDER BYTES    prints one `Trial` as JSON
    python -m pdx.cli.loopback receive SCHEME FOLDER BYTES    the other side, which `measure` starts
    python -m pdx.cli.loopback ucx                            prints what UCX can use here as JSON

Programs of their own because libraries of channels may hang or crash; whoever starts one ends it at a deadline.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import secrets
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

import msgspec

from pdx.errors import ChannelBroken, PdxError
from pdx.transports.channel import TOKEN_BYTES, Channel, GpuMemory, Memory, Piece, Region, RemoteRegion
from pdx.transports.registry import FOR_GPUS, find

if TYPE_CHECKING:
    from pdx.cuda.memory import DeviceMemory

PIECE_BYTES = 1 << 20
PIECES = 4  # in one write
ROUNDS = 5
POLL_S = 50e-6
_PROGRAM = ("pdx.cli.loopback",)  # the other side's module, with what it needs before its arguments


class Rate(msgspec.Struct, frozen=True):
    """What several rounds gave, in 10^9 bytes per second."""

    best_gb_s: float
    median_gb_s: float


class Trial(msgspec.Struct, frozen=True):
    """What became of one channel: it works, cannot work here, or should work and does not."""

    state: Literal["ok", "unavailable", "broken"]
    why: str = ""
    fix: str = ""
    provider: str = ""  # its class; empty where that cannot be loaded
    rate: Rate | None = None


class Block:
    """Memory of one side, which gives it back when its region is closed."""

    def __init__(self, scheme: str, path: Path, nbytes: int) -> None:
        """What this channel is for: a new file, mapped, whose folder somebody removes; or memory of the first GPU.

        :raises GpuError: it is a GPU's, and cannot be had.
        """
        self._device: DeviceMemory | None = None
        if scheme == FOR_GPUS:
            from pdx.cuda.gpu import Gpu
            from pdx.cuda.memory import DeviceMemory

            self._gpu = Gpu.find("0")
            self._device = DeviceMemory.create(self._gpu, nbytes)
            self.memory: Memory = GpuMemory(self._device, nbytes)
            return
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self.memory = Memory(memoryview(mmap.mmap(file.fileno(), nbytes)), path)

    def write(self, data: bytes) -> None:
        """Fill all of it; a GPU's is staged through the host."""
        if self._device is None:
            self.memory.view[:] = data
        else:
            staged = (ctypes.c_char * len(data)).from_buffer_copy(data)
            self._copy(self.memory.address, ctypes.addressof(staged))

    def digest(self) -> str:
        if self._device is None:
            return hashlib.blake2b(self.memory.view).hexdigest()
        staged = (ctypes.c_char * self.memory.nbytes)()
        self._copy(ctypes.addressof(staged), self.memory.address)
        return hashlib.blake2b(staged).hexdigest()

    def close(self) -> None:
        """Give it back; a mapping goes with its last view."""
        if self._device is not None:
            self._device.close()

    def _copy(self, target: int, source: int) -> None:
        from pdx.cuda.copies import CopyStream

        with CopyStream(self._gpu) as stream:
            stream.copy(target, source, self.memory.nbytes)
            stream.wait()


def rate(nbytes: int, one_round: Callable[[], None]) -> Rate:
    """`ROUNDS` rounds that move `nbytes` each, after one that does not count."""
    one_round()
    rates = []
    for _ in range(ROUNDS):
        started_at = time.perf_counter()
        one_round()
        rates.append(nbytes / (time.perf_counter() - started_at) / 1e9)
    return Rate(round(max(rates), 3), round(statistics.median(rates), 3))


def memcpy(nbytes: int) -> Rate:
    """One thread copies `nbytes` from one place in this process to another, in the pieces that channels get."""
    source, target = (Memory(memoryview(mmap.mmap(-1, nbytes))) for _ in range(2))

    def copy() -> None:
        for offset in range(0, nbytes, PIECE_BYTES):
            ctypes.memmove(target.address + offset, source.address + offset, min(PIECE_BYTES, nbytes - offset))

    return rate(nbytes, copy)


def measure(scheme: str, folder: Path, nbytes: int) -> Trial:
    """Try a channel: register memory, connect to another process, write all of it some times, compare the bytes."""
    try:
        kind = find(scheme)
    except PdxError as error:
        return Trial("broken", str(error), "reinstall or remove the package that provides it")
    provider = f"{kind.__module__}:{kind.__qualname__}"
    try:
        available = kind.availability()
        if not available.is_ok:
            return Trial("unavailable", available.why, available.fix, provider)
        return Trial("ok", provider=provider, rate=_transfer(scheme, kind, folder, nbytes))
    except Exception as error:  # noqa: BLE001 - root of this program; a third party's backend may raise anything
        return Trial("broken", f"{type(error).__name__}: {error}", provider=provider)


def receive(scheme: str, folder: Path, nbytes: int, out: IO[bytes]) -> None:
    """Invite one peer to write to all of a block of memory; say how many notifications came, or what the memory's
    digest is, whenever a line comes in that asks for it."""
    target = Block(scheme, folder / "receiver", nbytes)
    region = find(scheme).register(target.memory)
    listener = region.listen()
    token = secrets.token_bytes(TOKEN_BYTES)
    remote = listener.invite(token)
    listener.grant(token, 0, nbytes)
    _say(out, msgspec.msgpack.encode(remote).hex())
    count = 0
    while True:
        count += len(listener.take())
        if select.select([sys.stdin], [], [], 0.001)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            _say(out, target.digest() if line.strip() == "digest" else str(count))
    region.close()
    target.close()


def ucx_transports() -> list[str]:
    """Transports of UCX and their devices on this host, as the library itself finds them; empty without UCXX."""
    try:
        from ucxx._lib.libucxx import UCXContext
    except ImportError:
        return []
    return sorted(set(re.findall(r"^#\s+resource .* (\S+/\S+)$", UCXContext({}).info, re.MULTILINE)))


def _transfer(scheme: str, kind: type[Region], folder: Path, nbytes: int) -> Rate:
    source = Block(scheme, folder / "sender", nbytes)
    source.write(os.urandom(nbytes))
    woken = threading.Event()
    region = kind.register(source.memory, wake=woken)
    command = [sys.executable, "-P", "-m", *_PROGRAM, "receive", scheme, str(folder), str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver:  # it ends with its input
        try:
            line = _ask(receiver)
            remote = msgspec.msgpack.decode(bytes.fromhex(line), type=RemoteRegion)
            channel = region.connect(remote)
            result = rate(nbytes, lambda: _write_all(channel, nbytes, None if kind.is_polled else woken))
            _check(receiver, source, nbytes)
            return result
        finally:
            region.close()
            source.close()


def _write_all(channel: Channel, nbytes: int, woken: threading.Event | None) -> None:
    transfers = []
    for start in range(0, nbytes, PIECES * PIECE_BYTES):
        offsets = range(start, min(start + PIECES * PIECE_BYTES, nbytes), PIECE_BYTES)
        pieces = [Piece(offset, offset, min(PIECE_BYTES, nbytes - offset)) for offset in offsets]
        transfers.append(channel.write(pieces, b"loopback"))
    for transfer in transfers:
        while not transfer.poll():
            if woken is None:
                time.sleep(POLL_S)
            else:
                woken.wait()
                woken.clear()
        if transfer.error is not None:
            raise transfer.error


def _check(receiver: subprocess.Popen[bytes], source: Block, nbytes: int) -> None:
    """:raises ChannelBroken: bytes differ, or a notification is missing or came twice."""
    if _ask(receiver, "digest") != source.digest():
        raise ChannelBroken("the transfers ended without an error, but other bytes arrived")
    expected = (ROUNDS + 1) * -(-nbytes // (PIECES * PIECE_BYTES))
    count = -1
    while count < expected:  # whoever started this program has a deadline
        count = int(_ask(receiver, "count"))
    if count > expected:
        raise ChannelBroken(f"{expected} writes gave {count} notifications")


def _ask(receiver: subprocess.Popen[bytes], line: str = "") -> str:
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    if line:
        receiver.stdin.write(f"{line}\n".encode())
        receiver.stdin.flush()
    answer = receiver.stdout.readline().decode()
    if not answer:
        raise ChannelBroken(f"the receiving process ended with status {receiver.wait()}")
    return answer.strip()


def _say(out: IO[bytes], line: str) -> None:
    out.write(f"{line}\n".encode())
    out.flush()


def main() -> None:
    """See above. What libraries print goes to standard error, so that standard output holds answers only."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        verb, *arguments = sys.argv[1:]
        if verb == "ucx":
            _say(out, msgspec.json.encode(ucx_transports()).decode())
            return
        scheme, folder, nbytes = arguments
        if verb == "measure":
            _say(out, msgspec.json.encode(measure(scheme, Path(folder), int(nbytes))).decode())
        else:
            receive(scheme, Path(folder), int(nbytes), out)


if __name__ == "__main__":
    main()
