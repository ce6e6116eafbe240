"""Results of `pdx bench breakdown` made by hand: numbers chosen by the test, everything else as it usually is."""

from pdx.bench.breakdown.records import Copy, Engines, Part, Parts, Request, Result, Trace
from pdx.bench.systems.plan import SystemFacts

KV_BYTES = 64 << 10
PREFILL_MS, QUEUE_MS, FIRST_MS = 1000.0, 4.0, 30.0


def parts(**exposed_ms):
    """Parts of which those not named took no time."""
    names = ("queue", "prefill", "gather", "wire", "scatter", "first_decode", "rest")
    return Parts(**{name: Part(exposed_ms.get(name, 0.0), exposed_ms.get(name, 0.0)) for name in names})


def request(system, round_=0, *, tokens=4000, concurrency=1, index=0, to_client=10.0, to_runnable=35.0, **changed):
    """One request whose two handoffs took so long."""
    has_pair = system != "plain"
    fields = {
        "system": system,
        "round": round_,
        "prompt_tokens": tokens,
        "concurrency": concurrency,
        "index": index,
        "ttft_ms": QUEUE_MS + PREFILL_MS + to_client,
        "itl_ms": [30.0, 30.0],
        "e2e_ms": 2000.0,
        "output_tokens": 3,
        "decode_first_ms": QUEUE_MS + PREFILL_MS + FIRST_MS + to_runnable if has_pair else None,
        "is_same": True if has_pair else None,
        "parts": parts(queue=QUEUE_MS, prefill=PREFILL_MS, rest=to_client),
        "engines": Engines(QUEUE_MS, PREFILL_MS, to_runnable, FIRST_MS if has_pair else 0.0, 1.0),
        "moved_bytes": tokens * KV_BYTES if has_pair else 0,
        "hidden_share": 1.0 if system.startswith("pdx") else None,
    }
    return Request(**fields | changed)


def trace(system="pdx", tokens=4000, handoff_ms=20.0):
    """One request's moments."""
    marks = {"received": 0.0, "prefill_end": 1000.0, "runnable": 1000.0 + handoff_ms}
    return Trace(system=system, prompt_tokens=tokens, spans=[], marks=marks)


def result(requests, **changed):
    """A whole run of these requests."""
    systems = dict.fromkeys([each.system for each in requests], SystemFacts(title="", versions={}, commands=[]))
    fields = {
        "machine": {"date": "2026-01-01"},
        "model": {"name": "tiny", "kv_bytes_per_token": KV_BYTES, "layers": 8},
        "settings": {"rounds": 3},
        "systems": systems,
        "not_run": {},
        "requests": list(requests),
        "copies": [Copy(0, 4000 * KV_BYTES, 20.0)],
        "traces": [trace()],
        "is_complete": True,
    }
    return Result(**fields | changed)


def everything():
    """A run in which every goal is reached."""
    requests = []
    for round_ in range(3):
        requests += [
            request("pdx", round_),
            request("nixl", round_, to_client=200.0, to_runnable=200.0, itl_ms=[31.0, 31.0]),
            request("nixl-yield", round_, to_client=200.0, to_runnable=200.0, itl_ms=[31.0, 31.0]),
            request("plain", round_),
        ]
        for index in range(4):
            together = {"concurrency": 4, "index": index}
            requests += [
                request("pdx", round_, ttft_ms=2000.0 + index, **together),
                request("nixl", round_, ttft_ms=4000.0 + index, itl_ms=[40.0, 40.0], **together),
                request("nixl-yield", round_, ttft_ms=4000.0 + index, itl_ms=[40.0, 40.0], **together),
                request("plain", round_, ttft_ms=2000.0, **together),
            ]
    return requests
