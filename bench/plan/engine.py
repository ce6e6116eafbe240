"""How long one engine needs for a step: the roofline of its model and its machine. Seconds, bytes, tokens; pure."""

from __future__ import annotations

import math

import msgspec

from pdx.bench.plan.machines import Speeds
from pdx.bench.plan.shapes import Shapes

INF = float("inf")


class Engine(msgspec.Struct, frozen=True):
    """One instance of `tp` GPUs."""

    shapes: Shapes
    speeds: Speeds
    tp: int = 1
    budget: int = 8192  # prompt tokens computed in one step

    @property
    def kv_token_bytes(self) -> float:
        """A token's KV on all ranks together: more than once where a rank cannot take a part."""
        return self.shapes.kv_token_bytes * self.shapes.rank_share(self.tp) * self.tp

    @property
    def kv_room_tokens(self) -> float:
        """Tokens whose KV fits beside the weights; 0 where the weights alone do not fit."""
        return max(0.0, self.speeds.room_bytes - self.shapes.total_weight_bytes) / self.kv_token_bytes

    def step_s(self, batch: float, context: float, chunk: float = 0, chunk_context: float = 0) -> float:
        """One step: `batch` requests decode a token behind `context` tokens each, beside `chunk` tokens of a prompt.

        Computing and reading memory overlap in part: sqrt(c² + m²) lies between all of it (the larger) and nothing (the
        sum). Then the all-reduces and the engine's own time.
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
        """Two all-reduces per layer over a ring."""
        if self.tp == 1:
            return 0.0
        nbytes = tokens * self.shapes.hidden * 2  # activations have 16 bits
        once = 2 * (self.tp - 1) / self.tp * nbytes / self.speeds.reduce_bytes + self.speeds.reduce_s
        return 2 * self.shapes.layers * once

    def chunks(self, new: int, budget: int | None = None) -> list[int]:
        """The steps in which `new` tokens are computed."""
        budget = budget or self.budget
        whole, rest = divmod(max(0, new), budget)
        return [budget] * whole + [rest] * (rest > 0)

    def prefill_s(self, new: int, context: int = 0) -> float:
        """Computing `new` tokens behind `context` that are there already, with nothing else in the batch."""
        total = 0.0
        for chunk in self.chunks(new):
            total += self.step_s(0, 0, chunk, context)
            context += chunk
        return total

    def prefill_steps(self, new: int, context: int = 0) -> list[tuple[int, float]]:
        """Tokens and seconds of each step."""
        steps = []
        for chunk in self.chunks(new):
            steps.append((chunk, self.step_s(0, 0, chunk, context)))
            context += chunk
        return steps
