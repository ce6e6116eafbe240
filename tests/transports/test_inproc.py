"""The reference backend passes the suite."""

from pdx.testing.channel_conformance import ChannelConformance
from pdx.transports.inproc import InprocRegion


class TestInproc(ChannelConformance):
    region = InprocRegion
    is_in_one_process = True
