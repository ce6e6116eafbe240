"""What the schedulers of some releases of vLLM do with what a connector promises, and others do not."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

try:
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector as _Own
except ImportError:  # not in this release
    _Own = None  # type: ignore[assignment,misc]

# Since 0.33: a load begins when the steps that were under way are over, if blocks that are free may still be read.
DEFERS = hasattr(Scheduler, "_drain_deferred_loads")
# Since 0.33: fewer tokens are taken than the connector has promised, or none, where vLLM has other outputs to keep.
CAPS = hasattr(_Own, "cap_external_hit")


def missing(shape: Any) -> str:
    """What this release has not of what a shape needs; empty: nothing."""
    if shape.defers and not DEFERS:
        return "loads begin at once before vLLM 0.33"
    return "what is promised is taken before vLLM 0.33" if shape.caps and not CAPS else ""


def keep_routes(scheduler: Any) -> Any:
    """vLLM's own connector for outputs beside tokens, which takes no more than it can answer for."""

    class Routes(_Own):  # type: ignore[misc,valid-type]
        def take_output(self, request: Any, output: Any) -> None:
            """The toy has none."""

    return Routes(scheduler.kv_cache_manager, scheduler.connector)


class Cap:
    """Stands where vLLM's connector for outputs beside tokens does, and takes what `take` says of a hit: (tokens of the
    engine's own cache, tokens beyond them that were promised)."""

    def __init__(self, block: int) -> None:
        self._block, self._asked = block, 0

    def take(self, num_local: int, num_external: int) -> int:
        """All, half, or nothing, by turns; in whole blocks."""
        self._asked += 1
        part = self._asked % 3
        if part == 0 or not num_external:
            return num_external
        end = (num_local + num_external * (part - 1) // 2) // self._block * self._block
        return max(0, end - num_local)

    def cap_external_hit(self, request: Any, num_local: int, num_external: int) -> int:
        return self.take(num_local, num_external)

    def max_cache_hit(self, request: Any) -> None:
        """Of the engine's own cache: no limit."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None
