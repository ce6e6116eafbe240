"""Which of the engine's blocks may hold KV that was promised and never loaded.

An engine may count tokens as computed that another connector has promised to load in the same step, as vLLM does for
MultiConnector, and report only after the step which blocks were not loaded. Until then nothing that depends on them is
saved. What depends on failed blocks is never saved, neither of that request nor of others that find these blocks in the
engine's own cache, where vLLM leaves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from pdx.engine.request import TrackedRequest
from pdx.engine.step import StepRequest

NEVER = 1 << 62  # no step's outcome decides


class Trust:
    """The doubt about each block and each request: the number of the step whose outcome decides, `NEVER`, or 0.

    A block that is overwritten gets its writer's doubt. Costs nothing if no other connector makes promises. One thread:
    the scheduler's.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._doubts: dict[int, int] = {}  # of blocks
        self._doubted: dict[str, int] = {}  # of requests
        self._awaited = self._heard = 0  # steps

    @property
    def is_waiting(self) -> bool:
        return self._awaited > self._heard

    def scheduled(self, tracked: TrackedRequest, step: StepRequest, number: int) -> int:
        """Note that the request is in step `number`. Returns the doubt about its pages."""
        if step.blocks and step.has_all_blocks:
            computed = -(-step.computed // self._block_tokens)
            vouched = min(tracked.vouched // self._block_tokens, computed) if step.computed else 0
            if step.computed // self._block_tokens <= vouched:
                vouched = computed
            tracked.vouched = NEVER  # it computes what follows
            promised, new = tracked.block_ids[vouched:computed], tracked.block_ids[computed:]
            doubt = self._worst(tracked.block_ids[:vouched])
            if promised:
                self._awaited = number
                doubt = max(doubt, number)
                self._doubts.update(dict.fromkeys(promised, doubt))
            self._set(tracked, doubt)
        else:
            new = list(step.blocks[0]) if step.blocks else []
        doubt = self._doubted.get(tracked.request.request_id, 0)
        if doubt:
            self._doubts.update(dict.fromkeys(new, doubt))
        else:
            self.written(new)
        return doubt

    def written(self, blocks: Iterable[int]) -> None:
        """A trusted writer overwrites these blocks."""
        if self._doubts:
            for block in blocks:
                self._doubts.pop(block, None)

    def failed(self, blocks: Set[int], requests: Iterable[TrackedRequest]) -> tuple[list[TrackedRequest], set[int]]:
        """These blocks were not loaded. Returns what is spoiled: the requests computed from them, and all such
        blocks."""
        bad, spoiled, left = set(blocks), list[TrackedRequest](), list(requests)
        while True:
            looked = [(each, _first(each.block_ids, bad)) for each in left]
            left = [each for each, at in looked if at is None]
            if len(left) == len(looked):
                return spoiled, bad
            for tracked, at in looked:
                if at is not None:
                    bad.update(tracked.block_ids[at:])
                    self._doubts.update(dict.fromkeys(tracked.block_ids[at:], NEVER))
                    self._set(tracked, NEVER)
                    spoiled.append(tracked)

    def heard(self, number: int) -> list[str]:
        """All failures in steps up to this one are known. Returns the requests that are trusted now."""
        self._heard = max(self._heard, number)
        if not self._doubts:
            return []
        self._doubts = {block: doubt for block, doubt in self._doubts.items() if doubt > number}
        trusted = [name for name, doubt in self._doubted.items() if doubt <= number]
        for name in trusted:
            del self._doubted[name]
        return trusted

    def forget(self, tracked: TrackedRequest) -> None:
        """The request is over, or has lost its blocks."""
        self._doubted.pop(tracked.request.request_id, None)

    def _worst(self, blocks: Sequence[int]) -> int:
        return max((self._doubts.get(block, 0) for block in blocks), default=0) if self._doubts else 0

    def _set(self, tracked: TrackedRequest, doubt: int) -> None:
        if doubt:
            self._doubted[tracked.request.request_id] = doubt
        else:
            self.forget(tracked)


def _first(block_ids: Sequence[int], bad: Set[int]) -> int | None:
    return next((at for at, block in enumerate(block_ids) if block in bad), None)
