"""What a third party would write: a channel of its own in a distribution of its own, here `inproc` by another name."""

from inproc import InprocRegion


class FarshoreRegion(InprocRegion):
    scheme = "farshore"
