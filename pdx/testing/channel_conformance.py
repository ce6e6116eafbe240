"""The conformance suite of channels: every backend passes it, PDX's own and others'.

A test file needs no more than

    class TestMyScheme(ChannelConformance):
        region = MyRegion

and pytest. Regions are files in /dev/shm; `memories` names other kinds, which sides and peers get in turn. Peers that
die, stop and restart are processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import ClassVar

import pytest

pytest.register_assert_rewrite("pdx.testing.channel_faults", "pdx.testing.channel_stage", "pdx.testing.channel_writes")

from pdx.testing.channel_faults import Deaths, Endings, Malformed  # noqa: E402
from pdx.testing.channel_stage import HostFile, Peer, SideMemory, Stage, World  # noqa: E402
from pdx.testing.channel_writes import Grants, Writes  # noqa: E402
from pdx.transports.channel import Region  # noqa: E402


class ChannelSetting:
    """What tests of the suite need: subclass it beside some of them if not all are wanted."""

    region: ClassVar[type[Region]]
    memories: ClassVar[Sequence[type[SideMemory]]] = (HostFile,)
    world: ClassVar[World] = nullcontext
    is_in_one_process: ClassVar[bool] = False
    death_s: ClassVar[float] = 20.0  # until a write to a dead peer must be over

    @pytest.fixture(autouse=True)
    def around(self) -> Iterator[None]:
        with type(self).world():
            yield

    @pytest.fixture(autouse=True)
    def available(self, around: None) -> None:
        """Skips, with the reason, if the scheme cannot work."""
        found = self.region.availability()
        if not found.is_ok:
            pytest.skip(f"{self.region.scheme}: {found.why}; {found.fix}")

    @pytest.fixture
    def checks(self) -> None:
        """Skips if the receiver cannot look at a write before it lands."""
        if not self.region.checks_writes:
            pytest.skip(f"{self.region.scheme} writes are not seen by the receiver")

    @pytest.fixture
    def stage(self, available: None) -> Iterator[Stage]:
        with Stage(self.region, memories=self.memories, world=type(self).world) as stage:
            yield stage

    @pytest.fixture
    def new_peer(self, stage: Stage) -> Callable[[], Peer]:
        """Starts peers in processes of their own."""
        if self.is_in_one_process:
            pytest.skip(f"{self.region.scheme} stays in one process")
        return stage.peer

    @pytest.fixture
    def peer(self, new_peer: Callable[[], Peer]) -> Peer:
        return new_peer()


class BetweenKindsOfMemory(ChannelSetting):
    """The part of the suite that may depend on the kind of memory of either side, for two kinds in `memories`, both
    ways; or on how bytes are processed on their way, for a channel that passes the whole suite otherwise."""

    _stopped_in_the_middle = Deaths._stopped_in_the_middle
    test_every_byte_arrives_and_no_other_changes = Writes.test_every_byte_arrives_and_no_other_changes
    test_both_directions_at_once = Writes.test_both_directions_at_once
    test_to_and_from_another_process = Writes.test_to_and_from_another_process
    test_closing_a_side_ends_what_is_in_flight = Endings.test_closing_a_side_ends_what_is_in_flight
    test_nothing_lands_behind_a_closed_listener = Endings.test_nothing_lands_behind_a_closed_listener
    test_nothing_is_left_behind = Endings.test_nothing_is_left_behind
    test_death_with_writes_in_flight = Deaths.test_death_with_writes_in_flight
    test_the_memory_a_lost_writer_wrote_to_comes_free = Deaths.test_the_memory_a_lost_writer_wrote_to_comes_free


class BetweenProcesses(ChannelSetting, Deaths):
    """The part of the suite in which no process writes to itself, which some kinds of memory do not support."""

    test_to_and_from_another_process = Writes.test_to_and_from_another_process
    test_nothing_lands_where_it_was_taken_back = Grants.test_nothing_lands_where_it_was_taken_back


class ChannelConformance(ChannelSetting, Writes, Grants, Endings, Deaths, Malformed):
    """Subclass it, name the region class. `is_in_one_process`: the scheme never leaves its process, as `inproc`."""

    def test_it_is_declared(self) -> None:
        """The class says what it is; `Region` alone would not."""
        assert self.region.scheme
        assert issubclass(self.region, Region)
