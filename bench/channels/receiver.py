"""The receiving process of the channel benches: a region of the channel and the raw technology on the same memory.

    python -m pdx.bench.channels.receiver SCHEME FILE BYTES

It prints what a sender needs on standard output, and serves until its standard input ends. `Receiver` is the sender's
view of it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from pdx.bench.channels.raw import RAW, SharedFile
from pdx.bench.harness.nodes import Child
from pdx.transports.channel import TOKEN_BYTES, RemoteRegion
from pdx.transports.registry import find

TURN_MS = 1  # between polls of what cannot wake this process


class WakeFd(threading.Event):
    """A region's `wake`, for a loop that polls `fd`."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)


class Receiver:
    """A process that receives into `path`; leaving the context ends it."""

    def __init__(self, scheme: str, path: Path, nbytes: int) -> None:
        self.path = path
        self._child = Child("pdx.bench.channels.receiver", scheme, str(path), str(nbytes))
        message = self._child.receive()
        self.raw_detail = bytes.fromhex(message["raw"])
        self.remote = msgspec.msgpack.decode(bytes.fromhex(message["remote"]), type=RemoteRegion)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()


def serve(scheme: str, path: Path, nbytes: int) -> None:
    """Receive until standard input ends. A channel of another package has no raw technology."""
    file = SharedFile(path, nbytes)
    wake = WakeFd()
    region = find(scheme).register(file.memory, wake=wake)
    listener = region.listen()
    token = secrets.token_bytes(TOKEN_BYTES)
    remote = listener.invite(token)
    listener.grant(token, 0, nbytes)
    raw = RAW[scheme](file.memory) if scheme in RAW else None
    raw_detail = b"" if raw is None else raw.listen()
    print(json.dumps({"raw": raw_detail.hex(), "remote": msgspec.msgpack.encode(remote).hex()}), flush=True)
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    poll.register(wake.fd, select.POLLIN)
    while not any(fd == sys.stdin.fileno() for fd, _ in poll.poll(TURN_MS if region.is_polled else None)):
        if not region.is_polled:
            os.eventfd_read(wake.fd)
        listener.take()
        if raw is not None:
            raw.take()
    if raw is not None:
        raw.close()
    region.close()
    os.close(wake.fd)


def main() -> None:
    scheme, path, nbytes = sys.argv[1:]
    serve(scheme, Path(path), int(nbytes))


if __name__ == "__main__":
    main()
