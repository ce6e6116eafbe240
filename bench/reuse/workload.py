"""What is asked, at which load and in which order. Pure; the plans are those of `pdx bench serve`.

The same settings give the same plan, for every system and in every run. Documents stay the same within a repeat; what
is asked about them, and all that sessions say, is new at each load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from pdx.bench.reuse.records import BURST, DOCUMENTS, FIRST, SESSIONS
from pdx.bench.serve.workloads import Passage, Session, Shape, Workload, plan
from pdx.errors import ConfigError

TOGETHER = 3  # requests that an engine's small KV cache holds at once
ALONE = 3  # sessions that are asked one at a time


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
    loads: tuple[float, ...]  # shares of what the system answers in a burst
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
        """Tokens of all that may be asked for again within one load."""
        if workload == DOCUMENTS:
            return self.documents * self.tokens
        each = self.first_tokens + self.output_tokens + (self.turns - 1) * (self.message_tokens + self.output_tokens)
        return self.sessions * each

    def check(self) -> None:
        """:raises ConfigError: an engine's own small cache would hold everything, so that nothing need come from below,
        or a part of it is nothing.
        """
        for workload in self.workloads:
            if self.working_set(workload) <= 1.5 * TOGETHER * self.longest:
                what = "--documents" if workload == DOCUMENTS else "--sessions"
                raise ConfigError(
                    f"the {workload} have {self.working_set(workload):,} tokens, of which the engine's own cache would "
                    f"hold {TOGETHER * self.longest:,}: more {what}, or nothing need come from elsewhere"
                )


@dataclass(frozen=True, slots=True)
class Turn:
    """One load of one workload on one system. `share`: of its burst; `rate`: in its place."""

    repeat: int
    system: str
    workload: str
    load: str
    share: float | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.system}, {self.workload}, {titled(self.load)}, repeat {self.repeat + 1}"


def titled(load: str) -> str:
    """A load in words."""
    words = {FIRST: "one at a time", BURST: "all at once"}
    return words.get(load) or f"load {load}"


def loads_of(settings: Settings) -> list[tuple[str, float | None, float | None]]:
    """Name, share and rate of each, in the order in which they are asked."""
    if settings.rates:
        rates = [(BURST if math.isinf(rate) else f"{rate:g}/s", None, rate) for rate in sorted(settings.rates)]
        return [(FIRST, None, None), *rates]
    shares: list[tuple[str, float | None, float | None]] = [(f"{share:g}", share, None) for share in settings.loads]
    return [(FIRST, None, None), (BURST, None, math.inf), *sorted(shares)]


def order(settings: Settings, systems: Sequence[str], *, all_at_once: bool) -> list[Turn]:
    """All of them. If all systems run at the same time they take turns at each load, each beginning as often;
    otherwise each system has its turn in each repeat, so that none is started more often than repeats need."""
    loads = list(product(settings.workloads, loads_of(settings)))
    turns = []
    for repeat in range(settings.repeats):
        if all_at_once:
            for index, (workload, load) in enumerate(loads):
                turns += [Turn(repeat, name, workload, *load) for name in _rotated(systems, repeat + index)]
        else:
            for name in _rotated(systems, repeat):
                turns += [Turn(repeat, name, workload, *load) for workload, load in loads]
    return turns


def sessions_of(settings: Settings, turn: Turn, burst_per_s: float | None) -> list[Session]:
    """Who asks what and when. `burst_per_s`: what the system answered in its burst.

    :raises ValueError: it is needed, and is not known.
    """
    rate = turn.rate
    if turn.share is not None:
        if burst_per_s is None:
            raise ValueError(f"{turn}: its rate is a share of a burst that was not measured")
        rate = turn.share * burst_per_s
    return [_named(turn, session) for session in plan(_shape(settings, turn, rate))]


def _shape(settings: Settings, turn: Turn, rate: float | None) -> Shape:
    """`rate`: None: once about each document; `ALONE` sessions."""
    seed = settings.seed + turn.repeat
    if turn.workload == DOCUMENTS:
        return Shape(
            workload=Workload.LONG_DOCUMENT,
            requests=settings.documents * (1 if rate is None else settings.rounds),
            input_tokens=settings.tokens + settings.question_tokens,
            output_tokens=settings.output_tokens,
            rate=math.inf if rate is None else rate,
            seed=seed,
            shared=settings.documents,
            shared_tokens=settings.tokens,
        )
    return Shape(
        workload=Workload.CHAT,
        requests=settings.turns * (min(ALONE, settings.sessions) if rate is None else settings.sessions),
        input_tokens=settings.first_tokens,
        output_tokens=settings.output_tokens,
        # First messages come at this rate. A session then pauses as long as each of the others needs for one request,
        # so that about so many requests come later, too, and the others' KV comes between two of its own.
        rate=math.inf if rate is None else rate * settings.turns,
        seed=seed,
        rounds=settings.turns,
        message_tokens=settings.message_tokens,
        think_s=0.0 if rate is None else settings.sessions / rate,
    )


def _named(turn: Turn, session: Session) -> Session:
    """Texts of this repeat; questions and messages of this load, so that no other one has them."""
    turns = tuple(
        replace(each, message=Passage(f"{turn.repeat} {turn.load} {each.message.name}", each.message.tokens))
        for each in session.turns
    )
    system = session.system
    if system is not None:
        system = Passage(f"{turn.repeat} {system.name}", system.tokens)
    return replace(session, turns=turns, system=system)


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names) if names else 0
    return [*names[first:], *names[:first]]
