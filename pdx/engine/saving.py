"""What one step saves: which layers are gathered, and what the node is told of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pdx.client.connection import Connection
from pdx.engine.mover import Mover
from pdx.engine.plan import PagesPlan, SavePlan
from pdx.engine.step_trace import StepTrace
from pdx.memory.arena import Arena
from pdx.memory.layout import KvLayout
from pdx.memory.slot import Slot
from pdx.telemetry.timeline import Event
from pdx.wire.messages import Fill, Mark


class Saving:
    """The engine's thread makes it after `Mover.begin`, which took `pages`, and drops it after `finish`.

    What the mover calls when copies have ended may run on another thread, and only reads.
    """

    def __init__(
        self,
        saves: Sequence[SavePlan],
        pages: Sequence[PagesPlan],
        layout: KvLayout,
        shard: int,
        *,
        mover: Mover,
        connection: Connection,
        arena: Arena,
        count: Callable[[str], None],
        trace: StepTrace | None,
    ) -> None:
        self.pages = pages
        self._layout = layout
        self.mover = mover
        self.connection = connection
        self._arena = arena
        self._count = count
        self._trace = trace
        self._ending = [save for save in saves if save.ends_transfer and save.transfer is not None]
        self._whole = [each.slots[shard] for each in pages if each.completes]  # when all layers are gathered
        self._pushed = [each.slots[shard] for each in pages if each.completes and each.is_pushed]  # layer by layer
        self._layer_bytes = sum(len(each.block_ids) for each in pages) * layout.page_bytes
        self._done: set[int] = set()
        self._missing: list[range] = []  # layers that no hook was called for
        self._untold = range(0)  # gathered layers that the node is to be told of

    def gather(self, layer: int) -> None:
        """The pages of this layer are final."""
        if self._trace is not None:
            self._trace.computed(layer)
        if not self.pages or layer in self._done or not self.mover.gather(range(layer, layer + 1)):
            return
        if self._trace is not None:
            self._trace.gathered(range(layer, layer + 1))
        self._done.add(layer)
        if layer != self._untold.stop:
            self._tell()
            self._untold = range(layer, layer)
        self._untold = range(self._untold.start, layer + 1)
        if len(self._untold) * self._layer_bytes >= self.mover.group_bytes:
            self._tell()

    def finish(self) -> bool:
        """The forward pass is over; whether everything is gathered, or will be, and sealed."""
        self._tell()
        if self.pages:
            self._missing = _runs([layer for layer in range(self._layout.num_layers) if layer not in self._done])
        if self._trace is not None:
            self._trace.end()
        return self.mover.finish(
            self._missing,
            computed=self._tell_computed if self._ending else None,
            ended=self._tell_ended,
        )

    def give_up(self) -> None:
        """The forward pass failed: gather no more, seal nothing."""
        self.mover.finish([], computed=None, ended=_nothing)

    def _tell(self) -> None:
        layers, self._untold = self._untold, range(self._untold.stop, self._untold.stop)
        if layers and self._pushed:
            self.mover.then(lambda: self._fill(self._current(self._pushed), layers))

    def _fill(self, slots: list[Slot], layers: range, *, seal: bool = False) -> None:
        if slots:
            self.connection.tell(Fill(slots, first_layer=layers.start, layers=len(layers), seal=seal))

    def _current(self, slots: list[Slot]) -> list[Slot]:
        if not self.mover.is_asynchronous:
            return slots
        return [slot for slot in slots if self._arena.is_current(slot)]

    def _tell_computed(self, num_layers: int) -> None:
        self._mark(Event.PREFILL_END, num_layers)

    def _tell_ended(self) -> None:
        if self._trace is not None:
            self._trace.ended(self._missing)
        slots = self._current(self._whole)
        for _ in range(len(self._whole) - len(slots)):
            self._count("save_lost")
        self._fill(slots, range(self._layout.num_layers), seal=True)
        self._mark(Event.SEALED, self._layout.num_layers if self.pages else 0)
        if self._trace is not None:
            self._trace.flush(is_due=bool(self._ending))

    def _mark(self, event: Event, num_layers: int) -> None:
        """Tell the bytes of each transfer that were gathered by now, where its prefill ends in this step."""
        for save in self._ending:
            assert save.transfer is not None
            pages = sum(len(plan.block_ids) for plan in save.pages)
            moved = save.blocks_before * self._layout.num_layers + pages * num_layers
            nbytes, tokens = moved * self._layout.page_bytes, save.num_tokens
            self.connection.tell(Mark(save.transfer, event, time.monotonic_ns(), nbytes=nbytes, tokens=tokens))


def _nothing() -> None:
    pass


def _runs(numbers: Sequence[int]) -> list[range]:
    """Ascending numbers as ranges without gaps."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
