"""The last transfers and their moments: the proxy's own, and those the nodes report later. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from pdx.proxy.plan import Mode, Route
from pdx.telemetry.timeline import Moment, breakdown
from pdx.wire.messages import MarkReport

MAX_MOMENTS = 4096  # per transfer; what nodes say is bounded here too


class Timeline(msgspec.Struct):
    """One transfer. Only the request that owns it and `Ledger.merge` change it."""

    transfer: str
    route: Route
    mode: Mode
    why: str
    prompt_tokens: int = 0
    outcome: str = ""  # empty: still under way
    moments: list[Moment] = []

    def add(self, moment: Moment) -> None:
        """Note a moment, unless there are absurdly many."""
        if len(self.moments) < MAX_MOMENTS:
            self.moments.append(moment)

    def view(self) -> dict[str, Any]:
        """As told to whoever asks."""
        moments = sorted(self.moments, key=lambda moment: moment.at_ns)
        return {
            "transfer_id": self.transfer,
            "route": self.route,
            "mode": self.mode,
            "why": self.why,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "moments": moments,
            "breakdown": breakdown(moments),
        }


class Ledger:
    """The `keep` youngest timelines, by transfer id."""

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def open(self, timeline: Timeline) -> None:
        """Keep a new timeline; the oldest one makes room."""
        self._timelines[timeline.transfer] = timeline
        while len(self._timelines) > self._keep:
            self._timelines.popitem(last=False)

    def rename(self, timeline: Timeline, transfer: str) -> None:
        """Its transfer has another id from now on."""
        if self._timelines.pop(timeline.transfer, None) is not None:
            self._timelines[transfer] = timeline
        timeline.transfer = transfer

    def merge(self, marks: Iterable[MarkReport], offset_ns: int = 0) -> None:
        """Add what nodes saw; `offset_ns` turns their clock into this process's (see `pdx.proxy.clocks`).

        Marks of transfers that are not (or no longer) known are dropped.
        """
        for mark in marks:
            timeline = self._timelines.get(mark.transfer)
            if timeline is not None:
                timeline.add(
                    Moment(
                        event=mark.event,
                        at_ns=mark.at_ns + offset_ns,
                        engine=mark.engine,
                        nbytes=mark.nbytes,
                        tokens=mark.tokens,
                    )
                )

    def view(self) -> list[dict[str, Any]]:
        """All timelines, oldest first."""
        return [timeline.view() for timeline in self._timelines.values()]

    def find(self, transfer: str) -> dict[str, Any] | None:
        """One timeline."""
        timeline = self._timelines.get(transfer)
        return None if timeline is None else timeline.view()
