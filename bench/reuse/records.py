"""What `pdx bench reuse` writes: every request of every point, from which figures and pictures are made."""

from __future__ import annotations

import msgspec

from pdx.bench.systems import plan
from pdx.bench.systems.engine_metrics import Found

FIRST, KNOWN, BURST = "first", "known", "burst"  # loads: one request at a time, and the same once more; all at once
ALONE = (FIRST, KNOWN)
DOCUMENTS, SESSIONS = "documents", "sessions"


class Asked(msgspec.Struct, frozen=True):
    """One answered request. Times are at the client; `due_s` and `end_s` from the start of its point."""

    session: int
    turn: int
    due_s: float
    end_s: float
    ttft_ms: float
    itl_ms: list[float]  # between events that carry tokens; a late server puts several tokens into one
    prompt_tokens: int
    token_ids: list[int]  # of the answer
    is_same: bool | None = None  # as the reference's answer; None: there was none, or it is that


class Point(msgspec.Struct, frozen=True):
    """One load of one workload on one system."""

    system: str
    workload: str
    repeat: int
    load: str
    rate: float | None  # requests per second that were offered; None: `FIRST` and `BURST`
    found: Found  # tokens of all prompts, by the asked engine's own counters
    asked: list[Asked]

    @property
    def duration_s(self) -> float:
        """From when the first request was due to the end of the last one."""
        return max(each.end_s for each in self.asked) - min(each.due_s for each in self.asked)

    @property
    def requests_per_s(self) -> float:
        """That were answered."""
        return len(self.asked) / self.duration_s


class Result(plan.Result, kw_only=True):
    kind: str = "pdx-bench-reuse"
    points: list[Point] = []
