"""What the proxy knows about each engine's load and health: one record per URL. No I/O; clock and randomness are
injected.

An engine is healthy until it fails. A failure makes it suspect: it gets no requests while another engine can serve.
When that period ends, a probe decides and not a user's request (`pdx.proxy.probe`). If probes cannot tell whether the
engine generates, it is on trial: it gets one request at a time until one succeeds. ADR 29 has the reasons.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import NamedTuple

import msgspec

from pdx.telemetry.env import Env
from pdx.telemetry.faults import printable
from pdx.telemetry.rate import Rate

FIRST_S = 1.0  # how long an engine is suspect after its first failure; doubles with each further one
LONGEST_S = 30.0
PROBE_S = 3.0  # between two probes of an engine that is not suspect
_MOST_CHARS = 600  # of a log line
SERVES_S = 30.0  # an engine that answered a request within this time is working


class Reason(StrEnum):
    """Why a leg or a probe failed."""

    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect_timeout"
    TLS = "tls"  # the engine's certificate is not trusted, or it does not speak TLS
    RESET = "reset"
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"  # a stream that ended without its final event
    MALFORMED = "malformed"
    REDIRECT = "redirect"  # or another status that does not answer a request
    UNAUTHORIZED = "unauthorized"  # the engine rejects the proxy's own key (--engine-key)
    STATUS_4XX = "status_4xx"
    STATUS_429 = "status_429"
    STATUS_503 = "status_503"  # of a vLLM whose queue is full, and of servers that cannot serve anybody
    STATUS_5XX = "status_5xx"


# The engine did not work on the request: another engine can be asked at no cost.
UNSENT = frozenset({Reason.REFUSED, Reason.CONNECT_TIMEOUT, Reason.TLS})
# The request itself may be the cause, if several engines answer like this.
ANSWERED = frozenset({Reason.MALFORMED, Reason.REDIRECT, Reason.STATUS_503, Reason.STATUS_5XX})
# The engine may be full: it has not begun, and takes others later.
FULL = frozenset({Reason.STATUS_429, Reason.STATUS_503})
_NO_FAULT = frozenset({Reason.STATUS_4XX, Reason.STATUS_429})
_NO_FAULT_IF_BUSY = frozenset({Reason.TIMEOUT, Reason.STATUS_503})


class EngineState(StrEnum):
    """An engine's health."""

    NEW = "new"  # nothing is known: it gets requests, but does not make the proxy ready
    WELL = "well"
    SUSPECT = "suspect"
    TRIAL = "trial"


class Record(msgspec.Struct, eq=False):
    """One engine. Only `Health` and its legs in flight change it."""

    url: str
    probe_at: float  # when the next probe is due
    well_at: float  # when it last answered a probe or a request, or was added
    state: EngineState = EngineState.NEW
    in_flight: int = 0  # legs of this proxy
    planned: int = 0  # legs of this proxy that start later
    others: int = 0  # requests from elsewhere, according to the last report
    last_used: int = 0  # increases with every leg and plan; breaks ties
    trials: int = 0  # legs and plans that began while it was not healthy
    failures: int = 0  # consecutive
    unproven: bool = False  # a request failed, so GET /health proves nothing
    is_probing: bool = False
    heard_at: float = float("-inf")  # last byte of any leg with status 200: refusals come without a model
    # Models it serves, adapters included, its own first. None: unknown; empty: it has no list, and is asked.
    models: dict[str, None] | None = None
    adapters: frozenset[str] = frozenset()  # the adapters among them
    listed_at: float = float("-inf")  # when it was last asked for the list itself
    list_at: float = float("-inf")  # requests do not ask for the list before this time
    served_at: float = float("-inf")  # when a leg last succeeded
    backlog: int = 0  # prompt tokens that this proxy's legs have it compute now, as far as known
    computing: Rate = msgspec.field(default_factory=Rate)  # how fast it computes, in tokens …
    loading: Rate = msgspec.field(default_factory=Rate)  # … and loads what its node has
    untold: int = 0  # texts it was asked to tokenize, and has not

    @property
    def load(self) -> int:
        """All requests, planned ones included."""
        return self.in_flight + self.planned + self.others

    @property
    def avoided(self) -> bool:
        """Whether other engines are preferred."""
        return self.state is EngineState.SUSPECT or (self.state is EngineState.TRIAL and self.trials > 0)

    @property
    def is_ready(self) -> bool:
        """Whether it is known to accept requests."""
        return self.state in (EngineState.WELL, EngineState.TRIAL)


class Work(NamedTuple):
    """What a leg has its engine do with a prompt, in tokens."""

    missing: int = 0  # on its node, so they have to be computed
    found: int = 0
    is_timed: bool = False  # whether its answer's first byte comes as soon as that is done


NO_WORK = Work()


class Use:
    """A leg in flight or, if `is_planned`, in the future; counts as load until its context ends."""

    def __init__(self, record: Record, turn: int, *, is_planned: bool, work: Work = NO_WORK) -> None:
        self.record = record
        self.work = work
        self._is_first = not record.backlog  # no other prompt is computed first
        record.backlog += work.missing
        self.is_trial = record.state in (EngineState.SUSPECT, EngineState.TRIAL)
        self._is_planned = is_planned
        self._is_open = True
        record.last_used = turn
        self._count(1)

    def end(self) -> None:
        """End the use. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.record.backlog -= self.work.missing
            self._count(-1)

    def answered(self, since: float, now: float, *, is_served: bool = True) -> None:
        """The answer's first byte is here, so the prompt is computed, unless it was not served. Idempotent."""
        work, self.work = self.work, NO_WORK
        self.record.backlog -= work.missing
        if not work.is_timed or not is_served:
            return
        if work.found > 4 * work.missing:  # loading dominates, unless it had to wait
            rate, tokens = self.record.loading, work.found * self._is_first
        else:
            rate, tokens = self.record.computing, work.missing
        if tokens:
            rate.moved(tokens, int(since * 1e9), int(now * 1e9))

    def _count(self, step: int) -> None:
        self.record.trials += step * self.is_trial
        if self._is_planned:
            self.record.planned += step
        else:
            self.record.in_flight += step

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class Health:
    """All records. Methods are cheap and run on the event loop's thread."""

    def __init__(self, env: Env, *, silence_s: float, chance: random.Random | None = None) -> None:
        """An engine that sent a byte to any client within `silence_s` does not hang."""
        self.clock = env.clock
        self._chance = chance or random.Random()
        self._silence_s = silence_s
        self._faults = env.faults
        self._records: dict[str, Record] = {}
        self._turns = itertools.count(1)
        self.titled: Callable[[str], str] = lambda url: f"engine {url}"  # how the log names an engine
        self.failures: Counter[str] = Counter()  # failures of engines, by reason

    def of(self, url: str) -> Record:
        """The engine's record, created if needed; a new engine is probed at once."""
        found = self._records.get(url)
        if found is None:
            now = self.clock()
            found = self._records[url] = Record(url, probe_at=now, well_at=now)
        return found

    def keep(self, urls: Collection[str]) -> None:
        """Forget all engines but these."""
        self._records = {url: record for url, record in self._records.items() if url in urls}

    def begin(self, url: str, work: Work = NO_WORK) -> Use:
        return Use(self.of(url), next(self._turns), is_planned=False, work=work)

    def plan(self, url: str) -> Use:
        """Reserve a leg that may start later; the caller ends the plan if it never does."""
        return Use(self.of(url), next(self._turns), is_planned=True)

    def next_probe_s(self, urls: Collection[str]) -> int:
        """Whole seconds, at least one, until the next of these engines is probed."""
        return max(1, math.ceil(min((self.of(url).probe_at for url in urls), default=0.0) - self.clock()))

    def renew(self, url: str) -> None:
        """The URL has another engine, or a restarted one: forget everything known about its models and health."""
        record = self.of(url)
        if record.state is EngineState.WELL:
            record.state = EngineState.NEW
        record.models, record.adapters = None, frozenset()
        record.listed_at = record.list_at = float("-inf")
        record.computing, record.loading = Rate(), Rate()
        record.probe_at = self.clock()

    def lacks(self, url: str, model: str | None) -> None:
        """The engine answered that it lacks this model: if its list had it, the list is out of date."""
        record = self.of(url)
        if record.models is not None and model in record.models:
            record.models = None

    def running(self, url: str, count: int) -> None:
        """A node reported how many requests the engine has, from any source."""
        record = self.of(url)
        record.others = max(0, count - record.in_flight)

    def failed(self, use: Use, reason: Reason, text: str = "") -> None:
        """A leg failed. Reasons that do not make an engine suspect are ignored."""
        record = use.record
        if reason in _NO_FAULT or (reason in _NO_FAULT_IF_BUSY and self._speaks(record)):
            return
        self.failures[reason] += 1
        if reason not in UNSENT:
            record.unproven = True
        # A leg that began before the engine became suspect adds no information.
        if record.state in (EngineState.NEW, EngineState.WELL) or (record.state is EngineState.TRIAL and use.is_trial):
            self._suspect(record, f"{reason} {text}".rstrip())

    def doubt(self, use: Use) -> None:
        """A leg was silent for long, which may be legitimate: the next probe checks whether the engine generates."""
        use.record.unproven |= not self._speaks(use.record)

    def proved(self, use: Use) -> None:
        """A leg has an answer, so the engine generates."""
        if use.is_trial or use.record.state is EngineState.NEW:
            self._well(use.record)

    def succeeded(self, use: Use) -> None:
        """A leg's answer is complete."""
        use.record.served_at = self.clock()
        self.proved(use)
        if use.record.state is EngineState.WELL:
            use.record.failures = 0

    def pardon(self, urls: Collection[str]) -> None:
        """One request failed at all of these engines: if they answer others, the request is to blame."""
        now = self.clock()
        for record in map(self.of, urls):
            if len(urls) > 1 and record.state is EngineState.SUSPECT and now - record.served_at < SERVES_S:
                self._well(record)
                record.probe_at = min(record.probe_at, now + PROBE_S)

    def due(self, url: str) -> bool:
        """Whether a probe is due. If so, it has begun: the caller must call `probed` or `not_probed`."""
        record = self.of(url)
        if record.is_probing or record.probe_at > self.clock():
            return False
        record.is_probing = True
        return True

    def probed(self, record: Record, fault: str, *, generates: bool = False, answers: bool = True) -> None:
        """A probe has ended; `fault` is empty on success. `generates`: it saw a token. `answers`: the engine serves
        HTTP. An engine that does not costs no user anything, so it is probed as often as a healthy one."""
        record.is_probing = False
        record.probe_at = self.clock() + PROBE_S * (0.75 + self._chance.random() / 2)
        if fault:
            self._suspect(record, fault, answers=answers)
        elif record.state is EngineState.SUSPECT and record.unproven and not generates:
            record.state = EngineState.TRIAL
            self._warn(record, "answers again; it gets one request at a time until one succeeds")
        elif record.state is not EngineState.TRIAL or generates:
            self._well(record)
        else:
            record.well_at = self.clock()

    def not_probed(self, record: Record) -> None:
        """A probe was inconclusive: the engine is busy with others, or the fault is on this side. The next one follows
        soon."""
        record.is_probing = False
        record.probe_at = self.clock() + FIRST_S

    def _warn(self, record: Record, text: str) -> None:
        """Log once a minute per engine and state: a client can make engines fail as often as it likes."""
        about = f"{text.partition(' (')[0]} {record.url}"
        self._faults.warn(about, printable(f"{self.titled(record.url)} {text}", _MOST_CHARS))

    def _speaks(self, record: Record) -> bool:
        return self.clock() - record.heard_at < self._silence_s

    def _suspect(self, record: Record, why: str, *, answers: bool = True) -> None:
        is_known = record.state is EngineState.SUSPECT
        record.failures += answers or not record.failures
        delay_s = min(LONGEST_S, FIRST_S * 2.0 ** min(record.failures - 1, 10)) if answers or not is_known else PROBE_S
        delay_s *= 0.75 + self._chance.random() / 4
        record.probe_at = self.clock() + delay_s
        if not is_known:
            self._warn(record, f"is suspect ({why}); it is probed in {delay_s:.1f} s")
        record.state = EngineState.SUSPECT

    def _well(self, record: Record) -> None:
        if record.state in (EngineState.SUSPECT, EngineState.TRIAL):
            self._warn(record, "is well again")
        record.state = EngineState.WELL
        record.unproven = False
        record.well_at = self.clock()
        # Its failures stay counted until a request succeeds.
