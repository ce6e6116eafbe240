"""Service-level objectives: what a client may expect of one request, and how many requests met it. Arithmetic only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from pdx.errors import ConfigError

TOLERATED_GAPS = 0.05  # of a request's gaps may be longer than `itl`
_UNITS_MS = {"ms": 1.0, "s": 1000.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


class Output(Protocol):
    """One request's outcome, by the names of vLLM's `RequestFuncOutput`. Seconds."""

    success: bool
    latency: float
    ttft: float
    itl: list[float]
    output_tokens: int
    prompt_len: int
    error: str
    start_time: float
    client_queue_time: float
    generated_text: str


@dataclass(frozen=True, slots=True)
class Slo:
    """The most that each may take in ms; None: no matter. All that are given must hold for a request to be good."""

    ttft: float | None = None  # sent -> first token
    itl: float | None = None  # between two tokens, for all but `TOLERATED_GAPS` of the request's gaps
    tpot: float | None = None  # mean time per token after the first one
    e2e: float | None = None  # sent -> last token

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Of `ttft=2s,itl=50ms`; "" is the objective that everything meets.

        :raises ConfigError: a name or a duration is none of these, or comes twice.
        """
        names = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            match = _DURATION.fullmatch(value)
            if name not in names or match is None:
                raise ConfigError(
                    f"--slo {part!r}: write NAME=DURATION, names {', '.join(names)}, durations 2s or 50ms"
                )
            if name in found:
                raise ConfigError(f"--slo names {name} twice: {text!r}")
            found[name] = float(match[1]) * _UNITS_MS[match[2]]
        return cls(**found)

    def missed(self, output: Output) -> list[str]:
        """The objectives that this successful request did not meet."""
        tpot = (output.latency - output.ttft) / (output.output_tokens - 1) if output.output_tokens > 1 else 0.0
        took = {"ttft": output.ttft, "itl": _tolerated(output.itl), "tpot": tpot, "e2e": output.latency}
        return [name for name, bound in self.bounds().items() if took[name] > bound / 1000]

    def bounds(self) -> dict[str, float]:
        """The objectives that are set, in ms."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def for_vllm(self) -> dict[str, float]:
        """Those of them that `vllm bench serve --goodput` knows, by its names."""
        names = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
        return {names[name]: bound for name, bound in self.bounds().items() if name in names}


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many requests were good."""

    good: int
    share: float  # of all requests, failed ones included
    per_s: float
    missed: dict[str, int]  # objective -> successful requests that missed it


def goodput(outputs: Sequence[Output], slo: Slo, duration_s: float) -> Goodput:
    """Requests that succeeded and met every objective. Without requests all figures are 0."""
    missed = dict.fromkeys(slo.bounds(), 0)
    good = 0
    for output in outputs:
        if not output.success:
            continue
        names = slo.missed(output)
        good += not names
        for name in names:
            missed[name] += 1
    return Goodput(
        good=good,
        share=good / len(outputs) if outputs else 0.0,
        per_s=good / duration_s if duration_s > 0 else 0.0,
        missed=missed,
    )


def _tolerated(gaps: Sequence[float]) -> float:
    """The longest gap when the longest `TOLERATED_GAPS` of them, rounded down, are left out; 0 without gaps."""
    if not gaps:
        return 0.0
    return sorted(gaps)[len(gaps) - 1 - int(len(gaps) * TOLERATED_GAPS)]
