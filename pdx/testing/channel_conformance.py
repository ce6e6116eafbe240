"""The conformance suite of channels: every backend passes it, ours and anybody else's.

A test file needs no more than

    class TestMyScheme(ChannelConformance):
        region = MyRegion

and pytest. Regions lie in files in /dev/shm; peers that die, stop and restart are processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

pytest.register_assert_rewrite(
    "pdx.testing.channel_faults",
    "pdx.testing.channel_grants",
    "pdx.testing.channel_stage",
    "pdx.testing.channel_writes",
)

from pdx.channel import Region  # noqa: E402
from pdx.testing.channel_faults import Deaths, Endings, Malformed  # noqa: E402
from pdx.testing.channel_grants import Grants  # noqa: E402
from pdx.testing.channel_stage import Peer, Stage  # noqa: E402
from pdx.testing.channel_writes import Writes  # noqa: E402


class ChannelConformance(Writes, Grants, Endings, Deaths, Malformed):
    """Subclass it, name the region class. `is_in_one_process`: the scheme never leaves its process, as `inproc`."""

    region: ClassVar[type[Region]]
    is_in_one_process: ClassVar[bool] = False
    death_s: ClassVar[float] = 20.0  # until a write to a dead peer must be over

    @pytest.fixture(autouse=True)
    def available(self) -> None:
        """Skips with the reason where the scheme cannot work."""
        found = self.region.availability()
        if not found.is_ok:
            pytest.skip(f"{self.region.scheme}: {found.why}; {found.fix}")

    @pytest.fixture
    def stage(self, available: None) -> Iterator[Stage]:
        """Where the test makes its sides and peers."""
        with Stage(self.region) as stage:
            yield stage

    @pytest.fixture
    def new_peer(self, stage: Stage) -> Callable[[], Peer]:
        """Starts peers in processes of their own."""
        if self.is_in_one_process:
            pytest.skip(f"{self.region.scheme} stays in one process")
        return stage.peer

    @pytest.fixture
    def peer(self, new_peer: Callable[[], Peer]) -> Peer:
        """One peer in a process of its own."""
        return new_peer()

    def test_it_is_declared(self) -> None:
        """The class says what it is; `Region` alone would not."""
        assert self.region.scheme
        assert issubclass(self.region, Region)
