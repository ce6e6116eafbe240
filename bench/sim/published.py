"""Hit rates that others have published or computed, which the simulator is held against. Percent.

`TABLE`: tokens found in Mooncake's traces (kvcache-ai/Mooncake, FAST25-release/traces, commit 3b5a59413), one pool of
so many blocks of 512 tokens, by a small independent script. Its FIFO has blocks come from a prompt's first one on and
makes room when all of them are in (`pdx.bench.sim.replay.AFTER`); with room for each block as it comes, from the last
one on, FIFO finds 41.0 in place of 40.4 in one row, and at most 0.2 points more in the others.
"""

from __future__ import annotations

from pdx.bench.sim.replay import AFTER, EACH

POLICIES = ("fifo", "lru", "sieve", "s3fifo", "belady")
WAYS = {policy: AFTER if policy == "fifo" else EACH for policy in POLICIES}
TABLE: dict[tuple[str, int], tuple[float, ...]] = {
    ("conversation", 1_000): (4.4, 4.5, 4.9, 5.7, 19.4),
    ("conversation", 5_000): (10.7, 11.4, 9.4, 14.1, 34.8),
    ("conversation", 10_000): (18.5, 21.6, 13.5, 19.9, 37.4),
    ("conversation", 20_000): (26.2, 29.3, 21.5, 25.8, 37.4),
    ("conversation", 50_000): (34.0, 36.2, 35.1, 35.6, 37.4),
    ("synthetic", 1_000): (8.3, 8.6, 4.2, 8.8, 28.2),
    ("synthetic", 5_000): (27.1, 28.5, 20.3, 29.1, 53.6),
    ("synthetic", 10_000): (40.4, 43.2, 36.8, 42.4, 62.9),
    ("synthetic", 20_000): (54.1, 58.2, 60.3, 57.2, 65.1),
}
MOST_POINTS = 0.3  # that ours may be off

# Gao et al., "Cost-Efficient Large Language Model Serving for Multi-turn Conversations with CachedAttention", ATC 2024.
# LLaMA-13B, 128 GB of DRAM and 10 TB of SSD: hits, and of these the share in DRAM …
CACHED_ATTENTION = {"scheduler-aware": 86.0, "lru": 58.0, "fifo": 48.0, "of hits in DRAM": 99.6}
# … and hits by RCC/CCpUT.
BY_CAPACITY = {0.1: 51.0, 0.25: 98.0}
