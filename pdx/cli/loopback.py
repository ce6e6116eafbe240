"""A real transfer through one channel, between two processes of this host; and memcpy's rate for comparison.

    python -m pdx.cli.loopback measure SCHEME FOLDER BYTES    prints one `Trial` as JSON
    python -m pdx.cli.loopback ucx                            prints what UCX can use here as JSON

Separate programs, because channel libraries may hang or crash; their parent ends them at a deadline. The other side is
the peer of the conformance suite, in a process that ends when its input closes.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import msgspec

from pdx.errors import ChannelBroken, PdxError
from pdx.testing.channel_stage import FOLDER, GpuBlock, HostFile, Stage, World
from pdx.transports.channel import Channel, Memory, Piece
from pdx.transports.registry import FOR_GPUS, find

PIECE_BYTES = 1 << 20
PIECES = 4  # per write
ROUNDS = 5
POLL_S = 50e-6


class Rate(msgspec.Struct, frozen=True):
    """The rates of several rounds, in 10^9 bytes per second."""

    best_gb_s: float
    median_gb_s: float


class Trial(msgspec.Struct, frozen=True):
    """The outcome for one channel: it works, cannot work here, or should work and does not."""

    state: Literal["ok", "unavailable", "broken"]
    why: str = ""
    fix: str = ""
    provider: str = ""  # its class; empty if that cannot be loaded
    rate: Rate | None = None


def rate(nbytes: int, one_round: Callable[[], None]) -> Rate:
    """`ROUNDS` rounds of `nbytes` each, after one warm-up round."""
    one_round()
    rates = []
    for _ in range(ROUNDS):
        started_at = time.perf_counter()
        one_round()
        rates.append(nbytes / (time.perf_counter() - started_at) / 1e9)
    return Rate(round(max(rates), 3), round(statistics.median(rates), 3))


def memcpy(nbytes: int) -> Rate:
    """Copy `nbytes` within this process on one thread, in pieces of the size that channels get."""
    source, target = (Memory(memoryview(mmap.mmap(-1, nbytes))) for _ in range(2))

    def copy() -> None:
        for offset in range(0, nbytes, PIECE_BYTES):
            ctypes.memmove(target.address + offset, source.address + offset, min(PIECE_BYTES, nbytes - offset))

    return rate(nbytes, copy)


def measure(scheme: str, folder: Path, nbytes: int, world: World = nullcontext) -> Trial:
    """Test a channel: register memory, connect to another process, write all of the memory several times, compare the
    bytes.

    `folder`: holds the files that back the memory; the caller removes it. `world`: see `Stage`.
    """
    try:
        kind = find(scheme)
    except PdxError as error:
        return Trial("broken", str(error), "reinstall or remove the package that provides it")
    provider = f"{kind.__module__}:{kind.__qualname__}"
    try:
        available = kind.availability()
        if not available.is_ok:
            return Trial("unavailable", available.why, available.fix, provider)
        os.environ[FOLDER] = str(folder)
        memory = GpuBlock if scheme == FOR_GPUS else HostFile
        with Stage(kind, memories=[memory], world=world) as stage:
            return Trial("ok", provider=provider, rate=_transfer(stage, nbytes))
    except Exception as error:  # noqa: BLE001 - root of this program; a third party's backend may raise anything
        return Trial("broken", f"{type(error).__name__}: {error}", provider=provider)


def _transfer(stage: Stage, nbytes: int) -> Rate:
    """:raises ChannelBroken: bytes differ, or a notification is missing or duplicated."""
    reader, writer = stage.peer(nbytes), stage.side(nbytes)
    channel = writer.connect(reader.session((0, nbytes))[1])
    woken = None if writer.region.is_polled else writer.wake
    result = rate(nbytes, lambda: _write_all(channel, nbytes, woken))
    if reader.do("digest") != hashlib.blake2b(bytes(writer.view)).hexdigest():
        raise ChannelBroken("the transfers ended without an error, but other bytes arrived")
    expected = (ROUNDS + 1) * -(-nbytes // (PIECES * PIECE_BYTES))
    count = len(reader.do("payloads", expected))
    if count > expected:
        raise ChannelBroken(f"{expected} writes gave {count} notifications")
    return result


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


def ucx_transports() -> list[str]:
    """UCX transports and their devices on this host, as reported by the library; empty without UCXX."""
    try:
        from ucxx._lib.libucxx import UCXContext
    except ImportError:
        return []
    return sorted(set(re.findall(r"^#\s+resource .* (\S+/\S+)$", UCXContext({}).info, re.MULTILINE)))


def main() -> None:
    """See above. Output of libraries goes to standard error, so that standard output holds only results."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        verb, *arguments = sys.argv[1:]
        if verb == "ucx":
            out.write(msgspec.json.encode(ucx_transports()))
        else:
            scheme, folder, nbytes = arguments
            out.write(msgspec.json.encode(measure(scheme, Path(folder), int(nbytes))))


if __name__ == "__main__":
    main()
