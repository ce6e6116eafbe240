"""What the tests of the channels over UCX share, NIXL's and UCXX's: the suite and more, and a stage without it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdx.testing.channel_conformance import ChannelConformance
from pdx.testing.channel_stage import MIB, Stage
from pdx.transports.channel import Region

# With a peer that is stopped, writes must be cancelled. UCXX 0.52 lets an endpoint and its cancelled requests hold each
# other for ever, and the worker's descriptors with them; see docs/adr/0018-nixl-and-ucx.md.
LEAVES_A_WORKER = (
    "stopped_peer_cannot_be_connected_to",
    "stopped_reader_holds_up_nobody",
    "comes_free[stop]",
    "waits_for_a_stopped_reader",
)
_LISTENING = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000")


@contextmanager
def stage_of(region: type[Region], *, first_seed: int = 1) -> Iterator[Stage]:
    """Skips the test with the reason where the scheme cannot work."""
    found = region.availability()
    if not found.is_ok:
        pytest.skip(f"{region.scheme}: {found.why}; {found.fix}")
    with Stage(region, first_seed=first_seed) as stage:
        yield stage


class UcxConformance(ChannelConformance):
    """The suite, and where UCX listens: who reaches its port can write to this process."""

    def test_it_listens_on_the_loopback_interface_alone(self, stage: Stage) -> None:
        """Where nothing else was asked for."""
        before = len(_listening_addresses())
        stage.side(MIB)
        addresses = _listening_addresses()
        assert len(addresses) > before, addresses
        assert set(addresses) <= set(_LOOPBACK), addresses


def _listening_addresses() -> list[str]:
    """Of this process, as the kernel writes them."""
    inodes = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd)}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1].partition(":")[0] for line in lines if line[3] == _LISTENING and f"socket:[{line[9]}]" in inodes]
