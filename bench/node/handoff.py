"""From the end of prefill until the decode engine may run, against one memcpy: `python -m pdx.bench.node.handoff`.

Two real engines of a tiny model with 64 KB of KV per token, a node and the proxy, all of `pdx up`. Between requests
the same number of bytes is copied from shared to anonymous memory, all of it touched before, on the decoder's core
and while the engines sleep: the best this core can do. The last line is JSON.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

from pdx.bench.harness.engines import (
    FLAGS,
    KV_BYTES,
    bench_folder,
    complete,
    get,
    prompt,
    say,
    start,
)
from pdx.bench.harness.report import Figure, at_least, at_most, plain, publish
from pdx.bench.store.memcpy import Memcpy
from pdx.cli.ports import free_ports
from pdx.telemetry.timeline import Event
from pdx.testing.waiting import came_true

TOKENS = 4000
BLOCK_TOKENS = 128
REQUESTS = 13
WARMUPS = 4  # all of the arena and of the decoder's KV cache is in use after these
TARGETS = 4  # prompts that the decoder's KV cache holds: each block of it lies idle for so many requests
ALLOWED = 1.3
EXTRA_MS = 15.0
# As much as the warm-ups use once, so that no measured request is the first to touch a page.
ARENA = "1GiB"
KV_GIB = "1"
SPANS = (
    Event.PREFILL_END,
    Event.PREFILL_ANSWERED,
    Event.DECODE_SENT,
    Event.FOUND,
    Event.LOAD_START,
    Event.LOAD_END,
    Event.RUNNABLE,
)


def timeline(admin_url: str, transfer: str) -> dict[str, Any]:
    """The request's timeline, with the moments that nodes report once a second."""
    found: dict[str, Any] = {}

    def is_complete() -> bool:
        found.update(get(f"{admin_url}/pdx/requests/{transfer}"))
        return {Event.PREFILL_END, Event.SEALED, *SPANS} <= {moment["event"] for moment in found["moments"]}

    if not came_true(is_complete, 10.0, pause_s=0.1):
        raise RuntimeError(f"the timeline of {transfer} stayed incomplete: {found}")
    return found


def row(found: dict[str, Any], idle_copy_ms: float, copies_ms: list[float]) -> dict[str, float]:
    """One request's figures."""
    parts = found["breakdown"]
    expected = -(-TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS * KV_BYTES
    if parts["moved_bytes"] != expected:
        raise RuntimeError(f"{parts['moved_bytes']} bytes moved, expected {expected}: is the model not float32?")
    at = {moment["event"]: moment["at_ns"] / 1e6 for moment in found["moments"]}
    spans = {f"{a} → {b}": at[b] - at[a] for a, b in zip(SPANS, SPANS[1:], strict=False)}
    memcpy_ms = statistics.median(copies_ms)
    return {
        "prefill_ms": parts["prefill_ms"],
        "handoff_ms": parts["handoff_ms"],
        "load_ms": parts["load_ms"],
        "hidden_share": parts["hidden_share"],
        "memcpy_ms": memcpy_ms,
        "idle_copy_ms": idle_copy_ms,
        "excess_ms": parts["handoff_ms"] - ALLOWED * memcpy_ms,
        "load_ratio": parts["load_ms"] / memcpy_ms,
        **spans,
    }


def measure() -> list[dict[str, float]]:
    """All requests through one pair of engines."""
    rows = []
    port, admin_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    admin_url = f"http://127.0.0.1:{admin_port}"
    memcpy = Memcpy(TOKENS * KV_BYTES, core=max(os.sched_getaffinity(0)), targets=TARGETS)
    with bench_folder() as (model, processes):
        command = [sys.executable, "-P", "-m", "pdx.cli.main", "up", str(model), "--port", str(port)]
        command += ["--admin", f"127.0.0.1:{admin_port}", "--debug-headers"]
        options = ["--arena", ARENA, "--logs", str(model.parent / "logs"), "--", *FLAGS, "--max-model-len", "6000"]
        start(processes, "up", [*command, *options], url, {"VLLM_CPU_KVCACHE_SPACE": KV_GIB})
        for number in range(-WARMUPS, REQUESTS):
            found = timeline(admin_url, complete(url, prompt(TOKENS, number), max_tokens=4))
            copies = memcpy.times_ms()
            if number >= 0:
                rows.append(row(found, *copies))
                last = rows[-1]
                say(f"  handoff {last['handoff_ms']:.1f} ms, memcpy {last['memcpy_ms']:.1f} ms")
    return rows


def main() -> None:
    rows = measure()
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    bound = ALLOWED * medians["memcpy_ms"] + EXTRA_MS
    worst, worst_copy = (max(row[name] for row in rows) for name in ("handoff_ms", "idle_copy_ms"))
    idle_note = f"for {TARGETS} requests, as the decoder's blocks do; worst {worst_copy:.1f}"
    figures: list[Figure] = [
        plain("one memcpy of the same bytes (the reference)", medians["memcpy_ms"], "ms", f"{TOKENS * KV_BYTES:,} B"),
        plain("the same to memory that lay idle", medians["idle_copy_ms"], "ms", idle_note),
        at_most("handoff", medians["handoff_ms"], "ms", round(bound, 1), f"1.3 memcpy + 15 ms; worst {worst:.1f}"),
        at_most("handoff - 1.3 memcpy", medians["excess_ms"], "ms", EXTRA_MS, "median of the requests' differences"),
        at_least("share moved when prefill ended", medians["hidden_share"], "", 0.95),
        plain("load / memcpy", medians["load_ratio"], "", f"load {medians['load_ms']:.1f} ms"),
        plain("prefill", medians["prefill_ms"], "ms"),
        *(plain(name, medians[name], "ms") for name in rows[0] if "→" in name),
    ]
    rounded = [{name: round(value, 3) for name, value in row.items()} for row in rows]
    publish("handoff", f"handoff of {TOKENS:,} tokens, median of {REQUESTS} requests", figures, {"requests": rounded})


if __name__ == "__main__":
    main()
