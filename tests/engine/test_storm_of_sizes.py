"""A storm of requests over engines of one, two, four and eight ranks at one node: every byte they load is looked at.

`python tests/engine/test_storm_of_sizes.py SEED REQUESTS` runs one by itself, and says what it did.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "support")]

from node_harness import NodeThread  # noqa: E402
from toy_engine import CHUNK, Request, ToyEngine, decode_of, prefill_of, tokens  # noqa: E402

from pdx.config import NodeConfig  # noqa: E402
from pdx.engine import worker  # noqa: E402
from pdx.memory.layout import KvLayout  # noqa: E402

SHARDS = 8
PROMPTS, LENGTH = 12, 6 * CHUNK  # that others begin like
STEPS = (7, 16, 33, 1000)  # tokens that an engine computes at once


def storm(folder: Path, seed: int, requests: int, *, has_disk: bool) -> collections.Counter[str]:
    """Prompts with common beginnings, whole, handed over or given up; the arena holds few of their chunks."""
    source, did = random.Random(seed), collections.Counter[str]()
    prompts = [tokens(number, LENGTH) for number in range(PROMPTS)]
    disks = [str(folder / "disk")] if has_disk else []
    config = NodeConfig(address=f"ipc://{folder}/node.sock", arena_bytes=1 << 20, disks=disks, disk_reserve_bytes=0)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(contextlib.closing(NodeThread(config)))
        engines = [
            stack.enter_context(
                contextlib.closing(ToyEngine(node.address, f"{ranks} ranks", SHARDS, ranks=ranks, heads=SHARDS))
            )
            for ranks in (1, 2, 4, 8)
        ]
        for number in range(requests):
            first, second = source.choice(engines), source.choice(engines)
            own = [5000 + source.randrange(3) for _ in range(source.randrange(1, 2 * CHUNK))]
            prompt = source.choice(prompts)[: source.randrange(1, LENGTH)] + own
            kind, step = source.random(), source.choice(STEPS)
            if kind < 0.1:  # given up after its first step
                request = Request(f"given up {number}", prompt)
                assert first.admit(request) == set()
                first.check_cache(request, request.num_computed)
                if left := len(prompt) - request.num_computed:
                    first.step((request, min(5, left)))
                first.finish(request)
                did["given up"] += 1
                continue
            transfer = f"transfer-{seed:08d}-{number:08d}"
            request = first.save(prompt, prefill_of(transfer) if kind < 0.4 else None, step=step)
            first.check_cache(request, len(prompt))
            first.finish(request)
            did["tokens loaded"] += request.loaded
            if kind < 0.4:
                decode = Request(f"decode {number}", [*prompt, 7], decode_of(transfer, prefill_tokens=len(prompt)))
                assert second.admit(decode) == set()
                second.check_cache(decode, decode.num_computed)
                second.finish(decode)
                did["tokens handed over"] += decode.num_computed
        node.wait_at_rest()
    return did


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_nobody_loads_a_wrong_byte(place: Path, seed: int) -> None:
    did = storm(place, seed, 200, has_disk=bool(seed % 2))
    assert min(did["tokens loaded"], did["tokens handed over"]) > 1000


def test_a_head_in_the_place_of_another_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with several shards takes the first for the last."""
    right = worker._heads  # noqa: SLF001

    def swapped(tensor: torch.Tensor, part: int, count: int, layout: KvLayout) -> torch.Tensor:
        return right(tensor, count - 1 - part, count, layout)

    monkeypatch.setattr(worker, "_heads", swapped)
    with pytest.raises(AssertionError, match=r"token \d+ of layer \d, head \d"):
        storm(place, 1, 200, has_disk=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pdx-storm-") as folder:
        seed, requests = map(int, sys.argv[1:])
        print(dict(storm(Path(folder), seed, requests, has_disk=bool(seed % 2))))  # noqa: T201
