"""A region on strings: reads one JSON list [verb, arguments…] per line, answers one JSON value per line.

    python -m pdx.testing.channel_peer module:RegionClass module:SideMemoryClass module:world BYTES SEED

Tests of channels kill and stop it. Its first line is the path of its memory, if it has one. Bytes are hexadecimal.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from typing import Any

import msgspec

from pdx.errors import ChannelError
from pdx.testing.channel_stage import Side, Stage
from pdx.transports.channel import Channel, Piece, RemoteRegion, Transfer


class Actor:
    """One side and the channels and transfers it has made, by number."""

    def __init__(self, stage: Stage, side: Side) -> None:
        self._stage = stage
        self._side = side
        self._channels: list[Channel] = []
        self._transfers: list[Transfer] = []

    def invite(self, token: str) -> str:
        """What a peer needs to connect."""
        return msgspec.msgpack.encode(self._side.region.listen().invite(bytes.fromhex(token))).hex()

    def grant(self, token: str, offset: int, nbytes: int) -> None:
        """See `Listener.grant`."""
        self._side.region.listen().grant(bytes.fromhex(token), offset, nbytes)

    def payloads(self, count: int) -> list[str]:
        """Wait for that many notifications; what all so far say."""
        return [payload.hex() for payload in self._stage.notified(self._side, count)]

    def connect(self, remote: str, timeout_s: float) -> int:
        """The number of the new channel."""
        decoded = msgspec.msgpack.decode(bytes.fromhex(remote), type=RemoteRegion)
        self._channels.append(self._side.region.connect(decoded, timeout_s=timeout_s))
        return len(self._channels) - 1

    def write(self, channel: int, pieces: list[list[int]], notify: str) -> int:
        """The number of the new transfer."""
        made = [Piece(local, remote, nbytes) for local, remote, nbytes in pieces]
        self._transfers.append(self._channels[channel].write(made, bytes.fromhex(notify)))
        return len(self._transfers) - 1

    def storm(self, channel: int, piece: list[int], count: int) -> int:
        """That many writes of one piece, without waiting for them."""
        for number in range(count):
            self.write(channel, [piece], number.to_bytes(4).hex())
        return count

    def finish(self) -> list[str]:
        """Wait for all transfers; the names of their errors."""
        return self._stage.finish(self._transfers)

    def read(self, offset: int, nbytes: int) -> str:
        """Bytes of the memory."""
        return bytes(self._side.view[offset : offset + nbytes]).hex()

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()


def main() -> None:
    """Serve standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    region, memory, world = map(_find, sys.argv[1:4])
    nbytes, seed = map(int, sys.argv[4:])
    with world(), Stage(region, first_seed=seed, memories=[memory]) as stage:
        side = stage.side(nbytes)
        actor = Actor(stage, side)
        _say(str(side.path or ""))
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            try:
                result = getattr(actor, verb)(*arguments)
            except (ChannelError, ValueError, AssertionError) as error:
                result = {"error": type(error).__name__, "text": str(error)}
            _say(result)


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
