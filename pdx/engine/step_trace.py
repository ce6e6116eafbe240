"""The spans of one step: of each transfer whose prompt is computed in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from pdx.engine.mover import Mover
from pdx.engine.plan import PagesPlan, SavePlan
from pdx.memory.layout import KvLayout
from pdx.telemetry.trace import Lane, Tracer

FLUSH_SPANS = 4096  # written at the end of a step, if no transfer's prefill ends before


class StepTrace:
    """The engine's thread makes it and calls its methods; what the mover calls back may run on its threads.

    `_since_ns` belongs to whoever calls `_computed`, one after the other; `_gather_ns` to the engine's thread.
    """

    def __init__(self, tracer: Tracer, mover: Mover, num_layers: int, nbytes: dict[str, int]) -> None:
        """`nbytes`: what is gathered of one layer, by transfer."""
        self._tracer = tracer
        self._mover = mover
        self._num_layers = num_layers
        self._nbytes = nbytes
        self._num_computed = 0  # layers whose hook was called
        self._gather_ns = 0  # when the mover was asked to gather
        self._since_ns = 0
        self._is_over = False
        mover.when_computed(self._begun)

    @classmethod
    def of(
        cls,
        tracer: Tracer | None,
        saves: Sequence[SavePlan],
        taken: Sequence[PagesPlan],
        *,
        mover: Mover,
        layout: KvLayout,
    ) -> StepTrace | None:
        """The trace of a step in which the mover gathers `taken`; None: nobody asks for one."""
        if tracer is None or not tracer.is_on:
            return None
        kept = {id(pages) for pages in taken}
        nbytes: dict[str, int] = {}
        for save in saves:
            if save.transfer is not None:
                blocks = sum(len(pages.block_ids) for pages in save.pages if id(pages) in kept)
                nbytes[save.transfer] = nbytes.get(save.transfer, 0) + blocks * layout.page_bytes
        return cls(tracer, mover, layout.num_layers, nbytes) if nbytes else None

    def computed(self, layer: int) -> None:
        """This layer's hook is called: it is computed, or queued."""
        layers = range(self._num_computed, layer + 1)
        if layers and self._mover.when_computed(partial(self._computed, layers)):
            self._num_computed = layer + 1
        self._gather_ns = time.monotonic_ns()

    def gathered(self, layers: range) -> None:
        """The mover was asked to gather them after the last call of `computed`."""
        self._mover.then(partial(self._copied, layers, self._gather_ns))

    def end(self) -> None:
        """The forward pass is over, and the mover is about to gather what is missing."""
        layers = range(min(self._num_computed, self._num_layers - 1), self._num_layers)
        self._mover.when_computed(partial(self._computed, layers))
        self._gather_ns = time.monotonic_ns()

    def ended(self, missing: Sequence[range]) -> None:
        """Everything is gathered, these layers after `end`."""
        for layers in missing:
            self._copied(layers, self._gather_ns)
        self._is_over = True

    def flush(self, *, is_due: bool) -> None:
        """After `ended`: write the spans if it `is_due`, or if they are many."""
        self._tracer.flush(1 if is_due else FLUSH_SPANS)

    # ---- what the mover calls -----------------------------------------------------------------

    def _begun(self) -> None:
        self._since_ns = time.monotonic_ns()

    def _computed(self, layers: range) -> None:
        start_ns, self._since_ns = self._since_ns, time.monotonic_ns()
        for transfer in self._nbytes:
            self._tracer.span(Lane.PREFILL, transfer, layers.start, len(layers), start_ns, self._since_ns, 0)
        if self._is_over:  # the thread that saw the copies end was faster
            self._tracer.flush()

    def _copied(self, layers: range, start_ns: int) -> None:
        end_ns = time.monotonic_ns()
        if not self._mover.is_asynchronous:
            self._since_ns = end_ns  # the engine stood still meanwhile
        for transfer, nbytes in self._nbytes.items():
            if nbytes:
                moved = nbytes * len(layers)
                self._tracer.span(Lane.GATHER, transfer, layers.start, len(layers), start_ns, end_ns, moved)
