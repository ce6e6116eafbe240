"""The cases that the tests of `pdx plan` share."""

from __future__ import annotations

from pdx.bench.plan.fleet import Link, Slo, Workload
from pdx.bench.plan.machines import GPUS, Assumptions, Engine, speeds_of
from pdx.bench.plan.model import Case
from pdx.bench.plan.shapes import PRESETS


def engine(model="llama-3.1-8b", gpu="h100", tp=1) -> Engine:
    shapes = PRESETS[model]
    return Engine(shapes, speeds_of(GPUS[gpu], Assumptions(), tp, shapes.weight_bytes), tp)


def case(rate=10.0, tokens=8000, output=200, ttft_s=1.0, itl_s=0.05, wire=40e9, **more) -> Case:
    work = Workload(rate=rate, input_tokens=tokens, output_tokens=output, **more)
    link = Link(wire_bytes_s=wire, scatter_bytes_s=50e9, control_s=0.008)
    return Case(engine=engine(), work=work, slo=Slo(ttft_s, itl_s), link=link, request_s=0.01)
