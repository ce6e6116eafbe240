"""Pages in a GPU's memory: kernels on streams of their own copy them, threads wait for those. See docs/adr/0020."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from pdx.engine.mover import Action, Mover, Scatter
from pdx.engine.plan import LoadPlan, PagesPlan
from pdx.engine.streams import Event, Stream, Streams
from pdx.engine.waiter import Waiter
from pdx.engine.window import ArenaWindow
from pdx.errors import GpuUnavailable, LayoutError, PdxError
from pdx.kernels.paged import Batch, PageMap, Place, Run, gather, scatter, warm_up
from pdx.memory.arena import Arena

LAUNCH_BYTES = 64 << 20  # programs that run are not preempted: the engine's kernels start between two launches
log = logging.getLogger("pdx")


@dataclass
class _Step:
    """What one forward pass gathers. It holds its window until its last copy has ended."""

    window: ArenaWindow
    batch: Batch
    is_refused: bool = False  # CUDA did not take a launch: nothing of the step is whole
    gathers: list[tuple[Event, int]] = field(default_factory=list)  # when timed: the end of each, and its layers


class StreamMover(Mover):
    """`pages` are the engine's. One stream gathers, one loads; `pdx-copied` calls actions, `pdx-computed` the hour.

    The engine's thread owns `_step` and `_fence`; `_windows` guards which window is open, and whether copies failed.
    """

    is_asynchronous = True
    group_bytes = 1 << 20

    def __init__(self, pages: PageMap, shard: int, streams: Streams, count: Callable[[str], None]) -> None:
        self._pages = pages
        self._shard = shard
        self._streams = streams
        self._count = count
        self._gathering, self._loading = streams.new_stream(), streams.new_stream()
        self._fence = streams.event()
        self._spare: deque[Event] = deque()  # events that have passed and that nobody waits for
        self._windows = threading.Lock()
        self._window: ArenaWindow | None = None
        self._has_failed = False  # CUDA does nothing any more for this process
        self._step: _Step | None = None
        self._is_timed = False
        self._copied = Waiter("pdx-copied", streams.bind_thread, self._failed)
        self._computed = Waiter("pdx-computed", streams.bind_thread, self._failed)

    @classmethod
    def start(cls, pages: PageMap, shard: int, streams: Streams, count: Callable[[str], None]) -> StreamMover:
        """Compile the kernels, so that no step has to, and wait until the tables are on the GPU.

        Kernels that cannot be compiled or loaded here are logged and counted; the mover then moves nothing.

        :raises GpuUnavailable: the driver cannot be called, or cuda-bindings is missing.
        """
        why = ""
        try:
            streams.gpu()
            warm_up(pages)
            ready = streams.event()
            ready.record(streams.compute())
            ready.synchronize()
        except GpuUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  Triton's compiler, its launcher's C compiler and CUDA, each its own
            why = f"{type(error).__name__}: {error}"
        made = cls(pages, shard, streams, count)
        if why:
            made._has_failed = True
            log.error(
                "the copy kernels cannot be made ready, nothing is saved or loaded: %s (Triton needs a C compiler and "
                "Python's headers at its first use; see `pdx doctor`)",
                why,
            )
            count("kernels_unavailable")
        return made

    # ---- the link's thread ------------------------------------------------------------------

    def use(self, arena: Arena | None) -> None:
        """See `Mover.use`."""
        window = None
        if arena is not None and not self._has_failed:
            try:
                self._streams.bind_thread()
                window = ArenaWindow.open(arena, self._streams.gpu(), self._refused)
            except (PdxError, RuntimeError) as error:  # torch's own errors, too
                log.error("cannot reach the node's memory from the GPU, nothing is saved or loaded: %s", str(error))  # noqa: TRY400
                self._count("arena_unreachable")
        with self._windows:
            window, self._window = self._window, window
        if window is not None:
            window.close()

    def _refused(self, reason: str) -> None:
        log.error("nothing is saved or loaded: %s", reason)
        self._count("page_lock_refused")

    def _failed(self, error: Exception) -> None:
        """What was under way stays reserved and mapped until this process ends: nobody knows what writes there."""
        with self._windows:
            was_known, self._has_failed = self._has_failed, True
        if not was_known:
            # As text: an exception kept by a logger would keep frames, and with them the node's memory.
            text = f"{type(error).__name__}: {error}"
            log.error("copies on the GPU failed, nothing is saved or loaded any more: %s", text)
            self._count("copies_failed")

    # ---- saving -----------------------------------------------------------------------------

    def begin(self, arena: Arena, pages: Sequence[PagesPlan], *, timed: bool) -> list[PagesPlan]:
        """See `Mover.begin`."""
        assert self._step is None, "the step before this one is not finished"
        self._is_timed = timed
        window = self._held(arena) if pages and not self._streams.is_capturing() else None
        if window is None:
            return []
        found = [(each, run) for each in pages if (run := self._run_of(each, window)) is not None]
        try:
            if found:
                with self._streams.on(self._gathering):
                    batch = Batch.of(self._pages, [run for _, run in found])
                self._step = _Step(window, batch)
                return [each for each, _ in found]
        except RuntimeError as error:  # no room on the GPU even for the table
            log.warning("the pages of this step are not saved: %s", str(error))
        self._copied.put(None, window.release)
        return []

    def gather(self, layers: range) -> bool:
        """See `Mover.gather`."""
        step = self._step
        if step is None or step.is_refused or self._streams.is_capturing():
            return False
        try:
            self._fence.record(self._streams.compute())
            self._fence.wait(self._gathering)
            self._launch(self._gathering, gather, step.batch, layers, step.window.place)
            if self._is_timed:
                ended = self._streams.event()
                ended.record(self._gathering)
                step.gathers.append((ended, len(layers)))
        except (RuntimeError, ValueError) as error:  # no memory for it, or another device is current
            step.is_refused = True
            log.warning("the pages of this step are not saved: %s", str(error))
            self._count("launch_refused")
            return False
        return True

    def then(self, action: Action) -> None:
        """See `Mover.then`."""
        event = self._recorded(self._gathering)
        self._copied.put(event, partial(self._passed, event, action))

    def when_computed(self, action: Action) -> bool:
        """See `Mover.when_computed`."""
        if self._streams.is_capturing():
            return False
        event = self._recorded(self._streams.compute())
        self._computed.put(event, partial(self._passed, event, action))
        return True

    def finish(self, missing: Sequence[range], *, computed: Callable[[int], None] | None, ended: Action) -> bool:
        """See `Mover.finish`."""
        step, is_captured = self._step, self._streams.is_capturing()
        gathered = list(step.gathers) if step is not None else []  # before the step was computed
        if not is_captured:
            for layers in missing:
                self.gather(layers)
        is_whole = not is_captured and not (step is not None and step.is_refused)
        if is_whole and computed is not None:
            self._ask_computed(computed, gathered)
        self._step = None
        event = self._recorded(self._gathering)
        if step is not None and not is_captured:
            event.wait(self._streams.compute())
        self._copied.put(event, partial(self._finished, event, step, ended if is_whole else None))
        return is_whole

    def _ask_computed(self, computed: Callable[[int], None], gathers: list[tuple[Event, int]]) -> None:
        event = self._streams.event()
        event.record(self._streams.compute())
        self._computed.put(event, lambda: computed(sum(num_layers for end, num_layers in gathers if end.query())))

    def _finished(self, event: Event, step: _Step | None, ended: Action | None) -> None:
        self._spare.append(event)
        try:
            if ended is not None:
                ended()
        finally:
            if step is not None:
                step.window.release()

    # ---- loading ----------------------------------------------------------------------------

    def loading(self, arena: Arena) -> Scatter | None:
        """See `Mover.loading`."""
        window = self._held(arena) if not self._streams.is_capturing() else None
        if window is None:
            return None
        return partial(self._load, window, self._recorded(self._streams.compute()))

    def _load(self, window: ArenaWindow, fence: Event, load: LoadPlan) -> list[PagesPlan]:
        try:
            self._streams.bind_thread()
            wanted = load.pages_of(self._shard)
            found = [(each, run) for each in wanted if (run := self._run_of(each, window)) is not None]
            fence.wait(self._loading)
            with self._streams.on(self._loading):
                batch = Batch.of(self._pages, [run for _, run in found])
            self._launch(self._loading, scatter, batch, range(self._pages.num_layers), window.place)
            ended = self._recorded(self._loading)
            try:
                ended.synchronize()
            except Exception as error:
                self._failed(error)
                raise
            self._spare.extend((fence, ended))
            loaded = {id(each) for each, _ in found if window.arena.is_current(each.slot_of(self._shard))}
            return [each for each in wanted if id(each) not in loaded]
        finally:
            window.release()

    # ---- both -------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Mover.close`. The load thread must have ended."""
        self._computed.close()
        self._copied.close()

    def _launch(self, stream: Stream, kernel: Callable[..., None], batch: Batch, layers: range, place: Place) -> None:
        for part, which in batch.parts(layers, LAUNCH_BYTES):
            self._streams.launch(stream, kernel, self._pages, part, which.start, len(which), place=place)

    def _held(self, arena: Arena) -> ArenaWindow | None:
        with self._windows:
            window = None if self._has_failed else self._window
            return window if window is not None and window.arena is arena and window.hold() else None

    def _run_of(self, pages: PagesPlan, window: ArenaWindow) -> Run | None:
        layer_bytes = pages.num_blocks * self._pages.page_bytes
        address = window.address_of(pages.slot_of(self._shard), layer_bytes * self._pages.num_layers)
        if address is None or not 0 <= pages.first <= pages.num_blocks - len(pages.block_ids):
            return None
        return Run(pages.block_ids, address + pages.first * self._pages.page_bytes, layer_bytes)

    def _recorded(self, stream: object) -> Event:
        try:
            event = self._spare.popleft()
        except IndexError:
            event = self._streams.event()
        event.record(stream)
        return event

    def _passed(self, event: Event, action: Action) -> None:
        self._spare.append(event)
        action()


def page_map(layers: Sequence[torch.Tensor], num_blocks: int, page_bytes: int) -> PageMap:
    """The engine's layers, checked.

    :raises LayoutError: they are not what PDX moves.
    """
    try:
        pages = PageMap.of(layers, num_blocks)
    except ValueError as error:
        raise LayoutError(f"KV cache: {error}") from error
    if pages.page_bytes != page_bytes:
        raise LayoutError(f"KV cache: pages of {pages.page_bytes} bytes, expected {page_bytes}")
    return pages
