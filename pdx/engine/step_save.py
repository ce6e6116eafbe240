"""What one step saves: which layers are gathered, and what the node and the trace are told of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from pdx.client.connection import Connection
from pdx.engine.copier import PageCopier
from pdx.engine.plan import PagesPlan, SavePlan
from pdx.engine.tally import Tally
from pdx.memory.arena import Arena
from pdx.memory.layout import CacheGroups
from pdx.memory.share import Share
from pdx.memory.slot import Slot
from pdx.telemetry.timeline import Event
from pdx.telemetry.trace import Lane, Tracer
from pdx.wire.messages import Fill, Mark

GROUP_BYTES = 1 << 20  # of layers, before the node is told: it pushes no less at once to a peer, either
_Layers = tuple[int, range]  # some layers of a cache group
FLUSH_SPANS = 4096  # fewer are written only when a transfer's prefill ends


class StepSave:
    """The saves of one step. The engine's thread makes it after `PageCopier.begin`, which took `pages`, calls `gather`
    and `finish`, and drops it.

    Reports are queued behind the copies or the computing that they report: `_computed` runs after compute, `_copied`
    and `_ended` after copies, each on a thread of the copier's, in order. Only they touch `_since_ns` and `_is_over`.
    """

    def __init__(
        self,
        saves: Sequence[SavePlan],
        pages: Sequence[PagesPlan],
        groups: CacheGroups,
        share: Share,
        *,
        copier: PageCopier,
        connection: Connection,
        arena: Arena,
        tally: Tally | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.pages = pages
        self.copier = copier
        self.connection = connection
        self._groups = groups
        self._share = share
        self._arena = arena
        self._tally = tally or Tally()
        self._gather_ns = 0  # that the engine's thread spent in hooks
        self._ending = [save for save in saves if save.ends_transfer and save.transfer is not None]
        # For each cache group, the slots that are whole when all layers are gathered, and of these …
        self._whole: list[list[Slot]] = [[] for _ in groups]
        self._by_layer: list[list[Slot]] = [[] for _ in groups]  # … those that are reported layer by layer
        self._page_counts = [0] * len(groups)  # of one layer
        for each in pages:
            self._page_counts[each.group] += len(each.block_ids)
            if each.completes:
                self._whole[each.group] += each.slots_of(share)
                if each.by_layer:
                    self._by_layer[each.group] += each.slots_of(share)
        self._done: list[set[int]] = [set() for _ in groups]
        # If the step ends a transfer: for each gathered layer its group, and whether its copy has ended.
        self._copies: list[tuple[int, Callable[[], bool]]] = []
        self._untold: list[list[int]] = [[] for _ in groups]  # gathered layers to be reported to the node
        self._num_computed = 0  # layers whose hook was called
        self._num_layers = sum(layout.num_layers for layout in groups)
        self._traced = _layer_bytes(saves, pages, groups) if tracer is not None and tracer.is_on else {}
        self._tracer = tracer if self._traced else None
        self._since_ns = 0
        self._is_over = False
        if self._tracer is not None:
            copier.after_compute(self._begun)

    # ---- the engine's thread ------------------------------------------------------------------

    def gather(self, number: int, group: int, layer: int) -> None:
        """The pages of this layer of a cache group, the model's `number`th with a KV cache, are final: gather them."""
        computed = range(self._num_computed, number + 1)
        if self._tracer is not None and computed and self.copier.after_compute(partial(self._computed, computed)):
            self._num_computed = number + 1
        start_ns = time.monotonic_ns()
        if not self._page_counts[group] or layer in self._done[group]:
            return
        if not self.copier.gather(group, range(layer, layer + 1)):
            return
        self._gather_ns += time.monotonic_ns() - start_ns
        self._done[group].add(layer)
        if self._ending:
            self._copies.append((group, self.copier.copied()))
        untold = self._untold[group]
        if self._by_layer[group]:
            untold.append(layer)
        fills: list[range] = []
        page_bytes = self._groups[group].page_bytes * self._share.count
        if len(untold) * self._page_counts[group] * page_bytes >= GROUP_BYTES:
            fills, self._untold[group] = _runs(sorted(untold)), []
        if fills or self._tracer is not None:
            done = [(group, range(layer, layer + 1))]
            self.copier.after_copies(partial(self._copied, done, start_ns, [(group, layers) for layers in fills]))

    def finish(self) -> bool:
        """The forward pass is over. Returns whether everything is gathered and sealed, or will be."""
        copier = self.copier
        missing = [
            (group, layers)
            for group, count in enumerate(self._page_counts)
            if count
            for layers in _runs([at for at in range(self._groups[group].num_layers) if at not in self._done[group]])
        ]
        is_computed = True
        if self._ending or self._tracer is not None:
            layers = range(min(self._num_computed, self._num_layers - 1), self._num_layers)
            is_computed = copier.after_compute(partial(self._computed, layers, is_last=True))
        start_ns = time.monotonic_ns()
        is_whole = is_computed and all(copier.gather(group, layers) for group, layers in missing)
        if is_whole:
            copier.after_copies(partial(self._ended, missing, start_ns))
        copier.end()
        return is_whole

    # ---- what is told, in its time ------------------------------------------------------------

    def _begun(self) -> None:
        self._since_ns = time.monotonic_ns()

    def _computed(self, layers: range, *, is_last: bool = False) -> None:
        """These layers are computed; `is_last`: and with them the whole step."""
        start_ns, self._since_ns = self._since_ns, time.monotonic_ns()
        self._span(Lane.PREFILL, layers, start_ns, self._since_ns)
        if is_last:
            self._mark(Event.PREFILL_END, Counter(group for group, is_over in self._copies if is_over()))
        if self._is_over and self._tracer is not None:  # the thread that saw the copies end was faster
            self._tracer.flush()

    def _copied(self, gathered: Iterable[_Layers], start_ns: int, fills: Iterable[_Layers]) -> None:
        """These layers are gathered; report `fills` to the node."""
        if self._tracer is not None:
            end_ns = time.monotonic_ns()
            if not self.copier.is_asynchronous:
                self._since_ns = end_ns  # the engine stood still meanwhile
            for group, layers in gathered:
                self._span(Lane.GATHER, layers, start_ns, end_ns, group)
        for group, layers in fills:
            self._fill(self._current(self._by_layer[group]), layers)

    def _ended(self, gathered: Iterable[_Layers], start_ns: int) -> None:
        """The last layers of the step are gathered: report all whole chunks to the node, pushed ones included."""
        self._copied(gathered, start_ns, ())
        self._is_over = True
        if self.pages:
            of_layers = zip(self._groups, self._page_counts, strict=True)
            nbytes = sum(layout.num_layers * layout.page_bytes * count for layout, count in of_layers)
            took_ns = self._gather_ns + time.monotonic_ns() - start_ns
            self._tally.moved("save", nbytes * self._share.count, took_ns / 1e9)
        for layout, whole in zip(self._groups, self._whole, strict=True):
            slots = self._current(whole)
            for _ in range(len(whole) - len(slots)):
                self.connection.count("save_lost")
            self._fill(slots, range(layout.num_layers), seal=True)
        counts = {group: layout.num_layers for group, layout in enumerate(self._groups)} if self.pages else {}
        self._mark(Event.SEALED, counts)
        if self._tracer is not None:
            self._tracer.flush(1 if self._ending else FLUSH_SPANS)

    def _fill(self, slots: list[Slot], layers: range, *, seal: bool = False) -> None:
        if slots:
            self.connection.tell(Fill(slots, first_layer=layers.start, layers=len(layers), seal=seal))

    def _current(self, slots: list[Slot]) -> list[Slot]:
        if not self.copier.is_asynchronous:
            return slots
        return [slot for slot in slots if self._arena.is_current(slot)]

    def _mark(self, event: Event, num_layers: Mapping[int, int]) -> None:
        """For each transfer whose prefill ends in this step, report the bytes of the layers gathered by now."""
        for save in self._ending:
            assert save.transfer is not None
            moved = sum(
                len(each.block_ids) * num_layers.get(each.group, 0) * self._groups[each.group].page_bytes
                for each in save.pages
            )
            nbytes = (sum(save.bytes_before.values()) + moved) * self._share.count
            tokens = save.num_tokens
            self.connection.tell(Mark(save.transfer, event, time.monotonic_ns(), nbytes=nbytes, tokens=tokens))

    def _span(self, lane: Lane, layers: range, start_ns: int, end_ns: int, group: int = 0) -> None:
        for transfer, nbytes in self._traced.items():
            moved = nbytes[group] * len(layers) * self._share.count if lane is Lane.GATHER else 0
            if self._tracer is not None and (moved or lane is Lane.PREFILL):
                self._tracer.span(lane, transfer, layers.start, len(layers), start_ns, end_ns, moved)


def _layer_bytes(saves: Sequence[SavePlan], taken: Sequence[PagesPlan], groups: CacheGroups) -> dict[str, list[int]]:
    """Bytes gathered of one layer of each cache group, for each transfer whose prompt is computed in this step."""
    kept = {id(pages) for pages in taken}
    nbytes: dict[str, list[int]] = {}
    for save in saves:
        if save.transfer is not None:
            of_group = nbytes.setdefault(save.transfer, [0] * len(groups))
            for pages in save.pages:
                if id(pages) in kept:
                    of_group[pages.group] += len(pages.block_ids) * groups[pages.group].page_bytes
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
