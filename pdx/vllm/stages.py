"""How a model's layers are cut into parts for its chunks, and which pipeline stage of an engine has each part.

A part of a cache group's layers is a cache group of its own (ADR 70). Only a worker knows which layers of which groups
it has: vLLM's scheduler knows only the first stage's.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pdx.errors import LayoutError
from pdx.vllm.releases import moves_groups

_COUNTS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4})*")


class Cut(NamedTuple):
    """Layers and stage of each part. A draft's layers, numbered behind the model's own, count as the last part's."""

    counts: tuple[int, ...] = (0,)
    stages: tuple[int, ...] = (0,)

    @property
    def text(self) -> str:
        """The cut as the setting `stages` spells it; empty: layers are not cut."""
        return ",".join(map(str, self.counts)) if len(self.counts) > 1 else ""

    def part_of(self, layer: int) -> int:
        return bisect.bisect(list(itertools.accumulate(self.counts[:-1])), layer)

    def number_of(self, table: int, layer: int) -> int:
        """The number of the cache group (`Place.number`) that has this layer of one of vLLM's groups."""
        return table * len(self.counts) + self.part_of(layer)

    def split(self, layers: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """These layers by part, in ascending order; parts without any are left out."""
        return {part: tuple(of_part) for part, of_part in itertools.groupby(sorted(layers), self.part_of)}

    def check_stage(self, stage: int, layers: Sequence[int]) -> None:
        """Raise LayoutError if a worker of this stage has layers whose numbers belong to another stage."""
        for layer in layers:
            if (expected := self.stages[self.part_of(layer)]) != stage:
                raise LayoutError(
                    f"a layer with number {layer} is in pipeline stage {stage}, and not in {expected}: PDX cannot tell "
                    "the layers of this model, or of its draft, apart; set --pipeline-parallel-size 1"
                )


WHOLE = Cut()


def cut_of(vllm_config: Any, setting: int | str) -> Cut:
    """The cut that the setting `stages` asks for; by default that of the engine's own pipeline. Raises LayoutError if a
    part would be in two stages, or if the numbers do not fit the model."""
    size = int(vllm_config.parallel_config.pipeline_parallel_size)
    if size == 1 and not setting:
        return WHOLE
    if not moves_groups():
        what = f"stages {setting!r}" if size == 1 else f"pipeline_parallel_size {size}"
        raise LayoutError(f"{what}: PDX cuts layers with vLLM 0.32 or newer; leave it out, or install one of these")
    from vllm.distributed.utils import get_pp_indices

    total = int(vllm_config.model_config.get_total_num_hidden_layers())
    starts = [get_pp_indices(total, stage, size)[0] for stage in range(size)]
    own = tuple(end - start for start, end in itertools.pairwise([*starts, total]))
    counts = _counts(setting, total) if setting else own
    firsts = [0, *itertools.accumulate(counts[:-1])]
    if not set(starts) <= set(firsts):
        told, has = ",".join(map(str, counts)), ",".join(map(str, own))
        raise LayoutError(
            f"stages {told}, where the {size} stages of this engine's pipeline have {has} layers: each has to be of "
            f"whole parts; set `stages` to {has} or a finer cut, the same for all engines"
        )
    return Cut(counts, tuple(bisect.bisect(starts, first) - 1 for first in firsts))


def _counts(setting: int | str, total: int) -> tuple[int, ...]:
    """How many of the model's `total` layers each part has. Raises LayoutError if the setting does not fit."""
    text = str(setting)
    counts = tuple(map(int, text.split(","))) if _COUNTS.fullmatch(text) else ()
    if len(counts) == 1 and 1 <= counts[0] <= total:
        return even(total, counts[0])
    if len(counts) > 1 and all(counts) and sum(counts) == total:
        return counts
    raise LayoutError(
        f"stages {text[:80]!r}, where the model has {total} layers: set `stages` to a number of parts, or to how many "
        f"layers each has, {total} together, as in {','.join(map(str, even(total, min(2, total))))}"
    )


def even(total: int, parts: int) -> tuple[int, ...]:
    """The counts by which vLLM distributes layers over pipeline stages by default."""
    counts = [total // parts] * parts
    for at in range(2, total % parts + 2):
        counts[-at] += 1
    return tuple(counts)
