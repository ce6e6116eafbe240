"""GPUs by their data sheets, and speeds and step times of engines on them. Pure values; units are in the names."""

from __future__ import annotations

import math

import msgspec

from pdx.bench.plan.shapes import Shapes
from pdx.errors import ConfigError


class Gpu(msgspec.Struct, frozen=True):
    """Peak figures of one GPU. Link speeds are per direction; `peer_gb_s` is between the GPUs of one engine."""

    name: str
    tflops: float  # dense, 16-bit
    tflops_fp8: float
    memory_gb_s: float
    memory_gb: float
    peer_gb_s: float
    host_gb_s: float


# From NVIDIA's data sheets; sparse figures are halved where no others are given.
# TFLOPS dense in 16 bits and in FP8; GB/s and GB of memory; GB/s to its peers and to the host.
GPUS = {
    name: Gpu(name, *numbers)
    for name, numbers in {
        "a100": (312, 312, 2039, 80, 300, 32),  # A100 80GB SXM
        "l40s": (362, 733, 864, 48, 32, 32),  # PCIe 4 only
        "h20": (148, 296, 4000, 96, 450, 64),
        "h800": (989, 1979, 3350, 80, 200, 64),  # SXM, an H100 with a slower NVLink
        "h100": (989, 1979, 3350, 80, 450, 64),  # SXM
        "h200": (989, 1979, 4800, 141, 450, 64),  # SXM
        "b200": (2250, 4500, 8000, 180, 900, 64),  # in a DGX
    }.items()
}


def find_gpu(name: str) -> Gpu:
    """:raises ConfigError: there is no such preset."""
    if name.lower() not in GPUS:
        raise ConfigError(f"GPU {name!r} is none of {', '.join(GPUS)}; choose the nearest and set --mfu and --mbu")
    return GPUS[name.lower()]


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the data sheet's figures that engines reach, and overheads; most are options of `pdx plan`."""

    mfu: float = 0.5  # share of the peak that prefill reaches
    mbu: float = 0.7  # share of the memory bandwidth that decoding reaches
    memory_share: float = 0.9  # of the GPU's memory, for weights, activations and KV
    activations_gb: float = 4.0  # per GPU
    step_s: float = 0.003  # engine overhead per step: scheduling, launching, sampling
    reduce_s: float = 8e-6  # latency of one all-reduce
    link_share: float = 0.8  # of the nominal speed of a network, PCIe, or the link between GPUs
    control_s: float = 0.008  # from the end of prefill until the decode engine may load: answer, request, lookup
    request_s: float = 0.010  # HTTP, tokenizer and scheduling before prefill


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds that one engine reaches, all its GPUs together: units per second, except for `room_bytes` and times."""

    flops: float  # of products with weights
    attention_flops: float
    memory_bytes: float  # reading weights and KV
    room_bytes: float  # memory for weights and KV; inf: unknown
    reduce_bytes: float  # through each GPU's link, for all-reduces; inf: one GPU
    step_s: float = 0.0
    reduce_s: float = 0.0


def speeds_of(gpu: Gpu, assumed: Assumptions, tp: int, weight_bytes: float) -> Speeds:
    """Speeds of an engine of `tp` GPUs, for a model with `weight_bytes` per parameter."""
    peak = (gpu.tflops_fp8 if weight_bytes == 1 else gpu.tflops) * 1e12  # 4-bit weights are multiplied in 16 bits
    return Speeds(
        flops=tp * peak * assumed.mfu,
        attention_flops=tp * gpu.tflops * 1e12 * assumed.mfu,
        memory_bytes=tp * gpu.memory_gb_s * 1e9 * assumed.mbu,
        room_bytes=tp * max(0.0, gpu.memory_gb * assumed.memory_share - assumed.activations_gb) * 1e9,
        reduce_bytes=gpu.peer_gb_s * 1e9 * assumed.link_share if tp > 1 else float("inf"),
        step_s=assumed.step_s,
        reduce_s=assumed.reduce_s if tp > 1 else 0.0,
    )


def host_bytes_s(gpu: Gpu, assumed: Assumptions, tp: int) -> float:
    """Bytes per second between host memory and an engine of `tp` GPUs, over all their links together."""
    return gpu.host_gb_s * 1e9 * assumed.link_share * tp


INF = float("inf")


class Engine(msgspec.Struct, frozen=True):
    """One instance of `tp` GPUs."""

    shapes: Shapes
    speeds: Speeds
    tp: int = 1
    budget: int = 8192  # most prompt tokens computed in one step

    @property
    def kv_token_bytes(self) -> float:
        """A token's KV on all ranks together, including replicas: latents and single heads cannot be split."""
        return self.shapes.kv_token_bytes * self.shapes.rank_share(self.tp) * self.tp

    @property
    def kv_room_tokens(self) -> float:
        """Tokens whose KV fits beside the weights; 0 where the weights alone do not fit."""
        return max(0.0, self.speeds.room_bytes - self.shapes.total_weight_bytes) / self.kv_token_bytes

    def step_s(self, batch: float, context: float, chunk: float = 0, chunk_context: float = 0) -> float:
        """One step: `batch` requests with `context` tokens each decode a token, beside `chunk` tokens of a prompt.

        Computation and memory reads overlap in part: sqrt(c² + m²) lies between full overlap (the larger) and none (the
        sum). The all-reduces and the engine's own time are added.
        """
        shapes, speeds = self.shapes, self.speeds
        tokens = batch + chunk
        flops = shapes.linear_flops(tokens) + shapes.logit_flops(batch + (1 if chunk else 0))
        attention = shapes.attention_flops(chunk, chunk_context) + batch * shapes.attention_flops(1, context)
        compute_s = flops / speeds.flops + attention / speeds.attention_flops
        kv = (batch * context + chunk_context * bool(chunk)) * self.kv_token_bytes
        read_s = (shapes.touched_params(tokens) * shapes.weight_bytes + kv) / speeds.memory_bytes
        return math.hypot(compute_s, read_s) + self._reduce_s(tokens) + speeds.step_s

    def _reduce_s(self, tokens: float) -> float:
        """Two ring all-reduces per layer."""
        if self.tp == 1:
            return 0.0
        nbytes = tokens * self.shapes.hidden * 2  # activations have 16 bits
        once = 2 * (self.tp - 1) / self.tp * nbytes / self.speeds.reduce_bytes + self.speeds.reduce_s
        return 2 * self.shapes.layers * once

    def chunks(self, new: int, budget: int | None = None) -> list[int]:
        """Split `new` tokens into steps of at most `budget` tokens."""
        budget = budget or self.budget
        whole, rest = divmod(max(0, new), budget)
        return [budget] * whole + [rest] * (rest > 0)

    def prefill_s(self, new: int, context: int = 0) -> float:
        """Time to compute `new` tokens after `context` tokens whose KV exists, with nothing else in the batch."""
        return sum(seconds for _, seconds in self.prefill_steps(new, context))

    def prefill_steps(self, new: int, context: int = 0) -> list[tuple[int, float]]:
        """Tokens and seconds of each step."""
        steps = []
        for chunk in self.chunks(new):
            steps.append((chunk, self.step_s(0, 0, chunk, context)))
            context += chunk
        return steps
