"""Copies pages in a GPU's memory: by kernels on streams of their own, which threads wait for (docs/adr/0020)."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pdx.cuda.arena import GpuArena
from pdx.cuda.gpu import Gpu
from pdx.cuda.page_lock import PageLock
from pdx.engine.copier import Action, PageCopier, Scatter
from pdx.engine.link import NodeLink
from pdx.engine.plan import PagesPlan
from pdx.engine.staging import Staged, Staging
from pdx.engine.streams import Stream, StreamEvent, Streams
from pdx.errors import GpuError, GpuUnavailable, LayoutError, PdxError
from pdx.kernels.paged import Batch, PageMap, Place, Run, gather, scatter, warm_up
from pdx.kernels.turned_gpu import TurnedBatch, TurnedPages, TurnedRun, scatter_turned, warm_up_turned
from pdx.memory.arena import Arena
from pdx.memory.share import Share
from pdx.memory.slot import Slot

LAUNCH_BYTES = 64 << 20  # running kernels are not preempted: the engine's can start only between launches
log = logging.getLogger("pdx.engine")


class MappedArena:
    """A node's arena as the engine's GPU sees it: mapped memory of a GPU, or host memory that is being page-locked.

    The mapping stays while it has holds: its opener's, and one per step or load with kernels in flight. Unmapping may
    wait for the GPU, so the engine's thread must not be the last to `release` it. `_lock` guards `_holds`.
    """

    def __init__(self, arena: Arena, place: Place, lock: PageLock | None) -> None:
        self.arena = arena
        self.place = place  # for the GPU that copies
        self._page_lock = lock
        self._lock = threading.Lock()
        self._holds = 1

    @classmethod
    def open(cls, arena: Arena, gpu: Gpu, on_refused: Callable[[str], None]) -> MappedArena:
        """Map a GPU's arena for `gpu`, or begin to page-lock a host arena; if that fails, another thread calls
        `on_refused`. Raises PdxError if the arena cannot be mapped."""
        if isinstance(arena, GpuArena):
            arena.map(gpu)
            return cls(arena, Place.HERE if arena.gpu == gpu.uuid else Place.PEER, None)
        anchor = arena.data[:]  # keeps the mapping
        lock = PageLock(arena.address, arena.nbytes, gpu, anchor=anchor, on_refused=on_refused)
        return cls(arena, Place.HOST, lock)

    def __repr__(self) -> str:
        return f"<MappedArena {self.arena!r} {self._page_lock!r}, {self._holds} holds>"

    def hold(self) -> bool:
        """Keep it open until `release`. False: it is closed already."""
        with self._lock:
            if self._holds:
                self._holds += 1
            return bool(self._holds)

    def release(self) -> None:
        """End one `hold`. The last one closes the mapping, which may take long."""
        with self._lock:
            self._holds -= 1
            is_over = not self._holds
        if is_over:
            if self._page_lock is not None:
                self._page_lock.close()
            elif isinstance(self.arena, GpuArena):
                self.arena.unmap()  # an engine that has slept maps it again

    def reaches(self, slot: Slot, nbytes: int) -> bool:
        """Whether it is (still) a slot of at least so many bytes that the GPU can reach. Only while held."""
        if nbytes > slot.nbytes or not self.arena.is_current(slot):
            return False
        return self._page_lock is None or self._page_lock.covers(slot.offset, slot.nbytes)


class EventThread:
    """A thread that waits for events in the order in which they were queued, and calls the action queued with each.

    The queue grows only as far as the GPU lags: a step's compute waits for the copies of the step before it. If waiting
    fails, it is unknown what still runs on the GPU, so no action is called any more.
    """

    def __init__(self, name: str, copier: GpuCopier) -> None:
        """`copier.failed` is called on the thread, at most once, with the reason."""
        self._copier = copier
        self._queue: queue.SimpleQueue[tuple[StreamEvent | None, Action] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: StreamEvent | None, action: Action) -> None:
        """Call `action` on the thread when `event` and everything queued before has passed."""
        self._queue.put((event, action))

    def close(self) -> None:
        """Finish what is queued and stop. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  the thread's root
            self._copier.failed(error)
        else:
            return
        while self._queue.get() is not None:
            pass

    def _serve(self) -> None:
        self._copier.streams.bind_thread()
        while (job := self._queue.get()) is not None:
            event, action = job
            if event is not None:
                event.synchronize()
            try:
                action()
            except Exception:  # what was queued behind it concerns other copies
                log.exception("the node was not told of copies that have ended")


@dataclass
class _Step:
    """What one forward pass gathers. It holds the mapping until its last copy has ended."""

    mapped: MappedArena
    # By cache group and shard, of the groups that have pages in this step; those of an arena in host memory are staged.
    batches: Mapping[tuple[int, int], Batch]
    staged: Mapping[tuple[int, int], Sequence[Staged]]
    is_refused: bool = False  # CUDA refused a launch: nothing of the step is whole


class GpuCopier(PageCopier):
    """The copier of a GPU. `pages`: the engine's, by cache group and shard. One stream gathers, one loads; thread
    `pdx-copied` calls actions after copies, `pdx-computed` those after compute.

    The engine's thread owns `_step` and `_fence`; `_arenas` guards which arena is mapped, and whether copies failed.
    """

    is_asynchronous = True

    def __init__(
        self,
        pages: Sequence[Sequence[PageMap]],
        share: Share,
        streams: Streams,
        link: NodeLink,
        turned: TurnedPages | None = None,
    ) -> None:
        """`turned`: of the first cache group, how tokens are loaded at other positions; None: they are not.

        Kernels that cannot be compiled or loaded here are logged and counted; the copier then copies nothing.

        :raises GpuUnavailable: the driver cannot be called, or cuda-bindings is missing.
        """
        why = _warm_up(pages, streams, turned)
        if why:
            log.error(
                "the copy kernels cannot be made ready, nothing is saved or loaded: %s (Triton needs a C compiler and "
                "Python's headers at its first use; see `pdx doctor`)",
                why,
            )
            link.count("kernels_unavailable")
        self._pages = pages
        self._turned = turned
        self._share = share
        self.streams = streams
        self._link = link
        self._gathering, self._loading = streams.new_stream(), streams.new_stream()
        self._fence = streams.event()
        self._spare: deque[StreamEvent] = deque()  # events that have passed and have no waiters
        self._arenas = threading.Lock()
        self._mapped: MappedArena | None = None
        self._has_failed = bool(why)  # CUDA is unusable in this process
        self._step: _Step | None = None
        self._staging: Staging | None = None  # once an arena in host memory was mapped
        self._copied = EventThread("pdx-copied", self)
        self._computed = EventThread("pdx-computed", self)

    # ---- the link's thread ------------------------------------------------------------------

    def use(self, arena: Arena | None) -> None:
        mapped = None
        if arena is not None and not self._has_failed:
            try:
                self.streams.bind_thread()
                mapped = MappedArena.open(arena, self.streams.gpu(), self._refused)
                if mapped.place is Place.HOST and self._staging is None:
                    self._staging = self._new_staging()
            except (PdxError, RuntimeError) as error:  # torch's own errors, too
                log.error("cannot reach the node's memory from the GPU, nothing is saved or loaded: %s", str(error))  # noqa: TRY400
                self._link.count("arena_unreachable")
        with self._arenas:
            mapped, self._mapped = self._mapped, mapped
        if mapped is not None:
            mapped.release()

    def _new_staging(self) -> Staging | None:
        try:
            return Staging(list(itertools.chain.from_iterable(self._pages)), self.streams)
        except RuntimeError as error:
            log.warning(
                "no room on the GPU to stage what goes to host memory, so kernels write there and take longer: %s",
                str(error),
            )
            self._link.count("staging_unavailable")
            return None

    def _refused(self, reason: str) -> None:
        log.error("nothing is saved or loaded: %s", reason)
        self._link.count("page_lock_refused")

    def failed(self, error: Exception) -> None:
        """Copies in flight stay reserved and mapped until this process ends: it is unknown what still writes there."""
        with self._arenas:
            was_known, self._has_failed = self._has_failed, True
        if not was_known:
            # As text: an exception kept by a logger would keep frames, and with them the node's memory.
            text = f"{type(error).__name__}: {error}"
            log.error("copies on the GPU failed, nothing is saved or loaded any more: %s", text)
            self._link.count("copies_failed")

    # ---- saving -----------------------------------------------------------------------------

    def begin(self, arena: Arena, pages: Sequence[PagesPlan]) -> list[PagesPlan]:
        assert self._step is None, "the step before this one is not finished"
        mapped = self._held(arena) if pages and not self.streams.is_capturing() else None
        if mapped is None:
            return []
        found = [each for each in pages if self._is_in_reach(each, mapped)]
        try:
            if found:
                runs = self._runs(found, mapped)
                with self.streams.on(self._gathering):
                    if mapped.place is Place.HOST and self._staging is not None:
                        staged = {at: self._staging.stage(self._map(at), its) for at, its in runs.items()}
                        self._step = _Step(mapped, {}, staged)
                    else:
                        batches = {at: Batch.of(self._map(at), its) for at, its in runs.items()}
                        self._step = _Step(mapped, batches, {})
                return found
        except RuntimeError as error:  # no room on the GPU even for the table
            log.warning("the pages of this step are not saved: %s", str(error))
        self._copied.put(None, mapped.release)
        return []

    def gather(self, group: int, layers: range) -> bool:
        step = self._step
        if step is None or step.is_refused or self.streams.is_capturing():
            return False
        try:
            self._fence.record(self.streams.compute())
            self._fence.wait(self._gathering)
            for part in range(self._share.count):
                if (batch := step.batches.get((group, part))) is not None:
                    self._launch(self._gathering, gather, batch, layers, step.mapped.place)
                elif self._staging is not None:
                    self._staging.gather(self._gathering, gather, step.staged.get((group, part), ()), layers)
        except (RuntimeError, ValueError, GpuError) as error:  # no memory for it, or another device is current
            step.is_refused = True
            log.warning("the pages of this step are not saved: %s", str(error))
            self._link.count("launch_refused")
            return False
        return True

    def copied(self) -> Callable[[], bool]:
        event = self.streams.event()  # not a spare one: it is queried long after it has passed
        event.record(self._saving())
        query: Callable[[], bool] = event.query
        return query

    def after_copies(self, action: Action) -> None:
        event = self._recorded(self._saving())
        self._copied.put(event, partial(self._passed, event, action))

    def after_compute(self, action: Action) -> bool:
        if self.streams.is_capturing():
            return False
        event = self._recorded(self.streams.compute())
        self._computed.put(event, partial(self._passed, event, action))
        return True

    def end(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if not self.streams.is_capturing():
            self._fence.record(self._gathering)
            self._fence.wait(self.streams.compute())
        event = self._recorded(self._saving())
        self._copied.put(event, partial(self._passed, event, step.mapped.release))

    def _saving(self) -> Stream:
        """The stream to wait for until everything gathered up to now is in its slots."""
        if self._staging is None:
            return self._gathering
        self._fence.record(self._gathering)
        self._fence.wait(self._staging.stream)
        return self._staging.stream

    # ---- loading ----------------------------------------------------------------------------

    def loading(self, arena: Arena) -> Scatter | None:
        mapped = self._held(arena) if not self.streams.is_capturing() else None
        if mapped is None:
            return None
        return Scatter(self, mapped, self._recorded(self.streams.compute()))

    def let_go(self, source: Scatter) -> None:
        source.mapped.release()

    def load(self, source: Scatter, pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        mapped = source.mapped
        fence, source.fence = source.fence, None  # what the loading stream does later comes behind it as well
        self.streams.bind_thread()
        found = [each for each in pages if self._is_in_reach(each, mapped)]
        if fence is not None:
            fence.wait(self._loading)
        with self.streams.on(self._loading):
            runs = self._runs([each for each in found if each.moved is None], mapped)
            batches = [Batch.of(self._map(at), its) for at, its in runs.items()]
            turned = [*self._turned_batches(found, mapped)]
        try:
            for batch in batches:
                self._launch(self._loading, scatter, batch, layers, mapped.place)
            for moved in turned:
                self._launch(self._loading, scatter_turned, moved, layers, mapped.place)
        finally:  # those before one that is refused run all the same, and write to the engine's blocks
            try:
                ended = self._recorded(self._loading)
                ended.synchronize()
            except Exception as error:
                self.failed(error)
                raise
        self._spare.extend((ended,) if fence is None else (fence, ended))
        loaded = {id(each) for each in found if all(map(mapped.arena.is_current, each.slots_of(self._share)))}
        return [each for each in pages if id(each) not in loaded]

    def _turned_batches(self, found: Iterable[PagesPlan], mapped: MappedArena) -> Iterator[TurnedBatch]:
        """Batches of the pages that go to other positions, by shard and shift."""
        runs: defaultdict[tuple[int, int], list[TurnedRun]] = defaultdict(list)
        for pages in found:
            if (moved := pages.moved) is not None:
                layer_bytes = pages.num_blocks * self._pages[0][0].page_bytes
                for part, slot in enumerate(pages.slots_of(self._share)):
                    run = mapped.arena.address + slot.offset, layer_bytes, *moved[:3], pages.block_ids
                    runs[part, moved.shift].append(TurnedRun(*run))
        for (part, shift), its in runs.items():
            assert self._turned is not None
            yield TurnedBatch.of(self._pages[0][part], self._turned, its, shift)

    # ---- both -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads. The load thread must have ended."""
        self._computed.close()
        self._copied.close()

    def _launch(
        self, stream: Stream, kernel: Callable[..., None], batch: Batch | TurnedBatch, layers: range, place: Place
    ) -> None:
        for part, which in batch.parts(layers, LAUNCH_BYTES):
            self.streams.launch(stream, kernel, part.pages, part, which.start, len(which), place=place)

    def _held(self, arena: Arena) -> MappedArena | None:
        with self._arenas:
            mapped = None if self._has_failed else self._mapped
            return mapped if mapped is not None and mapped.arena is arena and mapped.hold() else None

    def _map(self, at: tuple[int, int]) -> PageMap:
        group, part = at
        return self._pages[group][part]

    def _is_in_reach(self, pages: PagesPlan, mapped: MappedArena) -> bool:
        """Whether the GPU finds the slots of all shards of the rank, and the pages lie within them."""
        if (moved := pages.moved) is not None:
            if self._turned is None:
                raise LayoutError("tokens at other positions, where nothing turns keys")
            size = self._turned.strides.block_tokens
            ends = moved.first + moved.num_tokens, moved.target + moved.num_tokens
            if min(moved[:3]) < 0 or ends[0] > pages.num_blocks * size or ends[1] > len(pages.block_ids) * size:
                return False
        elif not 0 <= pages.first <= pages.num_blocks - len(pages.block_ids):
            return False
        of_shard = self._pages[pages.group][0]
        nbytes = pages.num_blocks * of_shard.page_bytes * of_shard.num_layers
        return all(mapped.reaches(slot, nbytes) for slot in pages.slots_of(self._share))

    def _runs(self, found: Iterable[PagesPlan], mapped: MappedArena) -> Mapping[tuple[int, int], list[Run]]:
        """Where their pages go, by cache group and shard."""
        runs: defaultdict[tuple[int, int], list[Run]] = defaultdict(list)
        for pages in found:
            page_bytes = self._pages[pages.group][0].page_bytes
            for part, slot in enumerate(pages.slots_of(self._share)):
                address = mapped.arena.address + slot.offset + pages.first * page_bytes
                runs[pages.group, part].append(Run(pages.block_ids, address, pages.num_blocks * page_bytes))
        return runs

    def _recorded(self, stream: object) -> StreamEvent:
        try:
            event = self._spare.popleft()
        except IndexError:
            event = self.streams.event()
        event.record(stream)
        return event

    def _passed(self, event: StreamEvent, action: Action) -> None:
        self._spare.append(event)
        action()


def _warm_up(pages: Sequence[Sequence[PageMap]], streams: Streams, turned: TurnedPages | None) -> str:
    """Compile the kernels, so that no step has to, and wait until the tables are on the GPU. Returns why that is not
    possible; empty: it is done."""
    try:
        streams.gpu()
        for of_shard in itertools.chain.from_iterable(pages):
            warm_up(of_shard)
        if turned is not None:
            warm_up_turned(pages[0][0], turned)
        ready = streams.event()
        ready.record(streams.compute())
        ready.synchronize()
    except GpuUnavailable:
        raise
    except Exception as error:  # noqa: BLE001  Triton's compiler, its C compiler and CUDA raise their own
        return f"{type(error).__name__}: {error}"
    return ""


def page_map(layers: Sequence[torch.Tensor], num_blocks: int, page_bytes: int) -> PageMap:
    """Check the engine's layers and map their pages.

    :raises LayoutError: PDX cannot move them.
    """
    try:
        pages = PageMap.of(layers, num_blocks)
    except ValueError as error:
        raise LayoutError(f"KV cache: {error}") from error
    if pages.page_bytes != page_bytes:
        raise LayoutError(f"KV cache: pages of {pages.page_bytes} bytes, expected {page_bytes}")
    return pages
