"""What a third party would write: a channel of its own in a distribution of its own, here around `inproc`."""

import msgspec
from inproc import InprocListener, InprocRegion


class FarshoreListener(InprocListener):
    def invite(self, token):
        return msgspec.structs.replace(super().invite(token), scheme=FarshoreRegion.scheme)


class FarshoreRegion(InprocRegion):
    scheme = "farshore"

    def _listening(self):
        return FarshoreListener(self.memory, self.wake)
