"""One client's request while it is being served, and how all that are under way end when the proxy is to end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from pdx.proxy.engines import Engine
from pdx.proxy.health import Reason, Use
from pdx.proxy.leg import Asked
from pdx.proxy.metrics import Metrics, Outcome
from pdx.proxy.placing import Keys, Prompt
from pdx.proxy.plan import Body, Mode, model_of
from pdx.proxy.reply import Reply, request_key
from pdx.proxy.router import Pair
from pdx.proxy.routes import Route
from pdx.proxy.timelines import Timeline
from pdx.telemetry.timeline import Event, Moment
from pdx.wire.hints import Hints

if TYPE_CHECKING:
    from pdx.proxy.traces import Trace

# Where a request has its trace, if that is sampled, and its `traceparent`, if its client has told none.
TRACE, BEGUN = request_key("trace"), request_key("begun")
KEY_ROWS = 16_384  # names of API keys that are told apart in a proxy's life, and few fall on one row


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """Owned by the task that serves the request."""

    route: Route
    body: Body  # of a whole request, as far as it was read
    whole: Asked | None = None  # it goes to one engine as it is, whatever it asks
    prompts: int = 1
    only: str = ""  # the URL of the one engine that can serve it
    headers: Mapping[str, str]  # for the engines
    hints: Hints = Hints("")  # with sessions as the nodes know them
    reply: Reply
    timeline: Timeline
    metrics: Metrics
    trace: Trace | None = None
    outcome: Outcome = Outcome.OK
    answered: bool = False  # the client was sent a stream to its end: whatever happens now costs it nothing
    told: set[str] = msgspec.field(default_factory=set)  # nodes of engines that know of the transfer; "": one not known
    expecting: set[str] = msgspec.field(default_factory=set)  # those of decode legs that were sent before prefill's end
    prompt: Prompt | None = None  # what is known of it and of its cache
    keys: Keys | None = None  # of its prompt, where they can be made
    coming: list[tuple[str, list[bytes]]] = msgspec.field(default_factory=list)  # nodes where some are computed
    used: dict[str, Engine] = msgspec.field(default_factory=dict)  # engines that have had its prompt, by URL
    planned: Pair | None = None  # the engines for its two legs
    booking: Use | None = None  # of the decode leg, until that starts
    blamed: dict[str, Reason] = msgspec.field(default_factory=dict)  # by URL, why engines gave no usable answer
    received_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    token_ns: int = 0  # when the client was sent the last ones
    seen: dict[Event, int] = msgspec.field(default_factory=dict)  # and when, in nanoseconds

    def __post_init__(self) -> None:
        if self.trace is not None:
            self.trace.exchange = self
        self.mark(Event.RECEIVED)
        self.set_mode(self.timeline.mode, self.timeline.why)

    @property
    def transfer(self) -> str:
        """The id engines and nodes know this request's KV by."""
        return self.timeline.transfer

    @property
    def mode(self) -> Mode:
        """How the request is being served now."""
        return self.timeline.mode

    @property
    def model(self) -> str | None:
        """By the name that the client gave it."""
        return model_of(self.body)

    @property
    def streams(self) -> bool:
        """The client asked for a stream."""
        return self.body.get("stream") is True

    @property
    def stream_options(self) -> dict[str, Any]:
        options = self.body.get("stream_options")
        return options if isinstance(options, dict) else {}

    def leg(self, name: str, engine: Engine) -> AbstractContextManager[Mapping[str, str]]:
        """Inside, this leg is under way, with these headers."""
        return nullcontext(self.headers) if self.trace is None else self.trace.leg(name, engine, self.headers)

    def set_mode(self, mode: Mode, why: str) -> None:
        """Serve it so from now on; nothing of the answer may have been sent to the client yet."""
        self.timeline.mode = mode
        self.timeline.why = why
        self.reply.describe(self.transfer, mode)

    def mark(self, event: Event, engine: Engine | None = None) -> None:
        """This moment is one of the request's; of each kind, the first counts."""
        if event in self.seen:
            return
        name = engine.name if engine is not None else ""
        if engine is not None and event in (Event.PREFILL_ANSWERED, Event.DECODE_FIRST):
            self.used[engine.url] = engine
        now_ns = self.seen[event] = self.received_ns if event is Event.RECEIVED else time.monotonic_ns()
        if event is Event.DONE:
            self.metrics.duration[self.route, self.mode].observe((now_ns - self.received_ns) / 1e9)
        elif event is Event.PREFILL_ANSWERED:
            self.metrics.prefill.observe((now_ns - self.seen[Event.PREFILL_SENT]) / 1e9)
        elif event is Event.DECODE_FIRST:
            self.metrics.decode.observe((now_ns - self.seen[Event.DECODE_SENT]) / 1e9)
        self.timeline.add(Moment(event=event, at_ns=now_ns, engine=name, tokens=self.timeline.prompt_tokens))

    def token(self, engine: Engine, *, streams: bool) -> None:
        """The client is about to be sent a token or more, the first ones perhaps."""
        now_ns = time.monotonic_ns()
        if Event.FIRST_TOKEN in self.seen:
            self.metrics.itl[self.mode].observe((now_ns - self.token_ns) / 1e9)
        else:
            if streams:
                self.metrics.ttft[self.route, self.mode].observe((now_ns - self.received_ns) / 1e9)
            self.mark(Event.FIRST_TOKEN, engine)
        self.token_ns = now_ns


class Seat(msgspec.Struct, frozen=True):
    """A worker's place among those that serve one port together."""

    number: int
    loads: memoryview  # of all of them, which they share: how many requests each has …
    beats: memoryview  # … how often it has looked at its clock …
    uses: memoryview  # … and what it serves with which API key (`pdx.proxy.admission`)

    @staticmethod
    def sizes(workers: int) -> tuple[int, int, int]:
        """How many numbers the three have."""
        return workers, workers, KEY_ROWS * (2 + workers)

    @staticmethod
    def alone() -> Seat:
        return Seat(0, *(memoryview(bytearray(8 * size)).cast("q") for size in Seat.sizes(1)))


class Drain:
    """Nothing until `begin`; all calls on one event loop."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.has_begun = False  # new requests are to be refused
        self.is_over = False  # requests under way are being ended, or have been
        self._scopes: set[asyncio.Timeout] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._scopes)

    @property
    def load(self) -> int:
        """Requests of this process, and of those that serve beside it."""
        return sum(self.seat.loads)

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[asyncio.Timeout]:
        """A request that is served inside the block.

        :raises TimeoutError: its time is over; the yielded scope has expired.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                self._count()
                if self.is_over:
                    self._expire(scope)
                yield scope
        finally:
            self._scopes.discard(scope)
            self._count()
            self._changed.set()

    def _count(self) -> None:
        self.seat.loads[self.seat.number] = len(self._scopes)

    def beat(self) -> None:
        """This process does not hang."""
        self.seat.beats[self.seat.number] += 1

    def begin(self) -> None:
        self.has_begun = True

    def end(self) -> None:
        self.has_begun = self.is_over = True
        for scope in self._scopes:
            self._expire(scope)
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Until no request is under way, or they are being ended; at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._scopes and not self.is_over:
                    self._changed.clear()
                    await self._changed.wait()

    @staticmethod
    def _expire(scope: asyncio.Timeout) -> None:
        if not scope.expired():
            scope.reschedule(asyncio.get_running_loop().time())
