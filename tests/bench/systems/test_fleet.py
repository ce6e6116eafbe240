"""The fleet with systems that only say what is done to them: who is started, ended and in which order."""

import pytest

from pdx.bench.systems import fleet as fleet_module
from pdx.bench.systems.fleet import Fleet, engine_bytes, engines_that_fit
from pdx.bench.systems.names import Bed, CannotRun, Running, System

GIB = 1 << 30


class Ran(Running):
    def __init__(self, system):
        self.system, self.words = system, ""
        self.url = self.prefill_url = self.decode_url = ""

    def pause(self):
        self.system.journal.append(f"pause {self.system.name}")

    def resume(self):
        self.system.journal.append(f"resume {self.system.name}")

    def died(self):
        return self.words

    def close(self):
        self.system.journal.append(f"-{self.system.name}")
        if self.system.fails_to_close:
            raise OSError(f"{self.system.name} cannot be ended")


class Recorded(System):
    def __init__(self, journal, name, engines=2, *, is_pdx=False, why=""):
        self.journal, self.name, self.engines, self.is_pdx, self.why = journal, name, engines, is_pdx, why
        self.fails_to_close = False
        self.trace = None

    def why_not(self):
        return ""

    def commands(self, bed):
        return []

    def start(self, bed, *, trace=None):
        self.trace = trace
        if self.why:
            raise CannotRun(self.why)
        self.journal.append(f"+{self.name}")
        return Ran(self)


@pytest.fixture
def bed(tmp_path):
    return Bed(tmp_path, "m", (), {"VLLM_CPU_KVCACHE_SPACE": "1"}, tmp_path, 100, "512MiB")


@pytest.fixture
def journal():
    return []


def systems(journal, **engines):
    return [Recorded(journal, name, count) for name, count in engines.items()]


def test_systems_that_fit_stay(bed, journal):
    with Fleet(bed, systems(journal, a=2, b=2, c=1), 5) as fleet:
        assert fleet.holds_all
        first = fleet.get("a")
        for name in ("b", "c", "b", "a"):
            fleet.get(name)
        assert fleet.get("a") is first
        assert journal == ["+a", "+b", "+c"]
    assert sorted(journal[3:]) == ["-a", "-b", "-c"]


def test_who_polls_does_not_run_beside_others(bed, journal, monkeypatch):
    monkeypatch.setattr(fleet_module.time, "sleep", lambda seconds: journal.append(f"{seconds} s"))
    quiet, polling = systems(journal, quiet=2, polling=2)
    polling.polls_idle = True
    with Fleet(bed, [quiet, polling], 4) as fleet:
        for name in ("polling", "quiet", "polling", "polling"):
            fleet.get(name)
        fleet.rest()
        assert journal == ["+polling", "pause polling", "+quiet", "resume polling", "1.5 s", "pause polling"]


def test_the_least_recently_used_make_room(bed, journal):
    with Fleet(bed, systems(journal, a=2, b=1, c=1, d=2), 4) as fleet:
        assert not fleet.holds_all
        for name in ("a", "b", "c", "a", "d"):
            fleet.get(name)
        assert fleet.running == ["a", "d"]
        assert journal == ["+a", "+b", "+c", "-b", "-c", "+d"]


def test_a_system_that_has_died_is_said_and_ended(bed, journal):
    with Fleet(bed, systems(journal, a=1), 1) as fleet:
        fleet.get("a").words = "engine ended with status 9"
        with pytest.raises(CannotRun, match="status 9"):
            fleet.get("a")
        assert (fleet.running, journal) == ([], ["+a", "-a"])
        fleet.get("a")
    assert journal == ["+a", "-a", "+a", "-a"]


def test_all_are_ended_even_if_one_cannot_be(bed, journal):
    members = systems(journal, a=1, b=1, c=1)
    members[1].fails_to_close = True
    fleet = Fleet(bed, members, 3)
    for name in "abc":
        fleet.get(name)
    with pytest.raises(OSError, match="b cannot be ended"):
        fleet.close()
    assert sorted(journal[3:]) == ["-a", "-b", "-c"]
    fleet.close()
    assert len(journal) == 6


def test_engines_that_fit(bed, monkeypatch):
    monkeypatch.setattr(fleet_module, "is_cpu_build", lambda: True)
    assert engine_bytes(bed) == fleet_module.ENGINE_BYTES + GIB + GIB // 2
    for room, count in ((0, 0), (engine_bytes(bed) - 1, 0), (engine_bytes(bed) * 3, 3)):
        monkeypatch.setattr(fleet_module, "available_bytes", lambda room=room: room + fleet_module.SPARE_BYTES)
        assert engines_that_fit(bed) == count
