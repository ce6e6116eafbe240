"""CUDA IPC passes the conformance suite on a real GPU; what differs with other kinds of memory, too."""

from __future__ import annotations

from pdx.testing.channel_conformance import ChannelConformance, ChannelSetting
from pdx.testing.channel_faults import Deaths, Endings
from pdx.testing.channel_grants import Grants
from pdx.testing.channel_memory import GpuBlock, HostFile, LegacyGpuBlock
from pdx.testing.channel_writes import Writes
from pdx.transports.cuda_ipc import CudaIpcRegion


class TestCudaIpc(ChannelConformance):
    region = CudaIpcRegion
    memories = (GpuBlock,)
    death_s = 40.0


class TestLegacyHandles(ChannelSetting, Deaths):
    """Between processes: no process opens its own handles."""

    region = CudaIpcRegion
    memories = (LegacyGpuBlock,)
    death_s = 40.0

    test_to_and_from_another_process = Writes.test_to_and_from_another_process
    test_nothing_lands_where_it_was_taken_back = Grants.test_nothing_lands_where_it_was_taken_back


class Crossing(ChannelSetting):
    """Sides of two kinds."""

    region = CudaIpcRegion

    _stopped_in_the_middle = Deaths._stopped_in_the_middle
    test_every_byte_arrives_and_no_other_changes = Writes.test_every_byte_arrives_and_no_other_changes
    test_both_directions_at_once = Writes.test_both_directions_at_once
    test_to_and_from_another_process = Writes.test_to_and_from_another_process
    test_closing_a_side_ends_what_is_in_flight = Endings.test_closing_a_side_ends_what_is_in_flight
    test_nothing_is_left_behind = Endings.test_nothing_is_left_behind
    test_death_with_writes_in_flight = Deaths.test_death_with_writes_in_flight


class TestFromGpuToHost(Crossing):
    memories = (GpuBlock, HostFile)


class TestFromHostToGpu(Crossing):
    memories = (HostFile, GpuBlock)
