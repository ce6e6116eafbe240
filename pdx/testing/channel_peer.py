"""A remote-controlled region: reads one JSON list [verb, arguments…] per line, answers one JSON value per line.

    python -m pdx.testing.channel_peer module:RegionClass module:SideMemoryClass module:world BYTES SEED

Tests of channels kill and stop it. Its first line is the path of its memory, if it has one. Bytes are hexadecimal.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from pdx.errors import ChannelError
from pdx.testing.channel_stage import Side, Stage
from pdx.transports.channel import Channel, Piece, RemoteRegion, Transfer


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    region, memory, world = map(_find, sys.argv[1:4])
    nbytes, seed = map(int, sys.argv[4:])
    with world(), Stage(region, first_seed=seed, memories=[memory]) as stage:
        side = stage.side(nbytes)
        verbs = _verbs(stage, side)
        _say(str(side.path or ""))
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            try:
                result = verbs[verb](*arguments)
            except (ChannelError, ValueError, AssertionError) as error:
                result = {"error": type(error).__name__, "text": str(error)}
            _say(result)


def _verbs(stage: Stage, side: Side) -> dict[str, Callable[..., Any]]:
    """The verbs by name. Channels and transfers are named by number."""
    channels: list[Channel] = []
    transfers: list[Transfer] = []

    def invite(token: str) -> str:
        return msgspec.msgpack.encode(side.region.listen().invite(bytes.fromhex(token))).hex()

    def grant(token: str, offset: int, nbytes: int) -> None:
        side.region.listen().grant(bytes.fromhex(token), offset, nbytes)

    def payloads(count: int) -> list[str]:
        """Wait for that many notifications. Returns the payloads of all so far."""
        return [payload.hex() for payload in stage.notified(side, count)]

    def connect(remote: str, timeout_s: float) -> int:
        decoded = msgspec.msgpack.decode(bytes.fromhex(remote), type=RemoteRegion)
        channels.append(side.region.connect(decoded, timeout_s=timeout_s))
        return len(channels) - 1

    def write(channel: int, pieces: list[list[int]], notify: str) -> int:
        made = [Piece(local, remote, nbytes) for local, remote, nbytes in pieces]
        transfers.append(channels[channel].write(made, bytes.fromhex(notify)))
        return len(transfers) - 1

    def storm(channel: int, piece: list[int], count: int) -> int:
        """That many writes of one piece, without waiting for them."""
        for number in range(count):
            write(channel, [piece], number.to_bytes(4).hex())
        return count

    def finish() -> list[str]:
        """Wait for all transfers. Returns the names of their errors."""
        return stage.finish(transfers)

    def read(offset: int, nbytes: int) -> str:
        return bytes(side.view[offset : offset + nbytes]).hex()

    def digest() -> str:
        return hashlib.blake2b(bytes(side.view)).hexdigest()

    said = (invite, grant, payloads, connect, write, storm, finish, read, digest)
    return {each.__name__: each for each in said}


def _find(target: str) -> Any:
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
