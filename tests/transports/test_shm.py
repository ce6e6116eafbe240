"""Shared memory passes the suite; what only it can get wrong."""

from pdx.testing.channel_conformance import ChannelConformance
from pdx.transports.shm import ShmRegion


class TestShm(ChannelConformance):
    region = ShmRegion
