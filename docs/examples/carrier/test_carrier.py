"""The channel keeps the contract: `pytest test_carrier.py`, with carrier, pytest and hypothesis installed."""

from carrier import CarrierRegion

from pdx.testing.channel_conformance import ChannelConformance


class TestCarrier(ChannelConformance):
    region = CarrierRegion
