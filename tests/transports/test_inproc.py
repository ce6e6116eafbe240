"""The reference backend passes the suite."""

from inproc import InprocRegion

from pdx.testing.channel_conformance import ChannelConformance


class TestInproc(ChannelConformance):
    region = InprocRegion
    is_in_one_process = True
