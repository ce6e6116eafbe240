"""The simulator's numbers: `python -m pdx.bench.sim.measure PART… --traces FOLDER`, into bench/results/sim.json.

Parts: `table` (policies against an independent simulation), `queue` (what a queue of eight requests is worth), `paper`
(CachedAttention's setting), `planning` (capacity and time to live). A part replaces what the file has of it, and keeps
the others; of `table` and `queue` each row is kept as it comes, and `--rows conversation-1000` measures some of them.
All takes about half an hour on one core; the figures depend on no machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.harness.report import RESULTS, Figure, at_least, at_most, plain
from pdx.bench.plan.machines import Assumptions, Engine, find_gpu, host_bytes_s, speeds_of
from pdx.bench.plan.shapes import find_model
from pdx.bench.sim.engine import EARLY, Settings
from pdx.bench.sim.published import BY_CAPACITY, CACHED_ATTENTION, MOST_POINTS, POLICIES, TABLE, WAYS
from pdx.bench.sim.replay import hit_share
from pdx.bench.sim.requests import Trace, read
from pdx.bench.sim.sessions import Conversations, generate
from pdx.bench.sim.simulation import Case, Result, simulate
from pdx.bench.sim.sweep import by_room, by_time, demand_bytes
from pdx.bench.sim.tier import Device

QUEUE = 8
GAP = 0.4
RATIOS = (0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
TIMES_S = (15.0, 30.0, 60.0, 120.0, 300.0, 900.0)
PAPER_SESSIONS = 2250
PAPER_DISK_BYTES = 2.5e12
WARM_UP = 2500  # turns
PAPER_QUEUE = 64
Part = tuple[list[Figure], dict[str, Any]]


def _disk(room_bytes: float, load_gb_s: float, store_gb_s: float) -> Device:
    speeds = {"load_bytes_s": load_gb_s * 1e9, "store_bytes_s": store_gb_s * 1e9}
    return Device(name="disk", kind="disk", room_bytes=int(room_bytes), latency_s=1e-4, **speeds)


def _engine(model: str, gpu: str, tp: int) -> Engine:
    shapes = find_model(model)
    return Engine(shapes, speeds_of(find_gpu(gpu), Assumptions(), tp, shapes.weight_bytes), tp)


def _host_bytes_s(gpu: str, tp: int) -> float:
    return host_bytes_s(find_gpu(gpu), Assumptions(), tp)


def _percent(share: float) -> float:
    return round(100 * share, 1)


def table_row(trace: Trace, blocks: int, theirs: dict[str, float]) -> dict[str, Any]:
    """A row of the independent table; and policies with requests as an engine has them."""
    ours = {policy: _percent(hit_share(trace, policy, blocks, WAYS[policy])) for policy in POLICIES}
    whole = {policy: _percent(hit_share(trace, policy, blocks)) for policy in ("lru", "s3fifo", "gittins")}
    return {"ours": ours, "theirs": theirs, "whole requests": whole}


def table_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """How far off, and how good the policy that learns is."""
    off = max(abs(row["ours"][policy] - row["theirs"][policy]) for row in rows for policy in POLICIES)
    wholes = [row["whole requests"] for row in rows]
    over = min(whole["gittins"] - max(whole["lru"], whole["s3fifo"]) for whole in wholes)
    note = f"{len(rows)} rows"
    return [
        at_most("table: farthest from the independent simulation", round(off, 1), "points", MOST_POINTS, note),
        at_least("gittins over the better of LRU and S3-FIFO, at least", round(over, 1), "points", 0.0, note),
    ]


def queue_row(trace: Trace, blocks: int, theirs: dict[str, float]) -> dict[str, Any]:
    """Eight requests wait at any time, and the node knows them by `Expect`; with and without a disk below memory.

    LRU and S3-FIFO know nothing of the queue. Requests overlap here, so that they find less than in the table.
    """
    best, belady = max(theirs["lru"], theirs["s3fifo"]), theirs["belady"]
    row: dict[str, Any] = {"best of LRU and S3-FIFO": best, "belady": belady}
    for policy in ("lru", "s3fifo"):
        row[policy] = _in_time(trace, blocks, policy, looks_ahead=False)
    for label, room_bytes in (("one pool", 0.0), ("a disk below", 20e12)):
        row[label] = _in_time(trace, blocks, "gittins", looks_ahead=True, disk_bytes=room_bytes)
        row[f"gap closed, {label}"] = round((row[label] - best) / (belady - best), 2)
    return {**row, "wanted by one of the next eight requests, % of blocks": _wanted_soon(trace)}


def _in_time(trace: Trace, blocks: int, policy: str, *, looks_ahead: bool, disk_bytes: float = 0.0) -> float:
    """Percent of all tokens that were found in memory when their request's turn came."""
    model = _engine("llama-3.1-8b", "h100", 1)
    case = Case(
        model=model,
        settings=Settings(batch=64, host_bytes_s=_host_bytes_s("h100", 1), looks_ahead=looks_ahead, early=0),
        host_bytes=int(blocks * trace.block_tokens * model.kv_token_bytes) + 1,
        devices=[_disk(disk_bytes, 7, 5)] if disk_bytes else [],
        policy=policy,
        queue=QUEUE,
    )
    result = simulate(trace, case)
    return _percent(result.tiers[0].hit_tokens / result.tokens)


def queue_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """What is gained by knowing the queue."""
    over = min(round(row["one pool"] - max(row["lru"], row["s3fifo"]), 1) for row in rows)
    pool, below = (min(row[f"gap closed, {label}"] for row in rows) for label in ("one pool", "a disk below"))
    note = f"{len(rows)} rows"
    return [
        at_least("queue: over the better of LRU and S3-FIFO, at least", over, "points", 0.0, note),
        at_least("queue: gap to Belady closed, one pool, at least", pool, "", GAP, note),
        at_least("queue: gap to Belady closed, a disk below, at least", below, "", GAP, note),
    ]


Row = Callable[[Trace, int, dict[str, float]], dict[str, Any]]
BY_ROWS: dict[str, tuple[Row, Callable[[list[dict[str, Any]]], list[Figure]]]] = {
    "table": (table_row, table_figures),
    "queue": (queue_row, queue_figures),
}


def _wanted_soon(trace: Trace) -> float:
    """Of all blocks, those that are wanted again within eight requests, and not by the next one."""
    last: dict[bytes, int] = {}
    soon = total = 0
    for number, request in enumerate(trace.requests):
        for key in request.keys:
            total += 1
            soon += 1 < number - last.get(key, -(1 << 30)) <= QUEUE
            last[key] = number
    return round(100 * soon / total, 2)


def paper() -> Part:
    """Conversations, LLaMA-13B on two A100 per engine, 128 GB of host memory and a disk.

    A quarter of the paper's conversations, at its rate, with a quarter of its disk: what memory holds at a time is the
    same. Once as in PDX, where KV behind a history that was cut is computed again, and once as in the paper.
    """
    rows = [row for moves in (False, True) for row in _paper_rows(moves=moves)]
    figures = []
    for at, words in ((0, "as PDX is"), (3, "KV survives a cut")):
        aware, lru, fifo = rows[at : at + 3]
        figures += [
            plain(f"paper, {words}: hits, scheduler-aware, of all tokens", aware["hits"], "%"),
            at_least(f"paper, {words}: hits, scheduler-aware, of tokens possible", aware["of possible"], "%", 86.0),
            at_least(f"paper, {words}: of these in host memory at their turn", aware["in host memory"], "%", 99.0),
            plain(f"paper, {words}: hits, LRU, of tokens possible", lru["of possible"], "%", "the paper's: 58"),
            plain(f"paper, {words}: hits, FIFO, of tokens possible", fifo["of possible"], "%", "the paper's: 48"),
        ]
    return figures, {"rows": rows, "published": CACHED_ATTENTION}


def _paper_rows(*, moves: bool) -> list[dict[str, Any]]:
    trace = generate(Conversations(sessions=PAPER_SESSIONS, moves=moves))
    rows: list[dict[str, Any]] = []
    for label, policy, looks_ahead, early in (
        ("scheduler-aware", "lru", True, EARLY),
        ("lru", "lru", False, 0),
        ("fifo", "fifo", False, 0),
    ):
        case = Case(
            model=_engine("llama-13b", "a100", 2),
            engines=2,
            settings=Settings(batch=24, host_bytes_s=_host_bytes_s("a100", 2), looks_ahead=looks_ahead, early=early),
            host_bytes=128_000_000_000,
            devices=[_disk(PAPER_DISK_BYTES, 5, 5)],
            policy=policy,
            queue=PAPER_QUEUE,
            warm_up=WARM_UP,
        )
        result = simulate(trace, case)
        rows.append({"what": label, "KV survives a cut": moves, **_short(result)})
        _say(rows[-1])
    return rows


def _short(result: Result) -> dict[str, float]:
    return {
        "hits": _percent(result.hit_share),
        "possible": _percent(result.possible_share),
        "of possible": _percent(result.hit_share / result.possible_share),
        "requests with hits": _percent(result.request_hit_share),
        "in host memory": _percent(result.host_share),
        "in host memory at arrival": _percent(result.early_share),
        "TTFT mean s": round(result.ttft_s.mean, 3),
        "GPU s": round(result.gpu_s, 1),
        "prefill GPU s": round(result.prefill_gpu_s, 1),
        "dollars per million": round(result.dollars_per_million, 3),
    }


def planning() -> Part:
    """Hit rates by capacity and by time to live, of the same conversations, with KV that survives a cut and without."""
    figures: list[Figure] = []
    found: list[dict[str, Any]] = []
    for moves, words in ((False, "as PDX is"), (True, "KV survives a cut")):
        some, row = _plan(words, moves=moves)
        figures += some
        found.append({"KV survives a cut": moves, **row})
    return figures, {"rows": found}


def _plan(words: str, *, moves: bool) -> Part:
    trace = generate(Conversations(sessions=PAPER_SESSIONS, moves=moves))
    token_bytes = _engine("llama-13b", "a100", 2).kv_token_bytes
    demand = demand_bytes(trace, token_bytes)
    rooms = by_room(trace, token_bytes, [ratio * demand for ratio in RATIOS], ["lru"])
    idle, age = (by_time(trace, token_bytes, policy, TIMES_S) for policy in ("idle", "age"))
    figures = [
        plain(
            f"planning, {words}: hits of those possible at {ratio:g} of an hour's demand, LRU",
            _percent(next(p.of_possible for p in rooms if p.policy == "lru" and abs(p.of_demand - ratio) < 1e-6)),
            "%",
            f"the paper's: {theirs:g}",
        )
        for ratio, theirs in BY_CAPACITY.items()
    ]
    by = {"by capacity": rooms, "by idleness": idle, "by age": age}
    return figures, msgspec.to_builtins(by)


PARTS = {"paper": paper, "planning": planning}


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


class Kept:
    """The results' file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.parts: dict[str, Any] = json.loads(path.read_text())["details"] if path.exists() else {}

    def keep(self, part: str, figures: list[Figure], details: dict[str, Any]) -> None:
        """Of this part the file has this from now on."""
        date = time.strftime("%Y-%m-%d", time.gmtime())
        self.parts[part] = {"date": date, "figures": [asdict(each) for each in figures], **details}
        names = [*BY_ROWS, *PARTS]
        figures_of_all = [each for name in names for each in self.parts.get(name, {}).get("figures", ())]
        result = {"bench": "sim", "title": "the simulator", "figures": figures_of_all, "details": self.parts}
        self._path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")

    def rows(self, part: str) -> dict[str, Any]:
        """By trace and blocks."""
        return {f"{row['trace']}-{row['blocks']}": row for row in self.parts.get(part, {}).get("rows", ())}


def main(arguments: list[str] | None = None) -> None:
    """Measure the parts that the command line names."""
    every = [f"{name}-{blocks}" for name, blocks in TABLE]
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.sim.measure", description="The simulator's numbers.")
    parser.add_argument("parts", nargs="+", choices=[*BY_ROWS, *PARTS], metavar="PART", help="see above")
    parser.add_argument("--traces", type=Path, default=Path(), help="folder of mooncake-NAME_trace.jsonl.gz")
    parser.add_argument("--rows", nargs="+", choices=every, default=every, metavar="ROW", help="of table and queue")
    chosen = parser.parse_args(arguments)
    kept = Kept(RESULTS / "sim.json")
    for part in chosen.parts:
        if part in PARTS:
            kept.keep(part, *PARTS[part]())
            continue
        measure, figures_of = BY_ROWS[part]
        for name, blocks in (key for key in TABLE if f"{key[0]}-{key[1]}" in chosen.rows):
            trace = read(chosen.traces / f"mooncake-{name}_trace.jsonl.gz")
            theirs = dict(zip(POLICIES, TABLE[name, blocks], strict=True))
            row = {"trace": name, "blocks": blocks, **measure(trace, blocks, theirs)}
            _say(row)
            rows = {**kept.rows(part), f"{name}-{blocks}": row}
            ordered = [rows[each] for each in every if each in rows]
            kept.keep(part, figures_of(ordered), {"rows": ordered})


if __name__ == "__main__":
    main()
