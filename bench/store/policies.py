"""The eviction policies on traces of real load: `python -m pdx.bench.store.policies TRACE…`.

A trace is a file of JSON lines (`.gz` or not) in the form of Mooncake's published ones: `input_length` in tokens, and
`hash_ids`, the prompt's blocks of 512 tokens, chained. Each request goes through a real `Store`, with slots of the
smallest size instead of real chunks: it finds and leases its leading chunks, has room made for the others, fills and
seals them, and lets go. Requests follow each other at once. The hit rate is the share of all tokens that were found.
With `--apart` blocks come one at a time, the last one of a prompt first, and none is leased, as in a cache's simulator.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pdx.bench.harness.report import show_rows
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.store.policies import by_name
from pdx.store.store import Claim, Store

BLOCK_TOKENS = 512
BLOCKS = (1_000, 5_000, 10_000, 20_000, 50_000)
POLICIES = "lru,lfu,fifo,s3fifo,sieve"
SESSION = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One trace with one policy in an arena of so many blocks."""

    trace: str
    policy: str
    blocks: int
    hit_percent: float  # of tokens
    us_per_block: float  # of the control loop: lookup, lease, reservation, seal, release


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a trace."""

    tokens: int
    keys: list[bytes]


def read(path: Path) -> list[Prompt]:
    """The requests of a trace, in order."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        records = [json.loads(line) for line in lines]
    return [
        Prompt(record["input_length"], [number.to_bytes(16, "big") for number in record["hash_ids"]])
        for record in records
    ]


def request(store: Store, keys: list[bytes]) -> int:
    """One prompt as an engine has it; returns how many leading chunks were found."""
    chunks = [chunk for shards in store.find(keys, 1) for chunk in shards]
    lease = store.lease(chunks, SESSION, 60.0)
    _, slots, _ = store.reserve(_claim(keys[len(chunks) :]))
    store.release(lease, SESSION)
    store.seal(store.fill(slots, 0, 1, SESSION))
    return len(chunks)


def apart(store: Store, keys: list[bytes]) -> int:
    """One prompt, a chunk at a time, the last one first; returns how many leading chunks were found."""
    count = len(store.find(keys, 1))
    for key in reversed(keys):
        found = store.find([key], 1)
        if found:
            store.touch(found[0])
        else:
            _, slots, _ = store.reserve(_claim([key]))
            store.seal(store.fill(slots, 0, 1, SESSION))
    return count


def _claim(keys: list[bytes]) -> Claim:
    return Claim(keys=keys, nbytes=GRANULE_BYTES, layers=1, owner=SESSION, writers=[SESSION], partial=True)


def replay(prompts: list[Prompt], store: Store, one: Callable[[Store, list[bytes]], int] = request) -> float:
    """Put all of them through the store; returns the share of tokens that were found."""
    found = sum(min(one(store, prompt.keys) * BLOCK_TOKENS, prompt.tokens) for prompt in prompts)
    return found / sum(prompt.tokens for prompt in prompts)


def row(trace: Path, prompts: list[Prompt], policy: str, blocks: int, folder: Path, *, is_apart: bool = False) -> Row:
    """Replay in an arena of its own."""
    path = folder / f"{policy}-{blocks}"
    with Arena.create(path, blocks * GRANULE_BYTES) as arena:
        store = Store(arena, policy=by_name.find(policy))
        started_at = time.perf_counter()
        share = replay(prompts, store, apart if is_apart else request)
        taken_s = time.perf_counter() - started_at
    path.unlink(missing_ok=True)
    us = taken_s / sum(len(prompt.keys) for prompt in prompts) * 1e6
    return Row(trace.name.split("_")[0], policy, blocks, round(100 * share, 1), round(us, 2))


def main(arguments: list[str] | None = None) -> None:
    """Replay the traces that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.store.policies", description="Eviction on traces.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--policies", default=POLICIES, help="a list; default: %(default)s")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help="sizes of the arena; default: %(default)s")
    parser.add_argument("--apart", action="store_true", help="blocks one at a time, none leased")
    chosen = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for trace in chosen.traces:
            prompts = read(trace)
            rows += [
                row(trace, prompts, policy, int(blocks), Path(folder), is_apart=chosen.apart)
                for blocks in chosen.blocks.split(",")
                for policy in chosen.policies.split(",")
            ]
    show_rows(rows, "Hit rates of the eviction policies")
    print(json.dumps([asdict(each) for each in rows]))


if __name__ == "__main__":
    main()
