"""A run of `pdx bench proxy`: latencies at the engines' pace, then engines that answer at once; and the CPU time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pdx.bench.harness.ask import AskFailed
from pdx.bench.harness.interrupts import Steps
from pdx.bench.harness.report import Figure, plain
from pdx.bench.proxy.load import Case, Cost, Row, cost, measure
from pdx.bench.proxy.stage import Stage
from pdx.bench.proxy.stand_in_engine import Pace


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    modes: tuple[str, ...]
    concurrency: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    requests: int
    pace: Pace

    def cases(self) -> list[Case]:
        """At the engines' pace: with the most tokens."""
        return [
            Case(mode, concurrency, prompt_tokens, max(self.tokens), self.requests)
            for mode in self.modes
            for prompt_tokens in self.prompt_tokens
            for concurrency in self.concurrency
        ]

    def saturated(self) -> list[Case]:
        """Where engines answer at once: with the most requests at once."""
        return [
            Case(mode, max(self.concurrency), prompt_tokens, tokens, self.requests)
            for mode in self.modes
            for prompt_tokens in self.prompt_tokens
            for tokens in self.tokens
        ]


@dataclass(slots=True)
class ProxyRun:
    """What was measured so far. `on_more` is called whenever that has become more."""

    settings: Settings
    on_more: Callable[[], object] = lambda: None
    rows: list[Row] = field(default_factory=list)
    saturated: list[Row] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.settings.cases()) + len(self.settings.saturated())

    def measure(self, stage: Stage, steps: Steps) -> None:
        """Take all steps. A case that fails is named, and the others go on."""
        for case in self.settings.cases():
            self._take(stage, case, steps, self.rows, is_saturated=False)
        for case in self.settings.saturated():
            self._take(stage, case, steps, self.saturated, is_saturated=True)
        self.is_complete = True
        self.on_more()

    def _take(self, stage: Stage, case: Case, steps: Steps, rows: list[Row], *, is_saturated: bool) -> None:
        name = words(case) + (", saturated" if is_saturated else "")
        steps.step(name)
        try:
            rows.append(measure(stage, case, is_saturated=is_saturated))
        except (AskFailed, RuntimeError, OSError) as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            steps.say(f"not measured: {name}: {error}")
        self.on_more()

    def costs(self) -> Iterator[Cost]:
        """Where saturated rows differ in their tokens."""
        kinds = dict.fromkeys((row.mode, row.prompt_tokens) for row in self.saturated)
        for kind in kinds:
            rows = sorted(
                (row for row in self.saturated if (row.mode, row.prompt_tokens) == kind), key=lambda row: row.tokens
            )
            if len(rows) > 1:
                yield cost(rows[0], rows[-1])

    def figures(self) -> list[Figure]:
        """The numbers, by name."""
        found: list[Figure] = []
        for row in self.rows:
            name, note = words(row), "the machine was full" if row.is_machine_full else ""
            found += [
                plain(f"{name}: added TTFT, p50", row.added_ttft_p50_ms, "ms", note),
                plain(f"{name}: added TTFT, p99", row.added_ttft_p99_ms, "ms", note),
                plain(f"{name}: added inter-token latency, p50", row.added_itl_p50_ms, "ms", note),
                plain(f"{name}: added inter-token latency, p99", row.added_itl_p99_ms, "ms", note),
                plain(f"{name}: CPU of the proxy per request", row.cpu_ms, "ms"),
            ]
        for row in self.saturated:
            note = (
                f"directly {row.direct.requests_per_s:,.1f}; the proxy was busy with {row.proxy.proxy_cores:.2f} cores"
            )
            found += [
                plain(f"{words(row)}, saturated: requests", row.proxy.requests_per_s, "1/s", note),
                plain(f"{words(row)}, saturated: CPU of the proxy per request", row.cpu_ms, "ms"),
            ]
        for each in self.costs():
            name = f"{each.mode}, prompts of {each.prompt_tokens:,}"
            found += [
                plain(f"{name}: CPU of the proxy per request, without its tokens", each.cpu_ms_per_request, "ms"),
                plain(f"{name}: CPU of the proxy per token", each.cpu_us_per_token, "µs"),
            ]
        return found

    def details(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "engines": "stand-ins: they compute nothing and answer at a fixed pace",
            "settings": asdict(self.settings),
            "rows": [asdict(row) for row in self.rows],
            "saturated": [asdict(row) for row in self.saturated],
            "costs": [asdict(each) for each in self.costs()],
            "failed": self.failed,
            "is_complete": self.is_complete,
        }

    @property
    def has_nothing(self) -> bool:
        """Whether nothing at all was measured."""
        return not self.rows and not self.saturated


def words(case: Case | Row) -> str:
    """A case, in words."""
    return f"{case.mode}, {case.concurrency} at once, {case.prompt_tokens:,} + {case.tokens} tokens"
