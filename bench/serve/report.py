"""What `pdx bench serve` shows and keeps: vLLM's figures by vLLM's keys, and ours beside them under "pdx"."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from pdx.bench.harness.report import console, machine
from pdx.bench.serve import client as serve_engines
from pdx.bench.serve.client import BACKENDS, METRICS, PERCENTILES, Client
from pdx.bench.serve.comparison import compare, verdict
from pdx.bench.serve.goodput import Slo, goodput
from pdx.bench.serve.run import Settings, Tally
from pdx.bench.serve.workloads import Workload

KIND = "pdx-bench-serve"
VERSION = 1
BUSY = 0.5  # of one core: above this share the client's own work shows in what it measures
LATE_MS = 10.0
# What `vllm bench serve` leaves out without --save-detailed.
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_SHOWN = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))

Result = dict[str, Any]


class Report:
    """Makes results of tallies, keeps them in `folder` and shows them."""

    def __init__(
        self, settings: Settings, slo: Slo, client: Client, folder: Path, *, tokenizer: str, is_detailed: bool = False
    ) -> None:
        self._settings = settings
        self._slo = slo
        self._client = client
        self._folder = folder
        self._tokenizer = tokenizer
        self._is_detailed = is_detailed

    def result(self, tally: Tally, *, is_complete: bool) -> Result:
        """All that is known of one server, ready for JSON, with every request's details."""
        answers = tally.answers
        outputs = [answer.output for answer in answers]
        duration_s = tally.duration_s or math.inf  # nothing began: every rate is 0
        figures = self._client.statistics(outputs, duration_s, self._slo)
        good = goodput(outputs, self._slo, duration_s)
        if self._slo.bounds():
            figures["request_goodput"] = good.per_s  # also by `itl`, of which vLLM knows nothing
        figures["duration"] = tally.duration_s
        ours = {
            "kind": KIND,
            "version": VERSION,
            "is_complete": is_complete,
            "planned": sum(block.planned for block in tally.blocks),
            "workload": _finite(asdict(self._settings.shape)),
            "api": self._settings.api,
            "blocks": [self._block(tally, number) for number in range(len(tally.blocks))],
            "slo_ms": self._slo.bounds(),
            "goodput": asdict(good),
            "errors": dict(Counter(output.error for output in outputs if not output.success)),
            "ttft_by_round_ms": _by_round(tally),
            "prompt_tokens": _spread([output.prompt_len for output in outputs if output.success]),
            "found_tokens": _found(tally),
            "reset_cache": self._settings.reset_cache,
            "client": _client(tally),
            "vllm_bench_serve": vllm_command(self._settings, self._slo, tally),
            "salt": self._settings.salt,
        }
        return {**self._header(tally), **figures, "pdx": ours}

    def write(self, tallies: Sequence[Tally], *, is_complete: bool) -> list[Path]:
        """Keep one file for each server, and for two servers their comparison; returns the files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        written = []
        here = machine()
        for tally in tallies:
            result = self.result(tally, is_complete=is_complete)
            result["pdx"]["machine"] = here
            kept = {key: value for key, value in result.items() if self._is_detailed or key not in DETAILS}
            written.append(self._save(file_name(tally.server.label), kept))
        if len(tallies) == 2:
            written.append(self._save("comparison.json", self._compare(tallies)))
        return written

    def show(self, tallies: Sequence[Tally]) -> None:
        """Print the tables and what is to be said about them."""
        console.print(self._latencies(tallies))
        console.print(self._totals(tallies))
        if any(tally.found for tally in tallies):
            console.print(_sources(tallies))
        for tally in tallies:
            for line in self._remarks(tally):
                console.print(f"{tally.server.label}: {line}", markup=False, soft_wrap=True)
        if len(tallies) == 2:
            for line in verdict(self._compare(tallies)):
                console.print(line, markup=False, soft_wrap=True)

    def _header(self, tally: Tally) -> Result:
        """The keys that `vllm bench serve` writes before its figures."""
        settings, rate = self._settings, self._settings.shape.rate
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": BACKENDS[settings.api],
            "backend": BACKENDS[settings.api],
            "label": tally.server.label,
            "model_id": tally.server.root,
            "tokenizer_id": self._tokenizer,
            "num_prompts": settings.shape.requests,
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": 1.0,
            "max_concurrency": settings.concurrency,
        }

    def _save(self, name: str, result: Result) -> Path:
        path = self._folder / name
        partial = path.with_suffix(".partial")
        partial.write_text(_lines(result))
        partial.replace(path)
        return path

    def _figures(self, tally: Tally) -> Result:
        """What is compared, of all blocks."""
        outputs = [answer.output for answer in tally.answers]
        duration_s = tally.duration_s or math.inf
        figures = self._client.statistics(outputs, duration_s, self._slo)
        return {**_compact(figures), "goodput": goodput(outputs, self._slo, duration_s).per_s}

    def _compare(self, tallies: Sequence[Tally]) -> Result:
        keys = [f"{name}_{metric}_ms" for metric in METRICS for name in _SHOWN]
        keys += ["request_throughput", "output_throughput", *(["goodput"] if self._slo.bounds() else [])]
        return compare(tallies[0], tallies[1], figures=self._figures, keys=keys)

    def _block(self, tally: Tally, number: int) -> Result:
        """The same of one block."""
        alone = Tally(tally.server, [tally.blocks[number]])
        return {**self._figures(alone), "duration": alone.duration_s, "found_tokens": _found(alone)}

    def _latencies(self, tallies: Sequence[Tally]) -> Table:
        title = f"{self._settings.shape.workload}: {self._settings.shape.requests} requests"
        table = Table(title=f"{title}, latencies in ms", title_justify="left")
        for column in ("", *_SHOWN):
            table.add_column(column, justify="right" if column else "left")
        figures = [self._figures(tally) for tally in tallies]
        ratios = self._compare(tallies)["ratios"] if len(tallies) == 2 else {}
        for metric in METRICS:
            for tally, found in zip(tallies, figures, strict=True):
                label = f" {tally.server.label}" if len(tallies) > 1 else ""
                table.add_row(_NAMES[metric] + label, *(f"{found[f'{name}_{metric}_ms']:,.2f}" for name in _SHOWN))
            if ratios:
                each = [ratios[f"{name}_{metric}_ms"]["all"] for name in _SHOWN]
                table.add_row("  times lower", *("–" if one is None else f"{one:.2f} x" for one in each))
        return table

    def _totals(self, tallies: Sequence[Tally]) -> Table:
        table = Table(title="requests and rates", title_justify="left")
        for column in ("", "done", "failed", "not sent", "seconds", "requests/s", "tokens/s", "goodput/s", "good"):
            table.add_column(column, justify="right" if column else "left")
        for tally in tallies:
            outputs = [answer.output for answer in tally.answers]
            good = goodput(outputs, self._slo, tally.duration_s)
            found = self._figures(tally)
            table.add_row(
                tally.server.label,
                *(str(found["completed"]), str(found["failed"])),
                str(sum(block.planned for block in tally.blocks) - len(outputs)),
                *(f"{tally.duration_s:,.1f}", f"{found['request_throughput']:.3f}"),
                f"{found['output_throughput']:,.1f}",
                *((f"{good.per_s:.3f}", f"{good.share:.0%}") if self._slo.bounds() else ("–", "–")),
            )
        return table

    def _remarks(self, tally: Tally) -> list[str]:
        outputs = [answer.output for answer in tally.answers]
        client = _client(tally)
        found = [
            f"the client used {client['cpu_share_of_a_core']:.0%} of one core; "
            f"its timers were {client['lag_p99_ms']:.1f} ms late at p99, requests {client['late_p99_ms']:.1f} ms"
        ]
        if client["cpu_share_of_a_core"] > BUSY:
            found.append("the client was too busy for these figures: lower --rate, or send from several machines")
        elif client["is_bottleneck"]:
            found.append("the client often had to wait for a processor, and its figures contain that: leave it a core")
        if not tally.found:
            found.append("where the tokens of prompts were found is not known: no vLLM engine is named (--admin)")
        missed = goodput(outputs, self._slo, tally.duration_s).missed
        if any(missed.values()):
            found.append("missed " + ", ".join(f"{name}: {count} requests" for name, count in missed.items() if count))
        errors = Counter(output.error for output in outputs if not output.success)
        found += [f"{count} requests failed: {error}" for error, count in errors.most_common(5)]
        return found


def file_name(label: str) -> str:
    """Of the result with that label."""
    return f"serve-{re.sub(r'[^0-9A-Za-z._-]+', '-', label)}.json"


def vllm_command(settings: Settings, slo: Slo, tally: Tally) -> str:
    """The `vllm bench serve` that sends such requests too; "" where it has no such workload."""
    shape = settings.shape
    if shape.workload is Workload.CHAT or settings.api != "completions":
        return ""
    words = [f"vllm bench serve --base-url {tally.server.url} --model {tally.server.root}"]
    if tally.server.model != tally.server.root:
        words.append(f"--served-model-name {tally.server.model}")
    if shape.workload is Workload.RANDOM:
        words.append(f"--dataset-name random --input-len {shape.input_tokens} --output-len {shape.output_tokens}")
    else:
        words.append(
            f"--dataset-name prefix_repetition --prefix-repetition-num-prefixes {shape.shared} "
            f"--prefix-repetition-prefix-len {shape.shared_tokens} "
            f"--prefix-repetition-suffix-len {shape.input_tokens - shape.shared_tokens} "
            f"--prefix-repetition-output-len {shape.output_tokens} --ignore-eos"
        )
    words.append(f"--num-prompts {shape.requests} --request-rate {shape.rate:g} --seed {shape.seed} --temperature 0")
    words.append(f"--percentile-metrics {','.join(METRICS)} --metric-percentiles {','.join(map(str, PERCENTILES))}")
    if settings.concurrency:
        words.append(f"--max-concurrency {settings.concurrency}")
    if slo.for_vllm():
        words.append("--goodput " + " ".join(f"{name}:{bound:g}" for name, bound in slo.for_vllm().items()))
    return " ".join([*words, "--save-result"])


def _compact(figures: Result) -> Result:
    return {key: value for key, value in figures.items() if not isinstance(value, list)}


def _client(tally: Tally) -> Result:
    """Whether the client itself was in the way."""
    lags_ms = sorted(lag * 1000 for block in tally.blocks for lag in block.lags_s)
    late_ms = sorted(answer.late_s * 1000 for answer in tally.answers)
    cpu_s = sum(block.cpu_s for block in tally.blocks)
    share = cpu_s / tally.duration_s if tally.duration_s else 0.0
    return {
        "cpu_s": cpu_s,
        "cpu_share_of_a_core": share,
        "cpus": os.cpu_count(),
        "lag_p99_ms": _p99(lags_ms),
        "lag_max_ms": max(lags_ms, default=0.0),
        "late_p99_ms": _p99(late_ms),
        "late_max_ms": max(late_ms, default=0.0),
        "is_bottleneck": share > BUSY or _p99(lags_ms) > LATE_MS,
    }


def _found(tally: Tally) -> Result:
    """Tokens of prompts by where an engine had them from; of all engines, and of each if there are several."""
    found = tally.found
    every = msgspec.structs.asdict(serve_engines.total(found.values())) if found else None
    return {"all": every, "engines": {url: msgspec.structs.asdict(each) for url, each in found.items()}}


def _sources(tallies: Sequence[Tally]) -> Table:
    """A row for each engine."""
    table = Table(title="where engines found the tokens of prompts", title_justify="left")
    for column in ("", "engine", "in all", "own prefix cache", "connector", "computed"):
        table.add_column(column, justify="right" if column not in ("", "engine") else "left")
    for tally in tallies:
        for url, found in tally.found.items():
            each = (found.local, found.external, found.computed)
            shares = (f"{count:,.0f} ({count / found.prompt:.0%})" if count else "0" for count in each)
            table.add_row(tally.server.label, url.partition("://")[2], f"{found.prompt:,.0f}", *shares)
    return table


def _p99(ordered: Sequence[float]) -> float:
    return ordered[math.ceil(len(ordered) * 0.99) - 1] if ordered else 0.0


def _spread(counts: Sequence[int]) -> Result:
    return {"min": min(counts, default=0), "mean": statistics.fmean(counts or [0]), "max": max(counts, default=0)}


def _by_round(tally: Tally) -> dict[str, float]:
    """Mean TTFT of each round of conversations: later rounds have longer prompts, and more of them is known."""
    rounds: dict[int, list[float]] = defaultdict(list)
    for answer in tally.answers:
        if answer.output.success:
            rounds[answer.round].append(answer.output.ttft * 1000)
    return {str(number): statistics.fmean(found) for number, found in sorted(rounds.items())}


def _lines(result: Result) -> str:
    """JSON with a line for each key, so that lists of thousands of times are one line each."""
    lines = [
        f" {json.dumps(key)}: "
        + json.dumps(value, indent=1 if isinstance(value, dict) else None, ensure_ascii=False, allow_nan=False)
        for key, value in result.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _finite(shape: Result) -> Result:
    return {key: "inf" if value == math.inf else value for key, value in shape.items()}
