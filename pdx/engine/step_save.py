"""What one step saves: which layers are gathered, and what the node and the trace are told of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pdx.client.connection import Connection
from pdx.engine.copier import PageCopier
from pdx.engine.plan import PagesPlan, SavePlan
from pdx.memory.arena import Arena
from pdx.memory.layout import KvLayout
from pdx.memory.slot import Slot
from pdx.telemetry.timeline import Event
from pdx.telemetry.trace import Lane, Tracer
from pdx.wire.messages import Fill, Mark

GROUP_BYTES = 1 << 20  # of layers, before the node is told: it sends no less at once to a peer, either
FLUSH_SPANS = 4096  # written at the end of a step, if no transfer's prefill ends before


class StepSave:
    """The engine's thread makes it after `PageCopier.begin`, which took `pages`, calls `gather` and `finish`, and drops
    it.

    What is to be told goes behind the copies or the computing that it tells of: `_computed` runs after compute,
    `_copied` and `_ended` after copies, each on a thread of the copier's, in order. They alone touch the spans'
    `_since_ns` and `_is_over`.
    """

    def __init__(
        self,
        saves: Sequence[SavePlan],
        pages: Sequence[PagesPlan],
        layout: KvLayout,
        shard: int,
        *,
        copier: PageCopier,
        connection: Connection,
        arena: Arena,
        tracer: Tracer | None = None,
    ) -> None:
        self.pages = pages
        self.copier = copier
        self.connection = connection
        self._layout = layout
        self._arena = arena
        self._ending = [save for save in saves if save.ends_transfer and save.transfer is not None]
        self._whole = [each.slot_of(shard) for each in pages if each.completes]  # when all layers are gathered
        self._by_layer = [each.slot_of(shard) for each in pages if each.completes and each.by_layer]
        self._layer_bytes = sum(len(each.block_ids) for each in pages) * layout.page_bytes
        self._done: set[int] = set()
        self._copies: list[Callable[[], bool]] = []  # of a step that ends a transfer: whether each layer is gathered
        self._untold: list[int] = []  # gathered layers that the node is to be told of
        self._num_computed = 0  # layers whose hook was called
        self._traced = _layer_bytes(saves, pages, layout) if tracer is not None and tracer.is_on else {}
        self._tracer = tracer if self._traced else None
        self._since_ns = 0
        self._is_over = False
        if self._tracer is not None:
            copier.after_compute(self._begun)

    # ---- the engine's thread ------------------------------------------------------------------

    def gather(self, layer: int) -> None:
        """The pages of this layer are final."""
        computed = range(self._num_computed, layer + 1)
        if self._tracer is not None and computed and self.copier.after_compute(partial(self._computed, computed)):
            self._num_computed = layer + 1
        start_ns = time.monotonic_ns()
        if not self.pages or layer in self._done or not self.copier.gather(range(layer, layer + 1)):
            return
        self._done.add(layer)
        if self._ending:
            self._copies.append(self.copier.copied())
        if self._by_layer:
            self._untold.append(layer)
        fills: list[range] = []
        if len(self._untold) * self._layer_bytes >= GROUP_BYTES:
            fills, self._untold = _runs(sorted(self._untold)), []
        if fills or self._tracer is not None:
            self.copier.after_copies(partial(self._copied, [range(layer, layer + 1)], start_ns, fills))

    def finish(self) -> bool:
        """The forward pass is over; whether everything is gathered, or will be, and sealed."""
        num_layers, copier = self._layout.num_layers, self.copier
        missing = _runs([each for each in range(num_layers) if each not in self._done]) if self.pages else []
        is_computed = True
        if self._ending or self._tracer is not None:
            layers = range(min(self._num_computed, num_layers - 1), num_layers)
            is_computed = copier.after_compute(partial(self._computed, layers, is_last=True))
        start_ns = time.monotonic_ns()
        is_whole = is_computed and all(copier.gather(layers) for layers in missing)
        if is_whole:
            copier.after_copies(partial(self._ended, missing, start_ns))
        copier.end()
        return is_whole

    # ---- what is told, in its time ------------------------------------------------------------

    def _begun(self) -> None:
        self._since_ns = time.monotonic_ns()

    def _computed(self, layers: range, *, is_last: bool = False) -> None:
        """These layers are computed; `is_last`: and with them the step."""
        start_ns, self._since_ns = self._since_ns, time.monotonic_ns()
        self._span(Lane.PREFILL, layers, start_ns, self._since_ns)
        if is_last:
            self._mark(Event.PREFILL_END, sum(is_over() for is_over in self._copies))
        if self._is_over and self._tracer is not None:  # the thread that saw the copies end was faster
            self._tracer.flush()

    def _copied(self, gathered: Iterable[range], start_ns: int, fills: Iterable[range]) -> None:
        """These layers are gathered; of `fills` the node hears."""
        if self._tracer is not None:
            end_ns = time.monotonic_ns()
            if not self.copier.is_asynchronous:
                self._since_ns = end_ns  # the engine stood still meanwhile
            for layers in gathered:
                self._span(Lane.GATHER, layers, start_ns, end_ns)
        for layers in fills:
            self._fill(self._current(self._by_layer), layers)

    def _ended(self, gathered: Iterable[range], start_ns: int) -> None:
        """The last layers of the step are gathered: the node hears of all that are whole, pushed ones included."""
        self._copied(gathered, start_ns, ())
        self._is_over = True
        slots = self._current(self._whole)
        for _ in range(len(self._whole) - len(slots)):
            self.connection.count("save_lost")
        self._fill(slots, range(self._layout.num_layers), seal=True)
        self._mark(Event.SEALED, self._layout.num_layers if self.pages else 0)
        if self._tracer is not None:
            self._tracer.flush(1 if self._ending else FLUSH_SPANS)

    def _fill(self, slots: list[Slot], layers: range, *, seal: bool = False) -> None:
        if slots:
            self.connection.tell(Fill(slots, first_layer=layers.start, layers=len(layers), seal=seal))

    def _current(self, slots: list[Slot]) -> list[Slot]:
        if not self.copier.is_asynchronous:
            return slots
        return [slot for slot in slots if self._arena.is_current(slot)]

    def _mark(self, event: Event, num_layers: int) -> None:
        """Tell the bytes of each transfer that were gathered by now, where its prefill ends in this step."""
        for save in self._ending:
            assert save.transfer is not None
            pages = sum(len(plan.block_ids) for plan in save.pages)
            moved = save.blocks_before * self._layout.num_layers + pages * num_layers
            nbytes, tokens = moved * self._layout.page_bytes, save.num_tokens
            self.connection.tell(Mark(save.transfer, event, time.monotonic_ns(), nbytes=nbytes, tokens=tokens))

    def _span(self, lane: Lane, layers: range, start_ns: int, end_ns: int) -> None:
        for transfer, nbytes in self._traced.items():
            moved = nbytes * len(layers) if lane is Lane.GATHER else 0
            if self._tracer is not None and (moved or lane is Lane.PREFILL):
                self._tracer.span(lane, transfer, layers.start, len(layers), start_ns, end_ns, moved)


def _layer_bytes(saves: Sequence[SavePlan], taken: Sequence[PagesPlan], layout: KvLayout) -> dict[str, int]:
    """What is gathered of one layer, for each transfer whose prompt is computed in this step."""
    kept = {id(pages) for pages in taken}
    nbytes: dict[str, int] = {}
    for save in saves:
        if save.transfer is not None:
            blocks = sum(len(pages.block_ids) for pages in save.pages if id(pages) in kept)
            nbytes[save.transfer] = nbytes.get(save.transfer, 0) + blocks * layout.page_bytes
    return nbytes


def _runs(numbers: Sequence[int]) -> list[range]:
    """Ascending numbers as ranges without gaps."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
