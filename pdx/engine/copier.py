"""What copies pages between a worker's KV cache and its node's arena: on a CPU at once, on a GPU on streams."""

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
    mapped: Any  # what the copier has made of the arena
    fence: Any = None  # what must have passed before the first copy

    def copy(self, pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        """Copy these layers of these pages, which are of one cache group; those whose slots were not the promised ones
        before and after, or out of reach."""
        return self.copier.load(self, pages, layers)

    def close(self) -> None:
        """Let go of the arena."""
        self.copier.let_go(self)


class PageCopier(ABC):
    """One per worker. The link's thread calls `use`, the load thread what `loading` returned, the engine's thread
    everything else, and the engine's thread never waits for a copy on a GPU.

    A step is `begin`, any number of `gather`s, `end`.
    """

    is_asynchronous: ClassVar[bool]  # copies may still run when a method returns

    @abstractmethod
    def use(self, arena: Arena | None) -> None:
        """This is the node's arena from now on; None: the node is gone. May take long.

        An arena that pages cannot be copied to is logged and counted; then `begin` takes nothing, and nothing is
        loaded.
        """

    @abstractmethod
    def begin(self, arena: Arena, pages: Sequence[PagesPlan]) -> list[PagesPlan]:
        """A step starts that gathers these pages into `arena`; the pages that can be gathered.

        The slots of the others are not promised any more, or out of reach.
        """

    @abstractmethod
    def gather(self, group: int, layers: range) -> bool:
        """These layers of a cache group are computed: copy their pages to the slots. False: nothing is copied now."""

    @abstractmethod
    def copied(self) -> Callable[[], bool]:
        """What tells, from any thread, whether all copies up to now have ended."""

    @abstractmethod
    def after_copies(self, action: Action) -> None:
        """Call `action` when all copies up to now have ended. Actions are called one after the other, in order."""

    @abstractmethod
    def after_compute(self, action: Action) -> bool:
        """Call `action` when all that the engine has queued up to now is computed, one after the other, in order.

        False: the engine captures a graph and computes nothing now, so `action` will not be called.
        """

    @abstractmethod
    def end(self) -> None:
        """The forward pass is over: let nothing overwrite pages before they are gathered. No step: nothing happens."""

    @abstractmethod
    def loading(self, arena: Arena) -> Scatter | None:
        """For one load: what copies it behind all that was computed up to now. None: nothing can be loaded."""

    @abstractmethod
    def load(self, source: Scatter, pages: Sequence[PagesPlan], layers: range) -> list[PagesPlan]:
        """`Scatter.copy`."""

    def let_go(self, source: Scatter) -> None:  # noqa: B027  a mapping may go with the last view of it
        """`Scatter.close`."""

    @abstractmethod
    def close(self) -> None:
        """Return when all copies have ended and all actions were called. `use(None)` may still come. Idempotent."""
