"""The outcome of the demo's requests: the table, the JSON summary, and what counts as a failure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from pdx.bench.demo.workload import Request

AUTO = "auto"  # the nodes choose the channel
SHORT = "short_prompt"  # the proxy's reason for using a single engine
BLOCK_TOKENS = 128  # vLLM's on CPUs; the largest of all devices


@dataclass(slots=True)
class Row:
    """One request's outcome."""

    request: Request
    is_same: bool
    prompt_tokens: int
    recomputed: float  # tokens, by the decoder; a mean for simultaneous requests
    is_wired: bool  # each engine has a node of its own
    timeline: dict[str, Any] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """Bytes moved from node to node; with a single node, from the prefill engine into it."""
        return int(self.part("pushed_bytes" if self.is_wired else "moved_bytes") or 0)

    @property
    def alone(self) -> str:
        """Why one engine did everything; empty if two did."""
        return str(self.timeline["why"]) if self.timeline["mode"] == "alone" else ""

    def part(self, name: str) -> float | None:
        value: float | None = self.timeline["breakdown"][name]
        return value


@dataclass(frozen=True, slots=True)
class Wire:
    """What went from the prefill engine's node to the decode engine's, according to both nodes."""

    channel: str
    sent_bytes: int
    landed_bytes: int


def table(rows: Sequence[Row], wire: Wire | None, kv_bytes: int) -> Table:
    """The outcome of each request; `kv_bytes`: per token."""
    way = f", {wire.channel} between their nodes" if wire else ""
    shown = Table(title=f"through PDX: prefill on one engine, decode on another{way}", title_justify="left")
    names = ("prompt\ntokens", "reused\ntokens", "pushed\ntokens", "pushed\nMB", "moved when\nprefill ended")
    times = ("prefill\nms", "handoff\nms", "first decode\nms", "recomputed\nby decoder", "same\nanswer")
    shown.add_column("request")
    for name in names + times:
        shown.add_column(name, justify="right")
    for row in rows:
        reused = int(row.part("reused_tokens") or 0)
        shown.add_row(
            f"{row.request.name}{', one engine' if row.alone else ''}",
            f"{row.prompt_tokens:,}",
            f"{reused:,}",
            f"{min(row.prompt_tokens, row.sent_bytes // kv_bytes):,}",
            _number(row.sent_bytes / 1e6),
            _number(row.part("hidden_share"), "{:.0%}"),
            *(_number(row.part(name)) for name in ("prefill_ms", "handoff_ms", "first_decode_ms")),
            _number(row.recomputed),
            "yes" if row.is_same else "NO",
        )
    return shown


def _number(value: float | None, form: str = "{:,.1f}") -> str:
    return "-" if value is None else form.format(value)


def summary(rows: Sequence[Row], wire: Wire | None) -> dict[str, Any]:
    moved = sum(row.part("moved_bytes") or 0 for row in rows)
    result = {
        "identical": all(row.is_same for row in rows),
        "requests": len(rows),
        "reused_tokens": int(sum(row.part("reused_tokens") or 0 for row in rows)),
        "moved_mb": round(moved / 1e6, 1),
        "hidden_share": _hidden_share(rows),
        "handoff_ms_p50": _median(rows, "handoff_ms"),
    }
    if wire is None:
        return result
    return result | {
        "pair": wire.channel,
        "sent_mb": round(wire.sent_bytes / 1e6, 1),
        "push_ms_p50": _median(rows, "push_ms"),
    }


def _hidden_share(rows: Sequence[Row]) -> float | None:
    """Of all bytes that had to move, the share that had moved when prefill ended."""
    sent = sum(row.sent_bytes for row in rows)
    return round(sum((row.part("hidden_share") or 0) * row.sent_bytes for row in rows) / sent, 3) if sent else None


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := row.part(name)) is not None]
    return round(statistics.median(values), 1) if values else None


def complaints(rows: Sequence[Row], changes: Sequence[int | None], pair: str | None, wire: Wire | None) -> list[str]:
    """What went wrong."""
    found = [f"{row.request.name}: the answer differs from plain vLLM's" for row in rows if not row.is_same]
    found += [
        f"{row.request.name}: the decoder computed {row.recomputed:.0f} prompt tokens itself"
        for row in rows
        if row.recomputed > BLOCK_TOKENS + 1
    ]
    found += [
        f"{row.request.name}: one engine served it alone ({row.alone})" for row in rows if row.alone not in ("", SHORT)
    ]
    if None in changes:
        found.append("an answer does not depend on its whole prompt, so that it is the same proves nothing")
    if wire is not None:
        if wire.channel != pair and pair != AUTO:
            found.append(f"the nodes were to use channel {pair}, but used {wire.channel or 'none'}")
        if not wire.landed_bytes:
            found.append("nothing went from the prefill engine's node to the decode engine's")
        pushed = [row for row in rows if not row.alone]
        found += [f"{row.request.name}: nothing of it was pushed" for row in pushed if not row.part("pushed_bytes")]
    return found
