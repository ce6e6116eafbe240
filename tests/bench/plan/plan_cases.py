"""What the tests of `pdx plan` share: cases, and results as if the model itself had been measured."""

from __future__ import annotations

from pdx.bench.breakdown import records
from pdx.bench.plan.check import alone, pair
from pdx.bench.plan.machines import GPUS, Assumptions, Engine, Speeds, speeds_of
from pdx.bench.plan.model import Case
from pdx.bench.plan.shapes import PRESETS
from pdx.bench.plan.workload import Link, Slo, Workload

ASSUMED = Assumptions()
CPU = Speeds(flops=9e10, attention_flops=1.1e11, memory_bytes=8e9, room_bytes=float("inf"), reduce_bytes=float("inf"))
TINY = Engine(PRESETS["tiny"], CPU, budget=2048)
SCATTER, CONTROL_S, REQUEST_S = 10e9, 0.012, 0.009


def engine(model="llama-3.1-8b", gpu="h100", tp=1) -> Engine:
    shapes = PRESETS[model]
    return Engine(shapes, speeds_of(GPUS[gpu], ASSUMED, tp, shapes.weight_bytes), tp)


def case(rate=10.0, tokens=8000, output=200, ttft_s=1.0, itl_s=0.05, wire=40e9, **more) -> Case:
    work = Workload(rate=rate, input_tokens=tokens, output_tokens=output, **more)
    link = Link(wire_bytes_s=wire, scatter_bytes_s=50e9, control_s=0.008)
    return Case(engine=engine(), work=work, slo=Slo(ttft_s, itl_s), link=link, request_s=0.01)


def measured(lengths=(1000, 4000, 8000), at_once=(1, 4), *, output=16, model=None, slow=1.0) -> records.Result:
    """A result of systems `pdx` (one node) and `plain`, on the machine CPU; times are `slow` times the model's."""
    systems = {name: records.SystemFacts(name, {}, []) for name in ("pdx", "plain")}
    requests = [
        request
        for tokens in lengths
        for count in at_once
        for system in systems
        for request in _requests(system, tokens, count, output, slow)
    ]
    said = {"name": "tiny", "kv_bytes_per_token": 65_536, "layers": 8, "dtype": "float32", "block_tokens": 128}
    return records.Result(
        machine={}, model=model or said, settings={}, systems=systems, not_run={}, requests=requests, is_complete=True
    )


def _requests(system, tokens, count, output, slow):
    prefill_ms = TINY.prefill_s(tokens) * 1e3 * slow
    scatter_ms = tokens * 65_536 / SCATTER * 1e3
    handoff_ms = CONTROL_S * 1e3 + scatter_ms
    is_pair = system == "pdx"
    replayed = pair(TINY, tokens, count, output, handoff_ms / 1e3) if is_pair else alone(TINY, tokens, count, output)
    step_ms = TINY.step_s(1, tokens) * 1e3
    for index, one in enumerate(replayed):
        ttft_ms = (one.first_s + REQUEST_S) * 1e3 * slow
        decode_first_ms = prefill_ms + handoff_ms + step_ms
        nothing = records.Part(0.0, 0.0)
        yield records.Request(
            system=system,
            round=0,
            prompt_tokens=tokens,
            concurrency=count,
            index=index,
            ttft_ms=ttft_ms,
            itl_ms=[gap * 1e3 for gap in one.gaps_s],
            e2e_ms=ttft_ms + sum(one.gaps_s) * 1e3,
            output_tokens=output,
            decode_first_ms=decode_first_ms if is_pair else None,
            is_same=True,
            parts=records.Parts(
                queue=nothing,
                prefill=records.Part(prefill_ms, prefill_ms),
                gather=nothing,
                wire=nothing,
                scatter=records.Part(scatter_ms, scatter_ms),
                first_decode=records.Part(step_ms, step_ms),
                rest=nothing,
            )
            if is_pair
            else None,
            engines=records.Engines(0.0, prefill_ms, 0.0, step_ms, 0.0),
            moved_bytes=tokens * 65_536 if is_pair else 0,
            hidden_share=1.0 if is_pair else None,
        )
