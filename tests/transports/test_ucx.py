"""UCX passes the suite, and what is its own."""

from typing import ClassVar

from pdx.testing.channel_conformance import ChannelConformance
from pdx.transports.ucx import UcxRegion


class TestUcx(ChannelConformance):
    region = UcxRegion


class UcxTcpRegion(UcxRegion):
    """As between hosts without RDMA: nothing but TCP."""

    settings: ClassVar[dict[str, str]] = {"TLS": "tcp"}


class TestUcxOverTcp(ChannelConformance):
    region = UcxTcpRegion
