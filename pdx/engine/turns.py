"""The requests whose turn is near: those that the engine could schedule in its next two steps."""

from __future__ import annotations

from collections.abc import Iterator

from pdx.engine.request import TrackedRequest
from pdx.engine.step import StepLimits

STEPS = 2  # so many ahead


class Turns:
    """The engine's queue, as far as the scheduler half knows it. One thread: the scheduler's.

    Only requests whose turn is near ask for what they need; others would gain nothing, and hold room in the arena that
    another request could fill sooner. An engine that is told to ask again for one request goes on with the next,
    through its whole queue. So each walk through it counts what it has passed (`new_walk`, `pass_by`), and asks for no
    more than the next steps can take. Requests are kept in the order of arrival, the engine's own unless it has
    priorities.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._waiting: dict[TrackedRequest, int] = {}  # and the tokens that each counted for on arrival
        self._tokens = 0  # of all of them
        self._passed_tokens = self._num_passed = 0
        self._has_moved = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tracked: TrackedRequest, num_running: int) -> bool:
        """Add a request that has arrived. Returns whether its turn is near."""
        before, tokens = len(self._waiting), self._need(tracked)
        is_near = self._tokens < STEPS * self._limits.tokens and before < self._seats(num_running)
        self._waiting[tracked] = tokens
        self._tokens += tokens
        return is_near or (tracked.is_decode and before < self._limits.requests)

    def remove(self, tracked: TrackedRequest) -> None:
        """Remove a request that has its blocks, or is over. Idempotent."""
        if tracked in self._waiting:
            self._tokens -= self._waiting.pop(tracked)
            self._has_moved = True

    def new_walk(self) -> None:
        """The engine starts again with the first request of its queue."""
        self._passed_tokens = self._num_passed = 0

    def is_near(self, tracked: TrackedRequest, num_running: int) -> bool:
        """Whether this request, which the engine has reached, may have its turn soon."""
        if tracked.holds_no_room:
            return True
        return self._passed_tokens < STEPS * self._limits.tokens and self._num_passed < self._seats(num_running)

    def pass_by(self, tracked: TrackedRequest) -> None:
        """The engine goes on behind this request, which has what it needs or will have it."""
        tokens = self._need(tracked)
        self._passed_tokens += tokens
        self._num_passed += tokens > 0 and not tracked.is_decided

    def next_ones(self, num_running: int) -> Iterator[TrackedRequest]:
        """The requests whose turn has come near since the last call, and that have not asked yet."""
        if not self._has_moved:
            return
        self._has_moved = False
        tokens, seats = 0, self._seats(num_running)
        for tracked in self._waiting:
            if tracked.holds_no_room:
                continue
            if seats <= 0 or tokens >= STEPS * self._limits.tokens:
                return
            if tracked.node.asked is None and not tracked.is_decided:
                yield tracked
            tokens += self._need(tracked)
            seats -= 1

    def _seats(self, num_running: int) -> int:
        return max(1, self._limits.requests - num_running)

    def _need(self, tracked: TrackedRequest) -> int:
        """The tokens of the next steps that the request takes; 0: it stands aside."""
        if tracked.holds_no_room:
            return 0
        tokens = max(1, tracked.request.num_tokens - tracked.node.hits.tokens)
        most = self._limits.request_tokens
        return min(tokens, STEPS * most) if most else tokens
