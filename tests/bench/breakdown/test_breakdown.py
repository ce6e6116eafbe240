"""The runner of the breakdown with systems that are not there: fair turns, failures, what is kept of a run."""

import pytest
from fake_systems import FakeSystem

from pdx.bench.breakdown import records
from pdx.bench.breakdown.records import Result
from pdx.bench.breakdown.turns import Breakdown, Settings
from pdx.bench.harness.prompts import Bodies, Prompts
from pdx.bench.systems.fleet import Fleet
from pdx.telemetry import trace

SETTINGS = {
    "tokens": (20, 50),
    "concurrency": (1, 3),
    "output_tokens": 4,
    "rounds": 2,
    "warmups": 1,
}


class Progress:
    def __init__(self):
        self.planned, self.reached, self.lines = 0.0, 0.0, []

    def begin(self, amount):
        self.planned = amount

    def set_status(self, what):
        self.lines.append(what)

    def advance(self, amount, line):
        self.reached += amount
        self.lines.append(line)

    def note(self, line):
        self.lines.append(line)


class CountingFleet(Fleet):
    """Counts how often nobody was to take processor time."""

    num_pauses = 0

    def pause_pollers(self, but=""):
        self.num_pauses += not but
        super().pause_pollers(but)


class Run:
    """One breakdown of fake systems; `run()` returns its result."""

    def __init__(self, folder, names=("pdx", "nixl", "plain"), *, holds_all=True, **settings):
        self.journal = []
        self.systems = {name: FakeSystem(name, self.journal) for name in names}
        self.path = folder / "result.json"
        self.progress = Progress()
        self.copies = []
        self.settings = Settings(**SETTINGS | settings)
        self._folder = folder
        self._holds_all = holds_all

    def run(self):
        for name in self.systems:
            (self._folder / name).mkdir(mode=0o700)
            trace.switch(self._folder / name, True)
        engines = 5 if self._holds_all else 2
        fleet = self.fleet = CountingFleet(None, list(self.systems.values()), engines, traces=self._folder)
        result = Result(machine={}, model={"kv_bytes_per_token": 8}, settings={}, systems={}, not_run={})
        try:
            Breakdown(
                result,
                self.path,
                self.settings,
                systems=self.systems,
                fleet=fleet,
                bodies=Bodies(Prompts(None), "tiny", self.settings.output_tokens),
                traces=self._folder,
                progress=self.progress,
                copy_ms=lambda nbytes: self.copies.append(nbytes) or 1.5,
                is_gather_beside=False,
            ).run()
        finally:
            fleet.close()
        return result


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_whole_run(folder):
    run = Run(folder)
    result = run.run()
    assert result.is_complete
    assert result.not_run == {}
    assert len(result.requests) == 2 * 3 * 2 * (1 + 3)
    assert records.Result.load(run.path) == result
    assert {request.is_same for request in result.requests if request.system != "plain"} == {True}
    assert {request.is_same for request in result.requests if request.system == "plain"} == {None}
    assert [copy.nbytes for copy in result.copies] == ([20 * 8] * 6 + [50 * 8] * 6) * 2
    assert run.copies == [copy.nbytes for copy in result.copies]
    assert run.fleet.num_pauses == len(run.copies)  # nobody takes time meanwhile
    assert run.progress.reached == run.progress.planned > 0


def test_all_systems_get_the_same_prompts_and_none_twice(folder):
    run = Run(folder)
    run.run()
    asked = {name: [prompt for system, prompt in run.journal if system == name] for name in run.systems}
    assert set(asked["pdx"]) == set(asked["nixl"]) == set(asked["plain"])
    assert all(len(prompts) == len(set(prompts)) for prompts in asked.values())
    assert len({prompt[:8] for prompt in asked["pdx"]}) == len(asked["pdx"])


def test_what_is_known_of_a_request(folder):
    result = Run(folder).run()
    of = {name: [each for each in result.requests if each.system == name] for name in ("pdx", "nixl", "plain")}
    assert all(each.parts is not None and each.engines is not None for each in result.requests)
    assert [each.engines.prefill_ms for each in result.requests] == pytest.approx([10] * len(result.requests))
    assert {each.parts.gather.exposed_ms for each in of["pdx"]} == {1}
    assert {each.parts.scatter.exposed_ms for each in of["pdx"]} == {2}
    assert all(20 <= each.decode_first_ms < 10_000 for each in of["pdx"])
    assert all(40 <= each.decode_first_ms < 10_000 for each in of["nixl"])
    assert {each.decode_first_ms for each in of["plain"]} == {None}
    assert {each.parts.is_mean for each in of["nixl"] if each.concurrency == 3} == {True}
    alone = [each for each in result.traces if each.spans]
    assert [(each.system, each.prompt_tokens) for each in alone] == [("pdx", 20), ("pdx", 50)]
    assert len(result.traces) == 2 * 2  # the moments of every PDX request that was alone


def test_every_start_is_followed_by_warm_ups_that_do_not_count(folder):
    run = Run(folder, holds_all=False, warmups=2)
    result = run.run()
    assert {len(system.started) for system in run.systems.values()} == {2}
    assert run.progress.lines.count("starting nixl") == 2
    asked = sum(system == "pdx" for system, _ in run.journal)
    assert asked == 2 * 2 * (1 + 3) + 2 * 2 * 3  # batches of the largest kind
    assert len(result.requests) == 2 * 3 * 2 * (1 + 3)


def test_an_answer_of_another_length_is_a_failure(folder, monkeypatch):
    run = Run(folder, ("plain",), output_tokens=4)
    monkeypatch.setattr("fake_systems.answer", lambda prompt, tokens: "abc")
    assert "asked for 20 prompt tokens and 4 of answer, got 20 and 3" in run.run().not_run["plain"]
