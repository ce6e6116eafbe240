"""What is to be added to other hosts' clocks to compare their moments with this host's. Pure; no clock of its own."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from pdx.proxy.roster import MAX_NODES
from pdx.wire.messages import NodeReport

WINDOW_NS = 30 * 10**9


class _Window(msgspec.Struct):
    """The smallest offset since `start_ns`, and that of the window before."""

    start_ns: int
    least_ns: int
    before_ns: int


class Clocks:
    """The offset of each node's CLOCK_MONOTONIC, by node and epoch.

    A node on this host shares the clock: nothing is added. For another host, reception minus sending of a report is
    the true offset plus the time the report was under way, so the smallest such difference is the best one. A moment
    shifted by it is too late by at most the time that the fastest report of the last WINDOW_NS was under way (about
    0.1 ms on one network, plus the delay of this process's event loop), and wrong either way by what the two clocks
    drift apart within 2 x WINDOW_NS: 6 ms at 100 ppm, far less under NTP. Older reports are forgotten for that reason:
    over days, drift would add up to seconds.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._windows: OrderedDict[tuple[str, int], _Window] = OrderedDict()  # the one heard of last is last

    def offset_ns(self, report: NodeReport, received_ns: int) -> int:
        """What to add to the times in this report, which came at `received_ns` of this host's clock."""
        if report.host in ("", self._host):
            return 0
        key = (report.node, report.epoch)
        seen_ns = received_ns - report.sent_ns
        window = self._windows.setdefault(key, _Window(received_ns, seen_ns, seen_ns))
        self._windows.move_to_end(key)
        if len(self._windows) > MAX_NODES:
            self._windows.popitem(last=False)
        age_ns = received_ns - window.start_ns
        if age_ns >= WINDOW_NS:
            window.before_ns = window.least_ns if age_ns < 2 * WINDOW_NS else seen_ns
            window.start_ns, window.least_ns = received_ns, seen_ns
        window.least_ns = min(window.least_ns, seen_ns)
        return min(window.least_ns, window.before_ns)
