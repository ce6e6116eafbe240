"""The halves as an engine's hooks see them: a fault in PDX switches it off for this engine, and the engine goes on.

Errors at start-up are raised by the halves themselves. After start-up no hook raises: the fault is logged and counted,
both halves detach from the node, and every promised load is reported exactly once, as failed if it was not carried out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pdx.engine.plan import LoadPlan, StepPlan
from pdx.engine.scheduler import SchedulerHalf
from pdx.engine.step import EngineRequest, StepRecord
from pdx.engine.tally import Tally
from pdx.engine.worker import WorkerHalf

log = logging.getLogger("pdx.engine")

T = TypeVar("T")


class _Guard:
    """What both guards share. One thread, the engine's."""

    def __init__(self, half: SchedulerHalf | WorkerHalf) -> None:
        self._half = half
        self.is_off = False
        self._closing: threading.Thread | None = None

    @property
    def tally(self) -> Tally:
        """What the half has counted, off or not."""
        return self._half.tally

    def switch_off(self, reason: str) -> None:
        """Detach from the node in the background, and do nothing from now on. Idempotent."""
        if self.is_off:
            return
        self.is_off = True
        log.error("PDX is switched off for this engine, which goes on without it: %s", reason)
        self._closing = threading.Thread(target=self._close, name="pdx-off", daemon=True)
        self._closing.start()

    def count(self, reason: str, text: str, *args: object, times: int = 1) -> None:
        """`NodeLink.count`."""
        if not self.is_off:
            self._half.link.count(reason, text, *args, times=times)

    def close(self) -> None:
        """Detach from the node. Idempotent."""
        self.is_off = True
        if self._closing is not None:
            self._closing.join()
        else:
            self._close()

    def _run(self, hook: Callable[..., T], *args: Any, otherwise: T) -> T:
        if self.is_off:
            return otherwise
        try:
            return hook(*args)
        except Exception as error:  # the root of all that PDX does on this thread
            log.exception("%s failed", hook.__name__)
            self._half.link.count("hook_failed")
            self.switch_off(f"{hook.__name__} failed: {type(error).__name__}: {str(error)[:200]!r}")
            return otherwise

    def _close(self) -> None:
        try:
            self._half.close()
        except Exception:  # likewise, at its end
            log.exception("detaching from the node failed")


def _hook(name: str, otherwise: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
    """The half's hook of this name, guarded; `otherwise` makes the answer of a half that is off."""

    def hook(self: _Guard, *args: Any) -> Any:
        return self._run(getattr(self._half, name), *args, otherwise=otherwise())

    return hook


class SchedulerGuard(_Guard):
    """The guarded scheduler half, with its method names, and its promised loads that no worker knows of yet."""

    arrived = _hook("arrived")
    not_loaded = _hook("not_loaded", frozenset)
    load_failed = _hook("load_failed")
    withdrawn = _hook("withdrawn", tuple)
    heard = _hook("heard")
    loaded = _hook("loaded")
    sources = _hook("sources", dict)
    reset = _hook("reset")  # if it fails, PDX is off and finds nothing, either

    _half: SchedulerHalf

    def __init__(self, half: SchedulerHalf, block_tokens: int) -> None:
        super().__init__(half)
        self._block_tokens = block_tokens
        self._local_tokens: dict[str, int] = {}  # of requests with promised loads, until they have blocks
        self._promised: dict[str, list[int]] = {}  # blocks to be loaded, until the step's plan is with the workers
        self._is_told = False  # the workers know that PDX is off

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> int | None:
        nothing: int | None = 0
        tokens = self._run(self._half.matched_tokens, request, local_tokens, otherwise=nothing)
        if tokens:
            self._local_tokens[request.request_id] = local_tokens
        return tokens

    def allocated(self, request: EngineRequest, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        local_tokens = self._local_tokens.pop(request.request_id, 0)
        if num_external:
            first = local_tokens // self._block_tokens
            end = -(-(local_tokens + num_external) // self._block_tokens)
            self._promised[request.request_id] = [block for group in blocks for block in group[first:end]]
        self._run(self._half.allocated, request, blocks, num_external, otherwise=None)

    def finished(self, request: EngineRequest) -> dict[str, Any]:
        self._local_tokens.pop(request.request_id, None)
        return self._run(self._half.finished, request, otherwise={})

    def plan_step(self, record_for: Callable[[SchedulerHalf], StepRecord]) -> StepPlan:
        """`record_for` makes the step's record, and may fail like the half itself."""

        def plan_step() -> StepPlan:
            return self._half.plan_step(record_for(self._half))

        plan: StepPlan | None = self._run(plan_step, otherwise=None)
        promised, self._promised = self._promised, {}
        if plan is not None:
            return plan
        self._is_told = True
        return StepPlan(lost=promised)

    def has_unsent_plans(self) -> bool:
        return self._run(self._half.has_unsent_plans, otherwise=bool(self._promised) or not self._is_told)


class WorkerGuard(_Guard):
    """The guarded worker half, with its method names, and its loads whose end was not reported yet."""

    save_layer = _hook("save_layer")
    end_forward = _hook("end_forward")
    take_news = _hook("take_news")
    restore = _hook("restore")

    _half: WorkerHalf

    def __init__(self, half: WorkerHalf) -> None:
        super().__init__(half)
        self._loads: dict[str, LoadPlan] = {}
        self._lost: dict[str, list[int]] = {}  # promised, but the scheduler half was off before it planned them
        self._is_known = False
        self._failed_loads: set[str] = set()  # among the last `finished_loads`

    @property
    def has_news(self) -> bool:
        """Whether this half is off and the scheduler half has not shown that it knows."""
        return self.is_off and not self._is_known

    def register(self, *cache: Any) -> None:
        """`WorkerHalf.register`. It is a part of start-up, so it raises."""
        self._half.register(*cache)

    def unregister(self) -> None:
        """When this returns no copy is in flight, even if PDX has failed."""
        self._run(self._half.unregister, otherwise=None)
        if self._closing is not None:
            self._closing.join()

    def begin(self, plan: StepPlan) -> None:
        if plan.lost is not None:
            self._is_known = True
            self._lost.update(plan.lost)
            self.switch_off("the scheduler half is off")
            return
        self._loads.update({load.request_id: load for load in plan.loads})
        self._run(self._half.begin, plan, otherwise=None)

    def finished_loads(self) -> tuple[set[str], set[int]]:
        """When PDX is off, loads in flight are reported in later steps, when they have ended: until then they write
        into their blocks. The others have failed.
        """
        nothing: tuple[set[str], set[int]] = (set(), set())
        finished, failed = self._run(self._half.finished_loads, otherwise=nothing)
        if self._closing is not None and not self._closing.is_alive():
            finished, failed = self._last_loads()
        loads = {request_id: self._loads.pop(request_id, None) for request_id in finished}
        self._failed_loads = {
            name for name, load in loads.items() if failed and (load is None or not failed.isdisjoint(load.block_ids))
        }
        return finished, failed

    def failed_loads(self) -> set[str]:
        """Those of the last `finished_loads` that are incomplete."""
        return self._failed_loads

    def _last_loads(self) -> tuple[set[str], set[int]]:
        """All loads that are left; called only when none is in flight."""
        if not self._loads and not self._lost:
            return set(), set()
        try:
            finished, failed = self._half.finished_loads()
        except Exception:  # then all of them count as failed
            log.exception("what was loaded last is not known")
            finished, failed = set(), set()
        lost, self._lost = self._lost, {}
        lost |= {name: load.block_ids for name, load in self._loads.items() if name not in finished}
        for request_id, block_ids in lost.items():
            finished.add(request_id)
            failed.update(block_ids)
        return finished, failed
