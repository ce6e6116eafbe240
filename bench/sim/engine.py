"""Engines on virtual time: a queue, continuous batching with chunked prefill, and the speeds of `pdx plan`'s model.

An engine takes one step after the other. In each, all decoding requests generate a token, and a chunk of one prompt, if
any is ready, is computed; `pdx.bench.plan.machines.Engine.step_s` gives the time. Steps without a prompt are simulated
many at once, until a request ends or a prompt is ready. A request gets its turn when the batch and the KV cache have
room for it; the first in the queue that the node has answered goes first. Its hits are then copied into the KV cache
over the host link, one request at a time, while others are computed. Prompts are computed in the same order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from pdx.bench.plan.machines import Engine as Model
from pdx.bench.sim.clock import Clock
from pdx.bench.sim.node import SimulatedNode
from pdx.bench.sim.requests import Request
from pdx.bench.sim.tier import Pipe
from pdx.proxy.health import Use
from pdx.wire.messages import Admitted

EARLY = 8  # queued requests that ask before their turn; in a real engine, as many as its next steps take (`Turns`)
MOST_STEPS = 512  # simulated at once


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all engines."""

    batch: int  # requests that are computed or decoded at a time
    host_bytes_s: float  # from host memory into the KV cache
    looks_ahead: bool  # whether the node is told of the queued requests behind the first `early`
    early: int = EARLY  # queued requests that ask before their turn


class Served(msgspec.Struct, eq=False):
    """One request on its way through an engine. Times in seconds; infinity: not yet."""

    number: int
    request: Request
    arrived_at: float
    in_memory: int = 0  # leading blocks in host memory when it arrived …
    in_memory_at_turn: int = 0  # … and when its turn came
    answer: Admitted | None = None
    origins: Sequence[str] = ()  # of the blocks that were found
    is_asked: bool = False
    is_expected: bool = False
    turn_at: float = math.inf
    first_at: float = math.inf
    ended_at: float = math.inf
    context: int = 0  # tokens in the KV cache
    tokens_left: int = 0  # tokens of the answer to come
    use: Use | None = None  # the load that its router counts

    @property
    def hits(self) -> int:
        return self.answer.hits if self.answer is not None else 0

    @property
    def name(self) -> str:
        return f"request-{self.number}"


class SimulatedEngine:
    """One engine. The caller that runs the clock calls `advance` after each of the engine's events."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        clock: Clock,
        node: SimulatedNode,
        block_tokens: int,
        on_over: Callable[[Served], None],
        on_event: Callable[[SimulatedEngine], None],
        on_turn: Callable[[Served], None],
    ) -> None:
        """`on_turn`: a request gets its turn. `on_over`: it has its last token. `on_event`: call `advance`."""
        self.busy_s = 0.0
        self.prefill_s = 0.0  # of steps with a part of a prompt
        self.loaded_blocks = 0  # copied into the KV cache
        self._model = model
        self._settings = settings
        self._clock = clock
        self._node = node
        self._block_tokens = block_tokens
        self._on_turn = on_turn
        self._on_over = on_over
        self._on_event = partial(on_event, self)
        self._link = Pipe(settings.host_bytes_s, 0.0)
        self._room = model.kv_room_tokens
        self._used = 0  # tokens of the KV cache that requests occupy
        self._waiting: deque[Served] = deque()
        self._num_in_batch = 0  # requests that have had their turn and are not over
        self._prompts: deque[Served] = deque()  # loaded; the first is being computed, the others are queued
        self._decoding: list[Served] = []
        self._step = 0  # number of the current step; the end of one that was cut has an older number
        self._is_stepping = False
        self._run: tuple[float, float, int] | None = None  # steps simulated at once: start, seconds per step, count

    @property
    def num_waiting(self) -> int:
        """Requests whose turn has not come."""
        return len(self._waiting)

    def arrive(self, served: Served) -> None:
        served.in_memory = self._node.leading_in_memory(served.request)
        self._on_event()
        self._waiting.append(served)
        if len(self._waiting) <= self._settings.early:
            self._ask(served)
        elif self._settings.looks_ahead:
            served.is_expected = True
            self._node.expect(served.name, served.request.keys)

    def _ask(self, served: Served) -> None:
        served.is_asked = True

        def answered(answer: Admitted, keys: Sequence[bytes]) -> None:
            self._on_event()
            served.answer = answer
            served.origins = self._node.origins(keys)

        self._node.admit(served.name, served.request, answered)

    # ---- turns ------------------------------------------------------------------------------

    def advance(self) -> None:
        """Act on an event: give requests their turns as far as there is room, and begin a step if none is running."""
        self._take_turns()
        if self._run is not None and self._prompts:
            self._cut()
        if not self._is_stepping:
            self._begin_step()

    def _take_turns(self) -> None:
        at = 0
        while at < len(self._waiting) and self._num_in_batch < self._settings.batch:
            served = self._waiting[at]
            if served.turn_at == math.inf:  # blocks that are loaded from now on have made it wait
                served.turn_at = self._clock.now
                served.in_memory_at_turn = self._node.leading_in_memory(served.request)
            if not served.is_asked:
                self._ask(served)
            if served.answer is None:
                at += 1
                continue
            needed = served.request.tokens + served.request.output
            if self._used + needed > self._room and self._num_in_batch:
                return
            del self._waiting[at]
            self._used += needed
            self._num_in_batch += 1
            self._on_turn(served)
            self._load(served)

    def _load(self, served: Served) -> None:
        tokens = served.hits * self._block_tokens
        self.loaded_blocks += served.hits
        _, end = self._link.carry(tokens * self._model.kv_token_bytes, self._clock.now)

        def loaded() -> None:
            self._on_event()
            assert served.answer is not None
            self._node.release(served.answer)
            served.context = min(tokens, served.request.tokens - 1)  # the last token is always computed
            self._prompts.append(served)

        self._clock.call_at(end, loaded)

    # ---- steps ------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        prompt = self._prompts[0] if self._prompts else None
        if prompt is None and not self._decoding:
            return
        self._is_stepping = True
        self._step += 1
        number, batch = self._step, len(self._decoding)
        context = sum(each.context for each in self._decoding) / batch if batch else 0.0
        if prompt is not None:
            chunk = min(self._model.budget, prompt.request.tokens - prompt.context)
            taken_s = self._model.step_s(batch, context, chunk, prompt.context)
            self.busy_s += taken_s
            self.prefill_s += taken_s
            self._clock.call_at(self._clock.now + taken_s, lambda: self._end_step(number, 1, chunk))
            return
        count = min(MOST_STEPS, min(each.tokens_left for each in self._decoding))
        step_s = self._model.step_s(batch, context + count / 2)
        self._run = self._clock.now, step_s, count
        self._clock.call_at(self._clock.now + count * step_s, lambda: self._end_step(number, count, 0))

    def _cut(self) -> None:
        """A prompt is ready: end the run of steps after the one that has begun."""
        assert self._run is not None
        since, step_s, count = self._run
        taken = min(count, max(1, math.ceil((self._clock.now - since) / step_s - 1e-9)))
        if taken < count:
            self._run = since, step_s, taken
            self._step += 1
            number = self._step
            self._clock.call_at(since + taken * step_s, lambda: self._end_step(number, taken, 0))

    def _end_step(self, number: int, count: int, chunk: int) -> None:
        if number != self._step:
            return  # it was cut
        self._on_event()
        if self._run is not None:
            self.busy_s += self._run[1] * count
            self._run = None
        self._is_stepping = False
        for each in self._decoding:
            each.tokens_left -= count
            each.context += count
        ended = [each for each in self._decoding if each.tokens_left <= 0]
        self._decoding = [each for each in self._decoding if each.tokens_left > 0]
        if chunk:
            self._chunk_computed(self._prompts[0], chunk, ended)
        for each in ended:
            each.ended_at = self._clock.now
            self._used -= each.request.tokens + each.request.output
            self._num_in_batch -= 1
            self._node.store_answer(each.request)
            self._on_over(each)

    def _chunk_computed(self, prompt: Served, chunk: int, ended: list[Served]) -> None:
        prompt.context += chunk
        if prompt.context < prompt.request.tokens:
            return
        self._prompts.popleft()
        prompt.first_at = self._clock.now
        if prompt.use is not None:
            prompt.use.answered(prompt.arrived_at, self._clock.now)
        prompt.tokens_left = prompt.request.output - 1
        assert prompt.answer is not None
        self._node.seal_granted(prompt.answer)
        (self._decoding if prompt.tokens_left > 0 else ended).append(prompt)
