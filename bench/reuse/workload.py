"""The requests of each load: their order and times, and the texts that they share. Pure.

A text has a name, and the same name means the same text. The same settings give the same plan, for every system and in
every run. Documents stay the same within a repeat; questions about them, and all messages, are new at each load.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdx.bench.harness.lists import in_turns
from pdx.bench.reuse.records import BURST, DOCUMENTS, FIRST, KNOWN, SESSIONS
from pdx.errors import ConfigError

TOGETHER = 3  # requests that an engine's small KV cache holds at once
FEW = 3  # sessions in a load of one request at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The size of a run."""

    workloads: tuple[str, ...]
    documents: int
    tokens: int  # of a document
    question_tokens: int
    rounds: int  # questions about each document at each load
    sessions: int
    turns: int  # of a session
    first_tokens: int  # of a session's first message
    message_tokens: int  # of its later ones
    output_tokens: int
    loads: tuple[float, ...]  # shares of the requests per second that the system answers in a burst
    rates: tuple[float, ...]  # requests per second in place of `loads`; inf: a burst
    repeats: int
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        asked = self.tokens + self.question_tokens + self.output_tokens
        said = self.first_tokens + self.output_tokens + (self.turns - 1) * (self.message_tokens + self.output_tokens)
        return max(asked if DOCUMENTS in self.workloads else 0, said if SESSIONS in self.workloads else 0)

    def working_set(self, workload: str) -> int:
        """Tokens that may be asked for again within one load."""
        if workload == DOCUMENTS:
            return self.documents * self.tokens
        each = self.first_tokens + self.output_tokens + (self.turns - 1) * (self.message_tokens + self.output_tokens)
        return self.sessions * each

    def check(self) -> None:
        """:raises ConfigError: an engine's own small cache would hold most of a workload: little would be loaded."""
        for workload in self.workloads:
            if self.working_set(workload) <= 1.5 * TOGETHER * self.longest:
                what = "--documents" if workload == DOCUMENTS else "--sessions"
                raise ConfigError(
                    f"the {workload} have {self.working_set(workload):,} tokens, of which the engine's own cache would "
                    f"hold {TOGETHER * self.longest:,}: more {what}, or nothing need come from elsewhere"
                )


@dataclass(frozen=True, slots=True)
class Passage:
    """A text."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    """One request of a session."""

    passage: Passage
    think_s: float = 0.0  # pause before it, after the last answer


@dataclass(frozen=True, slots=True)
class Session:
    """One client: it sends each request after the answer to the one before."""

    index: int
    start_s: float  # when the first request is due
    messages: tuple[Message, ...]
    document: Passage | None = None  # the beginning of every prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One load of one workload on one system. `share`: of its burst's rate; `rate`: requests per second instead."""

    repeat: int
    system: str
    workload: str
    load: str
    share: float | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.system}, {self.workload}, {load_title(self.load)}, repeat {self.repeat + 1}"


def load_title(load: str) -> str:
    words = {FIRST: "one at a time", KNOWN: "one at a time, known", BURST: "all at once"}
    return words.get(load) or f"load {load}"


def loads_of(settings: Settings, workload: str) -> list[tuple[str, float | None, float | None]]:
    """Name, share and rate of each load, in order."""
    alone = [(FIRST, None, None), *([(KNOWN, None, None)] if workload == DOCUMENTS else [])]
    if settings.rates:
        rates = [(BURST if math.isinf(rate) else f"{rate:g}/s", None, rate) for rate in sorted(settings.rates)]
        return [*alone, *rates]
    shares: list[tuple[str, float | None, float | None]] = [(f"{share:g}", share, None) for share in settings.loads]
    return [*alone, (BURST, None, math.inf), *sorted(shares)]


def order(settings: Settings, systems: Sequence[str], *, all_at_once: bool) -> list[Turn]:
    loads = [(workload, load) for workload in settings.workloads for load in loads_of(settings, workload)]
    turns = in_turns(settings.repeats, loads, systems, all_at_once=all_at_once)
    return [Turn(repeat, name, workload, *load) for repeat, (workload, load), name in turns]


def sessions_of(settings: Settings, turn: Turn, burst_per_s: float | None) -> list[Session]:
    """The sessions of one load. `burst_per_s`: requests per second that the system answered in its burst.

    :raises ValueError: `burst_per_s` is needed and is None.
    """
    rate = turn.rate
    if turn.share is not None:
        if burst_per_s is None:
            raise ValueError(f"{turn}: its rate is a share of a burst that was not measured")
        rate = turn.share * burst_per_s
    seed, name = settings.seed + turn.repeat, f"{turn.repeat} {turn.load} own"
    draw = random.Random(f"{seed} content")
    if turn.workload == DOCUMENTS:
        count = settings.documents * (1 if rate is None else settings.rounds)
        documents = [number % settings.documents for number in range(count)]  # each equally often
        draw.shuffle(documents)
        return [
            Session(
                index,
                start_s,
                (Message(Passage(f"{name} {index}", settings.question_tokens)),),
                Passage(f"{turn.repeat} shared {document}", settings.tokens),
            )
            for index, (start_s, document) in enumerate(zip(_arrivals(count, rate, seed), documents, strict=True))
        ]
    count = min(FEW, settings.sessions) if rate is None else settings.sessions
    # On average, a session pauses for the time in which every session sends one request at this rate. So later requests
    # come at about the same rate, and the KV of other sessions comes between two requests of one session.
    think_s = 0.0 if rate is None else settings.sessions / rate
    return [
        Session(index, start_s, _messages(settings, f"{name} {index}", think_s, draw))
        for index, start_s in enumerate(_arrivals(count, rate, seed))
    ]


def _messages(settings: Settings, name: str, think_s: float, draw: random.Random) -> tuple[Message, ...]:
    first = Message(Passage(f"{name} round 0", settings.first_tokens))
    later = (
        Message(
            Passage(f"{name} round {number}", settings.message_tokens),
            draw.expovariate(1 / think_s) if think_s else 0.0,
        )
        for number in range(1, settings.turns)
    )
    return (first, *later)


def _arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Poisson arrivals in seconds, scaled so that the last one is at `count / rate`; None, inf: all at once."""
    if rate is None or math.isinf(rate):
        return [0.0] * count
    draw, times = random.Random(f"{seed} arrivals"), [0.0]
    for _ in range(count):
        times.append(times[-1] + draw.expovariate(1.0))
    return [time * count / rate / times[-1] for time in times[1:]]
