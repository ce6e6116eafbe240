"""Copying pages between a worker's KV cache and its node's arena: on a CPU synchronously, on a GPU on streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pdx.engine.plan import PagesPlan
from pdx.memory.arena import Arena

Action = Callable[[], None]


@dataclass
class Scatter:
    """Copies the chunks of one load: the load thread calls `copy` any number of times, then `close`."""

    copier: PageCopier
    mapped: Any  # the copier's own view of the arena
    fence: Any = None  # the event that must pass before the first copy

    def copy(self, pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        """Copy these layers of these pages, which are of one cache group. Returns those that failed: their slots were
        not current before and after, or out of reach."""
        return self.copier.load(self, pages, layers)

    def close(self) -> None:
        """Release the arena."""
        self.copier.let_go(self)


class PageCopier(ABC):
    """One per worker. The link's thread calls `use`, the load thread what `loading` returned, the engine's thread
    everything else, and the engine's thread never waits for a copy on a GPU.

    A step is `begin`, any number of `gather`s, `end`.
    """

    is_asynchronous: ClassVar[bool]  # copies may still run when a method returns

    @abstractmethod
    def use(self, arena: Arena | None) -> None:
        """Use this arena of the node from now on; None: the node is gone. May take long.

        An arena that pages cannot be copied to is logged and counted; then `begin` accepts nothing, and nothing is
        loaded.
        """

    @abstractmethod
    def begin(self, arena: Arena, pages: Sequence[PagesPlan]) -> list[PagesPlan]:
        """Start a step that gathers these pages into `arena`. Returns those that can be gathered: the slots of the
        others are no longer current, or out of reach.
        """

    @abstractmethod
    def gather(self, group: int, layers: range) -> bool:
        """Copy the pages of these layers of a cache group to the slots: they are computed. False: nothing is copied."""

    @abstractmethod
    def copied(self) -> Callable[[], bool]:
        """A function for any thread that tells whether all copies up to now have ended."""

    @abstractmethod
    def after_copies(self, action: Action) -> None:
        """Call `action` when all copies up to now have ended. Actions are called one by one, in order."""

    @abstractmethod
    def after_compute(self, action: Action) -> bool:
        """Call `action` when all that the engine has queued up to now is computed; one by one, in order.

        False: the engine captures a graph and computes nothing now, so `action` will not be called.
        """

    @abstractmethod
    def end(self) -> None:
        """End the step: let nothing overwrite its pages before they are gathered. No-op without a step."""

    @abstractmethod
    def loading(self, arena: Arena) -> Scatter | None:
        """A `Scatter` for one load, which copies behind all that was computed by now. None: nothing can be loaded."""

    @abstractmethod
    def load(self, source: Scatter, pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        """`Scatter.copy`."""

    def let_go(self, source: Scatter) -> None:  # noqa: B027  a mapping may go with the last view of it
        """`Scatter.close`."""

    @abstractmethod
    def close(self) -> None:
        """Return when all copies have ended and all actions were called. `use(None)` may still come. Idempotent."""
