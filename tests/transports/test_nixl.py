"""NIXL passes the suite, and what is its own."""

from typing import ClassVar

from pdx.testing.channel_conformance import ChannelConformance
from pdx.transports.nixl import NixlRegion


class TestNixl(ChannelConformance):
    region = NixlRegion


class NixlTcpRegion(NixlRegion):
    """As between hosts without RDMA: nothing but TCP."""

    settings: ClassVar[dict[str, str]] = {"TLS": "tcp"}


class TestNixlOverTcp(ChannelConformance):
    region = NixlTcpRegion
