"""Asks the plain server everything twice, then the other one everything once, and says what differs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pdx.bench.parity import cases as making
from pdx.bench.parity.asking import LIBRARIES, Server, missing_libraries
from pdx.bench.parity.cases import Maker
from pdx.bench.parity.essence import Difference, Path, differences, essence, place
from pdx.bench.parity.reasons import REASONS, reason
from pdx.bench.parity.records import Answer, Asked, Case, Recording
from pdx.errors import ConfigError
from pdx.extras import install

DEFAULT_LENGTH = 2048  # of the context of a server that does not say it
_MOST_FAULTS = 5  # without an answer, one after the other: nobody is there

_GENERAL = {each.name for each in REASONS if each.is_general}

Told = Callable[[str, int, int], None]  # what is being done, how far it is, of how many


class Verdict(msgspec.Struct, kw_only=True):
    """One case, compared."""

    case: Case
    plain: Answer
    got: Answer
    loose: list[Path] = []  # where plain differed from plain
    differences: list[Difference] = []  # without a reason
    reasons: dict[str, int] = {}  # names of those that cover others, and how many
    uncompared: str = ""  # why plain's answer is none to compare with


def chosen(model: str, length: int, *, seed: int, count: int, only: str = "") -> tuple[list[Case], dict[str, str]]:
    """The cases, and the groups that cannot be run here, with the reason."""
    missing = missing_libraries()
    made = Maker(model, length, seed).cases(count, [name for name in LIBRARIES if name not in missing], only=only)
    if not made:
        raise ConfigError(f"--only {only!r}: no case has that in its name")
    return made, {f"the {name} client": f"not installed: {install('parity')}" for name in missing}


async def facts(server: Server, model: str = "") -> tuple[str, int]:
    """The model that is asked for, and how many tokens it takes.

    :raises ConfigError: the server does not have it.
    """
    cards = {card["id"]: card for card in await server.models()}
    name = model or next(iter(cards))
    if name not in cards:
        raise ConfigError(f"{server.url} has no model {name!r} (it has: {', '.join(cards)})")
    length = cards[name].get("max_model_len")
    return name, length if isinstance(length, int) and length > 0 else DEFAULT_LENGTH


async def record(server: Server, cases: Sequence[Case], into: Recording, *, concurrency: int, told: Told) -> None:
    """Ask the plain server everything twice. The second time much is cached: what changes by that is no difference.

    :raises ConfigError: it answers no more.
    """
    first = await _all(server, cases, concurrency, lambda done: told("plain", done, 2 * len(cases)))
    second = await _all(server, cases, concurrency, lambda done: told("plain", len(cases) + done, 2 * len(cases)))
    into.asked += [Asked(case=case, first=one, second=two) for case, one, two in zip(cases, first, second, strict=True)]


async def compare(server: Server, recorded: Sequence[Asked], *, concurrency: int, told: Told) -> list[Verdict]:
    """Ask the other server everything.

    :raises ConfigError: it answers no more.
    """
    cases = [each.case for each in recorded]
    got = await _all(server, cases, concurrency, lambda done: told(server.url, done, len(cases)))
    return [judged(asked, answer) for asked, answer in zip(recorded, got, strict=True)]


def judged(asked: Asked, got: Answer) -> Verdict:
    """What differs between a server's answer and the plain one's, where that one does not differ from itself."""
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


async def _all(server: Server, cases: Sequence[Case], concurrency: int, told: Callable[[int], None]) -> list[Answer]:
    """The answers in the order of the cases; those that look at the whole server are asked alone, at the end."""
    answers: dict[int, Answer] = {}
    silent: list[str] = []

    async def ask(numbers: Iterable[int]) -> None:
        for number in numbers:
            answers[number] = answer = await server.ask(cases[number])
            if not answer.fault.startswith("no answer:"):
                silent.clear()
            else:
                silent.append(cases[number].name)
            if len(silent) >= _MOST_FAULTS:
                raise ConfigError(f"{server.url} answers no more, from {silent[0]!r} on: {answer.fault}")
            told(len(answers))

    waiting = iter([number for number, case in enumerate(cases) if not making.leaves(case)])
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(ask(waiting))
    except* ConfigError as errors:
        raise errors.exceptions[0] from None
    await ask(number for number, case in enumerate(cases) if making.leaves(case))
    return [answers[number] for number in range(len(cases))]


class Row(msgspec.Struct, kw_only=True):
    """What became of an endpoint's cases."""

    endpoint: str
    cases: int = 0
    equal: int = 0  # but for what a reason covers
    loose: int = 0  # of these, those in which plain differs from plain somewhere
    listed: int = 0  # of these, those in which a reason covers more than headers that all answers have
    differ: int = 0
    uncompared: int = 0


def rows(verdicts: Sequence[Verdict]) -> list[Row]:
    """By endpoint, in the order in which they come."""
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
    """In how many cases each reason covers something."""
    return Counter(name for each in verdicts for name in each.reasons)
