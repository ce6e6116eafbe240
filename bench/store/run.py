"""The steps of `pdx bench store`: each tier with each size of chunks, then lookups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pdx.bench.harness.commands import Step
from pdx.bench.harness.report import Figure, plain
from pdx.bench.store import tiers as store_tiers
from pdx.bench.store.engine_memory import Load
from pdx.bench.store.tiers import PROMPT_KEYS, all_tiers, title, why_missing
from pdx.cli.tables import size
from pdx.errors import ConfigError

if TYPE_CHECKING:
    from pdx.bench.harness.commands import Run


def steps_of(
    run: Run,
    *,
    tiers: Sequence[str],
    sizes: Sequence[int],
    chunks: int,
    rounds: int,
    index: Sequence[int],
    questions: int,
) -> list[Step]:
    """Of the tiers that there are here; `run.missing` has the others. No tiers: all.

    :raises ConfigError: there is no such tier, or a chunk is not made of pages.
    """
    loads = [Load(nbytes, chunks, rounds) for nbytes in sizes]
    known = all_tiers()
    for name in tiers:
        if name not in known:
            raise ConfigError(f"no tier is named {name!r}; there are {', '.join(known)}")
    run.missing.update({name: why for name in tiers or known if (why := why_missing(name))})

    def tier(name: str, load: Load) -> list[Figure]:
        row = store_tiers.measure_tier(name, load)
        run.details["rows"].append(row)
        head = f"{title(name)}, chunks of {size(load.chunk_bytes)}"
        return [
            plain(f"{head}: write", row.write_gb_s, "GB/s", f"{row.write_ratio:.3f} of memcpy, {row.memcpy_gb_s:.2f}"),
            plain(f"{head}: read", row.read_gb_s, "GB/s", f"{row.read_ratio:.3f} of memcpy"),
            plain(f"{head}: store one, p50", row.store.p50_ms, "ms", f"p99 {row.store.p99_ms:.3f}"),
            plain(f"{head}: find one, p50", row.hit.p50_ms, "ms", f"p99 {row.hit.p99_ms:.3f}"),
        ]

    def lookups(count: int) -> list[Figure]:
        row = store_tiers.measure_index(count, questions)
        run.details["index"].append(row)
        head = f"index of {count:,} chunks"
        return [
            plain(f"{head}: lookups", row.lookups_per_s, "1/s", "one client, one after the other"),
            plain(f"{head}: hit, p50", row.hit.p50_ms, "ms", f"p99 {row.hit.p99_ms:.3f}; a ping {row.ping.p50_ms:.3f}"),
            plain(f"{head}: prompt of {PROMPT_KEYS} chunks, p50", row.prompt.p50_ms, "ms"),
        ]

    present = [name for name in tiers or known if name not in run.missing]
    return [
        *(
            Step(f"{title(name)}, chunks of {size(load.chunk_bytes)}", partial(tier, name, load), name)
            for name in present
            for load in loads
        ),
        *(Step(f"index of {count:,} chunks", partial(lookups, count)) for count in index),
    ]
