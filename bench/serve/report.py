"""The results of `pdx bench serve`: the keys of `vllm bench serve`, and PDX's own beside them under "pdx"."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy
from rich.table import Table

from pdx.bench.harness.report import console, machine, replace_file
from pdx.bench.serve.run import BACKENDS, LISTS, Block, Result, Server, Settings, total
from pdx.errors import ConfigError

PERCENTILES = (50, 95, 99)
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}  # vLLM's names
SHOWN = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
RATES = ("request_throughput", "output_throughput", "request_goodput")
TOLERATED_GAPS = 0.05  # the share of a request's gaps that may be longer than `itl`
BUSY = 0.5  # of one core: above this share the client's own work shows in its figures
_UNITS_MS = {"ms": 1.0, "s": 1000.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in ms; None: no bound. A request is good if it meets all bounds that are set."""

    ttft: float | None = None  # sent -> first token
    itl: float | None = None  # between two tokens, for all but `TOLERATED_GAPS` of the request's gaps
    tpot: float | None = None  # mean time per token after the first one
    e2e: float | None = None  # sent -> last token

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse text such as `ttft=2s,itl=50ms`; every request meets "".

        :raises ConfigError: a name or a duration is invalid, or a name occurs twice.
        """
        names = [each.name for each in fields(cls)]
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

    def bounds(self) -> dict[str, float]:
        """The objectives that are set, in ms."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def missed(self, *, ttft: float, itls: Sequence[float], latency: float, tokens: int) -> list[str]:
        """The objectives that a request did not meet; its times are in seconds."""
        gaps = sorted(itls)
        tolerated = gaps[len(gaps) - 1 - int(len(gaps) * TOLERATED_GAPS)] if gaps else 0.0
        tpot = (latency - ttft) / (tokens - 1) if tokens > 1 else 0.0
        took = {"ttft": ttft, "itl": tolerated, "tpot": tpot, "e2e": latency}
        return [name for name, bound in self.bounds().items() if took[name] > bound / 1000]


def summary(results: Sequence[Result], slo: Slo) -> Result:
    """Merge several results into one, with vLLM's keys and arithmetic over all requests that succeeded.

    `goodput` is PDX's own: it covers `itl`, too.
    """
    lists = {name: [value for each in results for value in each[name]] for name in LISTS}
    good = [at for at, error in enumerate(lists["errors"]) if not error]
    duration_s = sum(each["duration"] for each in results)

    def per_s(amount: float) -> float:
        return amount / duration_s if duration_s else 0.0

    def taken(name: str) -> list[Any]:
        return [lists[name][at] for at in good]

    ttfts, latencies, tokens, itls = taken("ttfts"), taken("latencies"), taken("output_lens"), taken("itls")
    times = {
        "ttft": ttfts,
        "tpot": [(end - first) / (n - 1) for first, end, n in zip(ttfts, latencies, tokens, strict=True) if n > 1],
        "itl": [gap for each in itls for gap in each],
        "e2el": latencies,
    }
    missed = [
        slo.missed(ttft=ttft, itls=gaps, latency=latency, tokens=count)
        for ttft, gaps, latency, count in zip(ttfts, itls, latencies, tokens, strict=True)
    ]
    met = sum(not names for names in missed)
    found: Result = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(lists["errors"]) - len(good),
        "total_input_tokens": sum(taken("input_lens")),
        "total_output_tokens": sum(tokens),
        "request_throughput": per_s(len(good)),
        "request_goodput": per_s(met) if slo.bounds() else None,
        "output_throughput": per_s(sum(tokens)),
        "total_token_throughput": per_s(sum(tokens) + sum(taken("input_lens"))),
        **lists,
        "goodput": {
            "good": met,
            "share": met / len(lists["errors"]) if lists["errors"] else 0.0,
            "per_s": per_s(met),
            "missed": {name: sum(name in each for each in missed) for name in slo.bounds()},
        },
    }
    for metric, values in times.items():
        ms = numpy.array(values or [0.0]) * 1000
        found |= {f"mean_{metric}_ms": float(ms.mean()), f"median_{metric}_ms": float(numpy.median(ms))}
        found[f"std_{metric}_ms"] = float(ms.std())
        found |= {f"p{share}_{metric}_ms": float(numpy.percentile(ms, share)) for share in PERCENTILES}
    return found


class Report:
    """Computes the results of servers, saves them in `folder` and shows them."""

    def __init__(self, settings: Settings, slo: Slo, folder: Path, *, tokenizer: str) -> None:
        self._settings = settings
        self._slo = slo
        self._folder = folder
        self._tokenizer = tokenizer

    def result(self, server: Server, *, is_complete: bool) -> Result:
        """The whole result of one server, ready for JSON."""
        settings = self._settings
        figures = self._figures(server.blocks)
        rounds = zip_longest(*(block.results for block in server.blocks))
        rate = "inf" if math.isinf(settings.rate) else settings.rate
        ours = {
            "kind": "pdx-bench-serve",
            "is_complete": is_complete,
            "workload": {**asdict(settings), "rate": rate},
            "blocks": [self._block(block) for block in server.blocks],
            "slo_ms": self._slo.bounds(),
            "goodput": figures.pop("goodput"),
            "errors": dict(Counter(filter(None, figures["errors"]))),
            "ttft_by_round_ms": {
                str(number): summary([one for one in each if one], self._slo)["mean_ttft_ms"]
                for number, each in enumerate(rounds)
            },
            "found_tokens": _found(server.blocks),
            "client_cpu_share_of_a_core": _cpu_share(server),
            "machine": machine(),
        }
        header = {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": BACKENDS[settings.api],
            "backend": BACKENDS[settings.api],
            "label": server.label,
            "model_id": server.root,
            "tokenizer_id": self._tokenizer,
            "num_prompts": settings.requests,
            "request_rate": rate,
            "burstiness": 1.0,
            "max_concurrency": settings.concurrency,
        }
        return {**header, **figures, "pdx": ours}

    def write(self, servers: Sequence[Server], *, is_complete: bool) -> list[Path]:
        """Write one file per server and, for two servers, their comparison; returns the paths."""
        found = {file_name(each.label): self.result(each, is_complete=is_complete) for each in servers}
        if len(servers) == 2:
            found["comparison.json"] = self.compare(*servers)
        for name, result in found.items():
            replace_file(self._folder / name, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
        return [self._folder / name for name in found]

    def compare(self, first: Server, second: Server) -> Result:
        """How many times better the first server did, in each block that both completed. The spread over the blocks
        shows how much of a ratio is chance, because both servers did each block within the same minutes."""
        both = list(zip(first.blocks, second.blocks, strict=False))
        blocks = [(self._figures([one]), self._figures([other])) for one, other in both]
        keys = [f"{name}_{metric}_ms" for metric in METRICS for name in SHOWN]
        ratios = {}
        for key in (*keys, *RATES):
            each = [found for pair in blocks if (found := ratio(key, *pair)) is not None]
            ratios[key] = {"median_of_blocks": statistics.median(each) if each else None, "blocks": each}
        answers = [(_answers(one), _answers(other)) for one, other in both]
        same = [one[key] == other[key] for one, other in answers for key in one.keys() & other.keys()]
        return {
            "kind": "pdx-bench-serve-comparison",
            "first": first.label,
            "second": second.label,
            "how": "latencies: second / first; throughput and goodput: first / second; above 1 the first is better",
            "ratios": ratios,
            "answers": {"both_answered": len(same), "same": sum(same)},
        }

    def show(self, servers: Sequence[Server]) -> None:
        table = Table(title=f"{self._settings.workload}: {self._settings.requests} requests, ms", title_justify="left")
        for column in ("", *SHOWN):
            table.add_column(column, justify="right" if column else "left")
        figures = {server.label: self._figures(server.blocks) for server in servers}
        for metric, title in METRICS.items():
            for label, found in figures.items():
                table.add_row(f"{title} {label}", *(f"{found[f'{name}_{metric}_ms']:,.2f}" for name in SHOWN))
        console.print(table)
        for server in servers:
            for line in self._remarks(server, figures[server.label]):
                console.print(f"{server.label}: {line}", markup=False, soft_wrap=True)
        if len(servers) == 2:
            compared = self.compare(*servers)
            answers = compared["answers"]
            console.print(f"the same text in {answers['same']} of {answers['both_answered']} answers")
            for key in ("mean_ttft_ms", "mean_itl_ms", "request_throughput"):
                if each := compared["ratios"][key]["blocks"]:
                    middle = f"{statistics.median(each):.2f} × ({min(each):.2f} to {max(each):.2f})"
                    console.print(f"{key}, times better, block by block: {middle}", markup=False)

    def _remarks(self, server: Server, found: Result) -> list[str]:
        done = f"{found['completed']} done, {found['failed']} failed in {found['duration']:.1f} s"
        lines = [
            f"{done}; {found['request_throughput']:.3f} requests/s, {found['output_throughput']:,.1f} tokens/s"
            + (f", goodput {found['goodput']['per_s']:.3f} requests/s" if self._slo.bounds() else "")
        ]
        missed = {name: count for name, count in found["goodput"]["missed"].items() if count}
        lines += [f"missed {', '.join(f'{name}: {count}' for name, count in missed.items())}"] if missed else []
        errors: list[str] = found["errors"]
        lines += [f"{count} requests failed: {error}" for error, count in Counter(errors).items() if error]
        if (share := _cpu_share(server)) > BUSY:
            lines.append(f"the client used {share:.0%} of one core, and its figures contain that: lower --rate")
        by_engine = _found(server.blocks)["engines"]
        for url, each in by_engine.items():
            parts = ", ".join(f"{each[name]:,.0f} {name}" for name in ("local", "external", "computed"))
            lines.append(f"tokens of prompts at {url.partition('://')[2]}: {parts}")
        if not by_engine:
            lines.append("where the tokens of prompts were found is not known: no vLLM engine is named (--admin)")
        return lines

    def _figures(self, blocks: Sequence[Block]) -> Result:
        return summary([result for block in blocks for result in block.results], self._slo)

    def _block(self, block: Block) -> Result:
        figures = self._figures([block])
        kept = {key: value for key, value in figures.items() if key not in LISTS}
        return {**kept, "found_tokens": _found([block])}


def ratio(key: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> float | None:
    """How many times better the first is; None if a figure is missing or 0."""
    above, below = (first[key], second[key]) if key in RATES else (second[key], first[key])
    return above / below if above and below else None


def file_name(label: str) -> str:
    return f"serve-{re.sub(r'[^0-9A-Za-z._-]+', '-', label)}.json"


def _answers(block: Block) -> dict[tuple[int, int], str]:
    """Answers by round and conversation; a conversation ends with its first failed request."""
    found: dict[tuple[int, int], str] = {}
    asked: Sequence[int] = range(len(block.results[0]["errors"]) if block.results else 0)
    for number, result in enumerate(block.results):
        answered = zip(asked, result["generated_texts"], result["errors"], strict=True)
        found |= {(number, at): text for at, text, error in answered if not error}
        asked = [at for at in asked if (number, at) in found]
    return found


def _cpu_share(server: Server) -> float:
    """The share of one core that this process used while requests were in flight."""
    duration_s = sum(result["duration"] for block in server.blocks for result in block.results)
    return sum(block.cpu_s for block in server.blocks) / duration_s if duration_s else 0.0


def _found(blocks: Sequence[Block]) -> Result:
    """Prompt tokens by where the engines found them, for all engines together and for each."""
    urls = sorted({url for block in blocks for url in block.found})
    engines = {url: total([block.found[url] for block in blocks if url in block.found]) for url in urls}
    every = msgspec.structs.asdict(total(list(engines.values()))) if engines else None
    return {"all": every, "engines": {url: msgspec.structs.asdict(each) for url, each in engines.items()}}
