"""Turns the options of `pdx plan`, under the names that the command gives them, into a case for the model."""

from __future__ import annotations

from typing import Any

import msgspec

from pdx.bench.plan.fleet import Link, Slo, Workload
from pdx.bench.plan.machines import Assumptions, Engine, Gpu, find_gpu, host_bytes_s, speeds_of
from pdx.bench.plan.model import Case
from pdx.bench.plan.shapes import Shapes, find_model
from pdx.bench.plan.units import parse_count, parse_rate, parse_time, show_bytes, show_rate
from pdx.errors import ConfigError

TPS = (1, 2, 4, 8, 16)
_NBYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5, "fp32": 4.0}


class Parsed(msgspec.Struct, frozen=True):
    """The case, its hardware in words, and the link speeds (bytes/s) at which loading is compared with computing."""

    case: Case
    hardware: str
    links: list[float]


def parse(options: Any) -> Parsed:
    """:raises ConfigError: an option is wrong, or the model does not fit."""
    if bool(options.prefillers) != bool(options.decoders):
        raise ConfigError("--prefillers and --decoders go together: give both, or neither to have them chosen")
    if not 0.5 <= options.share < 1:
        raise ConfigError(f"--share {options.share:g}: give the share of requests to keep the SLO, from 0.5 to below 1")
    slo = Slo(parse_time(options.ttft), parse_time(options.itl), options.share)
    links = [parse_rate(text) for text in options.links.split(",")]
    work = Workload(
        rate=options.rate,
        input_tokens=parse_count(options.input_tokens),
        output_tokens=parse_count(options.output_tokens),
        reuse=options.reuse,
        reuse_bytes_s=parse_rate(options.reuse_link) if options.reuse_link else 0.0,
    )
    work.check()
    assumed = Assumptions(
        mfu=options.mfu,
        mbu=options.mbu,
        link_share=options.link_share,
        step_s=parse_time(options.step),
        control_s=parse_time(options.control),
    )
    gpu, shapes = find_gpu(options.gpu), _shapes(options)
    tp = _tp(options, shapes, gpu, assumed, work)
    engine = Engine(shapes, speeds_of(gpu, assumed, tp, shapes.weight_bytes), tp)
    link = _link(options, gpu, assumed, tp)
    hardware = (
        f"{shapes.name} ({shapes.params / 1e9:.1f} B parameters, {show_bytes(shapes.total_weight_bytes)}; "
        f"{show_bytes(shapes.kv_token_bytes)} of KV per token) on {tp} x {gpu.name} per engine, at {assumed.mfu:.0%} "
        f"of its FLOPS and {assumed.mbu:.0%} of its memory's speed; link {show_rate(link.wire_bytes_s)} in effect"
    )
    case = Case(engine=engine, work=work, slo=slo, link=link, request_s=assumed.request_s)
    return Parsed(case, hardware, links)


def _shapes(options: Any) -> Shapes:
    shapes = find_model(options.model or "llama-3.1-8b")
    sizes = {}
    for name, text in (("weight_bytes", options.weights), ("kv_bytes", options.kv)):
        if text:
            sizes[name] = _NBYTES[text]
    return msgspec.structs.replace(shapes, **sizes)


def _tp(options: Any, shapes: Shapes, gpu: Gpu, assumed: Assumptions, work: Workload) -> int:
    """As asked; auto: the fewest GPUs that hold the weights and the KV of four requests, or else of one.

    :raises ConfigError: not a number, or the weights and the KV of one request do not fit.
    """

    def fits(tp: int, requests: int) -> bool:
        engine = Engine(shapes, speeds_of(gpu, assumed, tp, shapes.weight_bytes), tp)
        return engine.kv_room_tokens >= requests * (work.input_tokens + work.output_tokens)

    if options.tp != "auto":
        if not options.tp.isdigit() or int(options.tp) < 1:
            raise ConfigError(f"--tp {options.tp!r} is not a number of GPUs; give 1, 2, 4, ... or auto")
        if fits(int(options.tp), 1):
            return int(options.tp)
    elif chosen := next((tp for tp in TPS if fits(tp, 4)), None) or next((tp for tp in TPS if fits(tp, 1)), None):
        return chosen
    enough = next((str(tp) for tp in TPS if fits(tp, 1)), f"more than {TPS[-1]}")
    few = "16" if options.tp == "auto" else options.tp
    raise ConfigError(
        f"{show_bytes(shapes.total_weight_bytes)} of weights and the KV of one request do not fit into {few} x "
        f"{gpu.name} ({assumed.memory_share:.0%} of {gpu.memory_gb:g} GB each, less {assumed.activations_gb:g} GB for "
        f"activations); --tp {enough} would hold them"
    )


def _link(options: Any, gpu: Gpu, assumed: Assumptions, tp: int) -> Link:
    """With host arenas pages cross PCIe before and after the wire; the slower one limits the pipeline."""
    wire = parse_rate(options.link) * assumed.link_share * tp
    host = host_bytes_s(gpu, assumed, tp)
    on_gpu = gpu.memory_gb_s * 1e9 * assumed.mbu * tp / 2  # each byte is read and written
    is_host = options.arena == "host"
    return Link(
        wire_bytes_s=min(wire, host) if is_host else wire,
        scatter_bytes_s=host if is_host else on_gpu,
        control_s=assumed.control_s,
    )
