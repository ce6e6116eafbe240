"""Records of `pdx bench reuse`: every request of every point, the source of all figures and pictures."""

from __future__ import annotations

import msgspec

from pdx.bench.systems import plan
from pdx.bench.systems.engine_metrics import Found

FIRST, KNOWN, BURST = "first", "known", "burst"  # loads: one request at a time; likewise, known documents; all at once
ALONE = (FIRST, KNOWN)
DOCUMENTS, SESSIONS = "documents", "sessions"


class Asked(msgspec.Struct, frozen=True):
    """One answered request. Times are the client's; `due_s` and `end_s` count from the start of its point."""

    session: int
    turn: int
    due_s: float
    end_s: float
    ttft_ms: float
    itl_ms: list[float]  # between events with tokens; a server that falls behind puts several tokens into one event
    prompt_tokens: int
    token_ids: list[int]  # of the answer
    is_same: bool | None = None  # equal to the reference's answer; None: no such answer, or this is it


class Point(msgspec.Struct, frozen=True):
    """One load of one workload on one system."""

    system: str
    workload: str
    repeat: int
    load: str
    rate: float | None  # offered requests per second; None: `ALONE` and `BURST`
    found: Found  # prompt tokens by source, from the asked engine's own counters
    asked: list[Asked]

    @property
    def duration_s(self) -> float:
        """From when the first request was due to the end of the last one."""
        return max(each.end_s for each in self.asked) - min(each.due_s for each in self.asked)

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second."""
        return len(self.asked) / self.duration_s


class Result(plan.Result, kw_only=True):
    kind: str = "pdx-bench-reuse"
    points: list[Point] = []
