"""Sends every case twice to the plain server, then once to the other one, and finds what differs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pdx.bench.parity.asking import LIBRARIES, Server, missing_libraries
from pdx.bench.parity.cases import Maker, disconnects
from pdx.bench.parity.essence import Difference, Path, differences, essence, place
from pdx.bench.parity.reasons import REASONS, reason
from pdx.bench.parity.records import Answer, Asked, Case, Recording
from pdx.errors import ConfigError
from pdx.extras import install

DEFAULT_LENGTH = 2048  # assumed context length if the server does not tell its own
_MOST_FAULTS = 5  # requests in a row without an answer: the server is gone

_GENERAL = {each.name for each in REASONS if each.is_general}

OnDone = Callable[[str, int, int], None]  # activity, requests done, requests in all


class Verdict(msgspec.Struct, kw_only=True):
    """The result of comparing one case."""

    case: Case
    plain: Answer
    got: Answer
    loose: list[Path] = []  # compared by form: plain differed from itself there, or tokens are random
    differences: list[Difference] = []  # without a reason
    reasons: dict[str, int] = {}  # name of a reason -> number of differences that it covers
    uncompared: str = ""  # why plain's answers are no reference


def pick_cases(model: str, length: int, *, seed: int, count: int, only: str = "") -> tuple[list[Case], dict[str, str]]:
    """The cases, and the groups of cases that cannot run here, with the reasons."""
    missing = missing_libraries()
    made = Maker(model, length, seed).cases(count, [name for name in LIBRARIES if name not in missing], only=only)
    if not made:
        raise ConfigError(f"--only {only!r}: no case has that in its name")
    return made, {f"the {name} client": f"not installed: {install('parity')}" for name in missing}


async def facts(server: Server, model: str = "") -> tuple[str, int]:
    """The name and context length of `model`, or of the server's first one.

    :raises ConfigError: the server does not have the model, or does not list its models.
    """
    cards = {card["id"]: card for card in await server.models()}
    name = model or next(iter(cards))
    if name not in cards:
        raise ConfigError(f"{server.url} has no model {name!r} (it has: {', '.join(cards)})")
    length = cards[name].get("max_model_len")
    return name, length if isinstance(length, int) and length > 0 else DEFAULT_LENGTH


async def record(server: Server, cases: Sequence[Case], into: Recording, *, concurrency: int, on_done: OnDone) -> None:
    """Send every case to the plain server twice. The second pass hits its caches, so effects of caching do not count.

    :raises ConfigError: the server stopped answering.
    """
    first = await _ask(server, cases, concurrency, lambda done: on_done("plain", done, 2 * len(cases)))
    second = await _ask(server, cases, concurrency, lambda done: on_done("plain", len(cases) + done, 2 * len(cases)))
    into.asked += [Asked(case=case, first=one, second=two) for case, one, two in zip(cases, first, second, strict=True)]


async def compare(server: Server, recorded: Sequence[Asked], *, concurrency: int, on_done: OnDone) -> list[Verdict]:
    """Send every recorded case to the other server.

    :raises ConfigError: the server stopped answering.
    """
    cases = [each.case for each in recorded]
    got = await _ask(server, cases, concurrency, lambda done: on_done(server.url, done, len(cases)))
    return [judge(asked, answer) for asked, answer in zip(recorded, got, strict=True)]


def judge(asked: Asked, got: Answer) -> Verdict:
    """Compare a server's answer with the plain one's; where plain differs from itself, only by form."""
    case, plain = asked.case, asked.first
    verdict = Verdict(case=case, plain=plain, got=got)
    if plain.fault or asked.second.fault or plain.status != asked.second.status:
        verdict.uncompared = plain.fault or asked.second.fault or "two statuses"
        return verdict
    want = essence(plain)
    loose = {place(found.path) for found in differences(want, essence(asked.second))}
    if case.is_random:
        loose.add(("body",))
    verdict.loose = sorted(loose, key=str)
    for found in differences(want, essence(got), frozenset(loose)):
        covering = reason(case, plain, got, found)
        if covering is None:
            verdict.differences.append(found)
        else:
            verdict.reasons[covering.name] = verdict.reasons.get(covering.name, 0) + 1
    return verdict


async def _ask(server: Server, cases: Sequence[Case], concurrency: int, on_done: Callable[[int], None]) -> list[Answer]:
    """The answers in the order of the cases. Cases that check the load of the whole server run last, one at a time."""
    answers: dict[int, Answer] = {}
    silent: list[str] = []

    async def ask_each(numbers: Iterable[int]) -> None:
        for number in numbers:
            answers[number] = answer = await server.ask(cases[number])
            if not answer.fault.startswith("no answer:"):
                silent.clear()
            else:
                silent.append(cases[number].name)
            if len(silent) >= _MOST_FAULTS:
                raise ConfigError(f"{server.url} answers no more, from {silent[0]!r} on: {answer.fault}")
            on_done(len(answers))

    waiting = iter([number for number, case in enumerate(cases) if not disconnects(case)])
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(ask_each(waiting))
    except* ConfigError as errors:
        raise errors.exceptions[0] from None
    await ask_each(number for number, case in enumerate(cases) if disconnects(case))
    return [answers[number] for number in range(len(cases))]


class Row(msgspec.Struct, kw_only=True):
    """Counts of an endpoint's cases, by outcome."""

    endpoint: str
    cases: int = 0
    equal: int = 0  # apart from differences that a reason covers
    loose: int = 0  # of the equal ones: compared by form somewhere
    listed: int = 0  # of the equal ones: with a reason that is not general
    differ: int = 0
    uncompared: int = 0


def rows(verdicts: Sequence[Verdict]) -> list[Row]:
    """One row per endpoint, in order of appearance."""
    found: dict[str, Row] = {}
    for each in verdicts:
        row = found.setdefault(each.case.endpoint, Row(endpoint=each.case.endpoint))
        row.cases += 1
        row.uncompared += bool(each.uncompared)
        row.differ += bool(each.differences)
        if not each.uncompared and not each.differences:
            row.equal += 1
            row.loose += bool(each.loose)
            row.listed += bool(each.reasons.keys() - _GENERAL)
    return list(found.values())


def covered(verdicts: Sequence[Verdict]) -> Counter[str]:
    """The number of cases in which each reason covers a difference."""
    return Counter(name for each in verdicts for name in each.reasons)
