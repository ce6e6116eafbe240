"""The report of `pdx parity`: a table by endpoint, the reasons, and each difference with a command that repeats it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pdx.bench.parity.essence import ABSENT, path_text
from pdx.bench.parity.essence import Path as Place
from pdx.bench.parity.reasons import REASONS
from pdx.bench.parity.records import Answer, Recording
from pdx.bench.parity.run import Row, Verdict, covered, rows
from pdx.cli.tables import table
from pdx.errors import ConfigError
from pdx.extras import own_version
from pdx.telemetry.faults import printable

_SHOWN = 40  # differing cases on the terminal; the JSON file has all
_CHARACTERS = 160  # per answer
_PATHS = 5  # per case
_COLUMNS = (">cases", ">equal", ">loose", ">listed", ">differ", ">not compared")


def view(recording: Recording, verdicts: Sequence[Verdict], url: str) -> RenderableType:
    """The whole report, for a terminal."""
    counts = rows(verdicts)
    total = Row(endpoint="all", **{name: sum(getattr(row, name) for row in counts) for name in _NUMBERS})
    cells = [(row.endpoint, *(str(getattr(row, name) or "") for name in _NUMBERS)) for row in (*counts, total)]
    title = f"{url} beside {recording.url}; of the equal ones, some are loose or listed"
    parts: list[RenderableType] = [table(title, ("endpoint", *_COLUMNS), cells, is_wide=True)]
    parts.append(_loose(verdicts))
    if found := covered(verdicts):
        listed = [(each.name, str(found[each.name]), each.sentence) for each in REASONS if found[each.name]]
        parts.append(table("listed differences", ("reason", ">cases", "why"), listed, is_wide=True))
    parts += [f"not run: {name} ({why})" for name, why in recording.unasked.items()]
    parts += [f"not compared: {each.case.name} (plain: {each.uncompared})" for each in verdicts if each.uncompared]
    differing = [each for each in verdicts if each.differences]
    for each in differing[:_SHOWN]:
        parts += _difference(each, url)
    if len(differing) > _SHOWN:
        parts.append(f"and {len(differing) - _SHOWN} more: see --json")
    parts.append(f"\n{len(differing)} of {len(verdicts)} answers differ without a reason")
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))


_NUMBERS = ("cases", "equal", "loose", "listed", "differ", "uncompared")


def _loose(verdicts: Sequence[Verdict]) -> str:
    """A line on where plain differs from itself, most frequent places first."""
    random = sum(each.case.is_random for each in verdicts)
    places = Counter(_where(path) for each in verdicts if not each.case.is_random for path in each.loose)
    said = ", ".join(f"{name} ({count})" for name, count in places.most_common(8)) or "nowhere"
    loose = sum(bool(each.loose) for each in verdicts)
    return (
        f"calibration: of {loose} answers parts are compared by their form: {random} draw their tokens, "
        f"in {loose - random} plain differed from plain: {said}"
    )


def _difference(verdict: Verdict, url: str) -> Iterator[str]:
    yield f"\n{verdict.case.name}"
    for found in verdict.differences[:_PATHS]:
        yield f"  {_where(found.path)}"
        yield f"    plain: {_short(found.want)}"
        yield f"    got:   {_short(found.got)}"
    if len(verdict.differences) > _PATHS:
        yield f"  and {len(verdict.differences) - _PATHS} more places"
    yield f"  {verdict.case.shell_command(url)}"


def _where(path: Place) -> str:
    return printable(path_text(path), _CHARACTERS)  # field names come from a server


def _short(value: Any) -> str:
    said = value if value == ABSENT else json.dumps(value, ensure_ascii=False)
    return printable(
        said if len(said) <= _CHARACTERS else f"{said[:_CHARACTERS]} … ({len(said)} characters)", 4 * _CHARACTERS
    )


def write(path: Path, recording: Recording, verdicts: Sequence[Verdict], url: str) -> None:
    """Write all findings as JSON.

    :raises ConfigError: the file cannot be written.
    """
    report = {
        "version": own_version(),
        "plain": recording.url,
        "url": url,
        "model": recording.model,
        "seed": recording.seed,
        "endpoints": rows(verdicts),
        "reasons": covered(verdicts),
        "not run": recording.unasked,
        "cases": [
            _case(each, url) for each in verdicts if each.differences or each.reasons or each.loose or each.uncompared
        ],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, default=msgspec.to_builtins))  # escapes lone surrogates
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _case(verdict: Verdict, url: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": verdict.case.name,
        "loose": [path_text(path) for path in verdict.loose],
        "reasons": verdict.reasons,
    }
    if verdict.uncompared:
        found["not compared"] = verdict.uncompared
    if verdict.differences:
        found["differences"] = [
            {"path": path_text(each.path), "plain": each.want, "got": each.got} for each in verdict.differences
        ]
        found["again"] = verdict.case.shell_command(url)
        found["request"] = (verdict.case.content or b"").decode("utf-8", "replace")
        found |= {"plain": _answer(verdict.plain), "got": _answer(verdict.got)}
    return found


def _answer(answer: Answer) -> dict[str, Any]:
    return {**msgspec.to_builtins(answer), "content": answer.content.decode("utf-8", "replace")}


def show(console: Console, recording: Recording, verdicts: Sequence[Verdict], url: str) -> None:
    console.print(view(recording, verdicts, url), soft_wrap=True)
