"""TCP passes the suite, and stands what comes over an open port."""

from pdx.testing.channel_conformance import ChannelConformance
from pdx.transports.tcp import TcpRegion


class TestTcp(ChannelConformance):
    region = TcpRegion
