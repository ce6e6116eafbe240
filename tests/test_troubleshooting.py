"""docs/troubleshooting.md has a row for each thing that `pdx doctor` finds, and no other ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdx.cli.machine import FindingName

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
SYMPTOMS, FINDINGS = TEXT.split("\n## What pdx doctor finds\n")
TELLING = re.compile(r"^```\n(?:.*\n)*?(?:pdx|curl) .*\n(?:.*\n)*?```$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """By heading of the third level."""
    found = re.split(r"^### (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_every_finding_has_a_row_that_says_what_it_means_and_what_to_do():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in FINDINGS.splitlines() if "| `" in line[:3]
    ]
    assert sorted(name.strip("`") for name, _, _ in rows) == sorted(FindingName)
    assert [name for name, means, do in rows if not means or not do] == []


def test_every_symptom_has_a_command_that_tells():
    found = sections(SYMPTOMS)
    assert len(found) >= 6
    assert [heading for heading, text in found.items() if not TELLING.search(text)] == []


@pytest.mark.parametrize("name", sorted(FindingName))
def test_every_name_is_given_to_something(name):
    sources = "".join((ROOT / "pdx" / "cli" / f"{module}.py").read_text() for module in ("doctor", "machine", "gpus"))
    assert f"FindingName.{name.name}" in sources


def test_names_are_as_anchors_are():
    assert [name for name in FindingName if not re.fullmatch(r"[a-z]+(-[a-z]+)+", name)] == []


def test_counters_and_messages_that_it_quotes_are_those_of_the_program():
    """What a reader would search for."""
    sources = "".join(path.read_text() for folder in ("pdx", "proxy") for path in (ROOT / folder).rglob("*.py"))
    counters = set(re.findall(r"`(degraded_\w+)`", TEXT))
    assert len(counters) > 2
    assert [name for name in sorted(counters) if f'"{name.removeprefix("degraded_")}"' not in sources] == []
    for quoted in (
        "already owns",
        "no engine that could serve this request can be reached",
        "between all",
        "shared by file descriptors",
    ):
        assert quoted in TEXT
        assert quoted in sources
