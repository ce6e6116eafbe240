"""`pdx why` against a real node with a disk."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from pdx.cli.main import main
from pdx.memory.arena import GRANULE_BYTES
from pdx.testing.waiting import wait_until
from pdx.wire.hints import NO_HINTS, Hints
from pdx.wire.messages import Admit, Fill, Release

NBYTES = 16 * GRANULE_BYTES


def pdx(*arguments: str):
    return CliRunner().invoke(main, arguments)


def keys(numbers):
    return [number.to_bytes(16, "big") for number in numbers]


@pytest.fixture
def node(start_here, place):
    return start_here(disks=[str(place / "disk")])


@pytest.fixture
def engine(node, attach):
    return attach(node, name="an engine")


def ask(engine, numbers, request, hints=NO_HINTS):
    """As an engine: what is there is leased for a moment, what is missing is put there."""
    answer = engine.ask(Admit(keys(numbers), NBYTES, 4, lease_s=20.0, request=request, wait_s=60.0, hints=hints))
    if answer.granted:
        engine.ask(Fill(answer.granted_slots, layers=4, seal=True))
    if answer.lease:
        engine.ask(Release(answer.lease))
    return answer


def stored(engine):
    return engine.status().counters.get("disk_stored", 0)


def test_requests_are_listed_and_explained_chunk_by_chunk(node, engine, monkeypatch):
    ask(engine, [1, 2], "cmpl-abc-0")
    ask(engine, [1, 2, 3], "cmpl-def-0", Hints("chat"))
    result = pdx("why", "def", "--node", node.address)
    assert result.exit_code == 0, result.output
    assert "request cmpl-def-0 of engine" in result.output
    assert "2 of 3 chunks were hits" in result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert any(line[1:4] == ["0-1", "│", "hit"] and "from" in line for line in lines), result.output
    assert "never stored here under this key" in result.output
    assert "hint session: accepted" in result.output
    monkeypatch.setenv("COLUMNS", "80")
    request = f"chatcmpl-{'0123456789abcdef' * 3}-0-89abcdef"
    ask(engine, [1], request)
    output = pdx("why", "--node", node.address).output
    assert output.index(request) < output.index("cmpl-def-0") < output.index("cmpl-abc-0")
    assert request in output.splitlines(), "in one piece on a narrow terminal"
    found = [json.loads(line) for line in pdx("why", "cmpl", "--json", "--node", node.address).output.splitlines()]
    assert [one["request"] for one in found] == [request, "cmpl-def-0", "cmpl-abc-0"]
    assert found[0]["reasons"][0] | {"text": ""} == {
        "first": 0, "count": 1, "is_hit": True, "kind": "memory", "text": ""
    }  # fmt: skip


def test_what_came_from_a_disk_says_so_and_at_which_rate(node, engine, start_here, attach):
    ask(engine, range(8), "cmpl-abc-0")
    wait_until(lambda: stored(engine) == 8, what="all of it is on the disk")
    engine.close()
    node.close()
    again = start_here(disks=node.config.disks)
    second = attach(again, name="another engine")
    wait_until(lambda: second.status().tiers[0].chunks == 8, what="the files are known again")
    assert ask(second, range(9), "cmpl-def-0").hits == 8
    result = pdx("why", "def", "--json", "--node", again.address)
    found = json.loads(result.output)
    assert [(one["first"], one["count"], one["is_hit"]) for one in found["reasons"]] == [(0, 8, True), (8, 1, False)]
    assert re.fullmatch(r"from disk at \d+\.\d\d GB/s, \d\.\d s ago", found["reasons"][0]["text"])
    assert found["waited_s"] > 0


def test_a_request_that_is_not_known_is_an_error_that_says_where_to_look(node, engine):
    for request, before, words in (
        ("", False, "no request has asked the node"),
        ("abc", False, "nobody has asked it yet"),
        ("xyz", True, "it remembers 1 others); either it has no full block, or its engine runs without the node"),
    ):
        if before:
            ask(engine, [1], "cmpl-abc-0")
        result = pdx("why", *([request] if request else []), "--node", node.address)
        assert result.exit_code == 1
        assert words in result.output
        assert f"{request!r}" in result.output if request else "''" not in result.output


def test_a_tail_that_was_there_is_one_of_the_chunks_that_were_sought(node, engine):
    for request in ("cmpl-abc-0", "cmpl-def-0"):
        tail = Admit(keys([1, 2]), NBYTES, 4, tail_nbytes=NBYTES // 2, part="keeps", lease_s=20.0, request=request)
        answer = engine.ask(tail)
        if answer.granted:
            engine.ask(Fill(answer.granted_slots, layers=4, seal=True))
        if answer.lease:
            engine.ask(Release(answer.lease))
    found = json.loads(pdx("why", "def", "--json", "--node", node.address).output)
    assert found["hits"] <= found["chunks"]
    assert found["hits"] == answer.hits
