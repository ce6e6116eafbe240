"""`pdx bench transfer`: real messages through real channels, what an interrupted run keeps, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdx.bench.channels import trial
from pdx.bench.channels.measure import MEMCPY, Row
from pdx.bench.harness import commands as commands_module
from pdx.cli.main import main
from pdx.errors import ChannelBroken, ChannelUnavailable

pytestmark = pytest.mark.timeout(180)  # half a dozen processes that import much, on machines that may be busy
PLUGIN = Path(__file__).parents[2] / "cli" / "plugin"
COMMAND = [sys.executable, "-P", "-m", "pdx.cli.main", "bench", "transfer", "--memory", "8MiB"]
DEADLINE_S = 60.0


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def end(process: subprocess.Popen[str], out: Path) -> dict:
    """What it wrote, when it has ended with everything it started."""
    stdout, stderr = process.communicate(timeout=DEADLINE_S * 2)
    written = out / "transfer.json"
    assert written.exists(), f"{stdout}\n{stderr}"
    check_nothing_is_left(process.pid)
    found = json.loads(written.read_text())
    return {**found["details"], "machine": found["machine"], "stdout": stdout, "stderr": stderr}


def check_nothing_is_left(pid: int) -> None:
    """Neither its processes, which have the folder's name in their command, nor the folder."""
    deadline = time.monotonic() + DEADLINE_S
    while left := [*Path("/dev/shm").glob(f"pdx-bench-{pid}-*"), *commands(f"pdx-bench-{pid}-")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def commands(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:
            continue  # it ended
        if word in text:
            found.append(text)
    return found


def read_until(process: subprocess.Popen[str], words: str) -> None:
    """Lines of its standard error, up to one that begins so."""
    for line in process.stderr:
        if line.startswith(words):
            return
    pytest.fail(f"it ended before it said {words!r}")


@pytest.mark.long
def test_shm_and_tcp_are_measured_beside_memcpy(tmp_path):
    options = ["--channel", "shm", "--channel", "tcp", "--sizes", "1MiB,64KiB", "--repeats", "2", "--in-flight", "1,2"]
    process = start(tmp_path, *options, "--json")
    found = end(process, tmp_path)
    assert process.returncode == 0, found
    cases = {(row["scheme"], row["nbytes"], row["in_flight"]) for row in found["rows"]}
    sizes = (64 << 10, 1 << 20)
    assert cases == {
        *((MEMCPY, size, 1) for size in sizes),
        *((scheme, size, depth) for scheme in ("shm", "tcp") for size in sizes for depth in (1, 2)),
    }
    for row in found["rows"]:
        assert row["gb_s"] > 0
        if row["scheme"] == MEMCPY:
            assert row["raw_gb_s"] is row["ratio"] is None
        else:
            assert row["raw_gb_s"] > 0
            assert row["ratio"] > 0
    assert found["is_complete"]
    assert found["missing"] == {}
    assert found["settings"]["sizes"] == list(sizes)
    assert found["machine"]["cpus"] == os.cpu_count()
    printed = json.loads(found["stdout"])
    assert printed["details"]["rows"] == found["rows"]
    assert (tmp_path / "transfer.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_midway_it_keeps_what_it_has(tmp_path, number):
    sizes = ",".join(str(4096 * step) for step in range(1, 17))
    options = ["--channel", "tcp", "--no-raw", "--sizes", sizes, "--in-flight", "1,2,3,4,5,6,7,8", "--repeats", "3"]
    process = start(tmp_path, *options)
    read_until(process, "[2/")
    process.send_signal(number)
    found = end(process, tmp_path)
    assert process.returncode == 130, found
    assert not found["is_complete"]
    measured = [row for row in found["rows"] if row["scheme"] == "tcp"]
    assert len(measured) < 16 * 8
    assert all(row["raw_gb_s"] is None for row in measured)
    assert (tmp_path / "transfer.png").exists()
    assert "ended early" in found["stdout"]


@pytest.mark.long
def test_nothing_is_left_of_it_when_it_is_killed(tmp_path):
    process = start(tmp_path, "--channel", "tcp", "--no-raw", "--sizes", "4KiB,64KiB", "--in-flight", "1,2,4,8,16")
    read_until(process, "[2/")
    while not commands(f"pdx-bench-{process.pid}-"):  # its folder is there, and nobody yet who would remove it
        time.sleep(0.01)
    process.kill()
    process.communicate()
    check_nothing_is_left(process.pid)


@pytest.mark.long
def test_channels_of_others_are_measured_and_what_fails_is_named(tmp_path):
    names = ("lying", "crashing", "absent", "copying")
    options = [part for name in names for part in ("--channel", name)]
    process = start(tmp_path, *options, "--sizes", "64KiB", "--in-flight", "1", "--repeats", "1")
    found = end(process, tmp_path)
    assert process.returncode == 1
    assert {row["scheme"] for row in found["rows"]} == {MEMCPY, "copying"}
    assert found["missing"].keys() == {"lying", "crashing", "absent"}
    assert "did not bring all bytes; see pdx doctor --channel lying" in found["missing"]["lying"]
    assert "receiver ended with -6; see pdx doctor --channel crashing" in found["missing"]["crashing"]
    assert "no carrier pigeon; buy one" in found["missing"]["absent"]
    assert "no carrier pigeon" in found["stdout"]


def carried_out(monkeypatch, out, **told):
    """Of channels that give a row, unless they raise what is `told` of them; exit status and details."""

    def rows(scheme, _options):
        yield Row(scheme, 4096, 1, None, 1.0, None)
        if scheme in told:
            raise told[scheme]

    monkeypatch.setattr(commands_module, "schemes", lambda: ["shm", "tcp"])
    monkeypatch.setattr(trial, "run", rows)
    options = ["--sizes", "4KiB", "--in-flight", "1", "--memory", "8MiB", "--out", str(out)]
    done = CliRunner().invoke(main, ["bench", "transfer", *options])
    return done.exit_code, json.loads((out / "transfer.json").read_text())["details"]


def test_a_channel_that_is_not_there_is_no_failure_and_one_that_breaks_is(monkeypatch, tmp_path, fonts):
    status, found = carried_out(monkeypatch, tmp_path, shm=ChannelUnavailable("no room"))
    assert (status, found["missing"]["shm"]) == (0, "ChannelUnavailable: no room")
    status, found = carried_out(monkeypatch, tmp_path, shm=ChannelBroken("other bytes"))
    assert (status, found["missing"]["shm"]) == (1, "ChannelBroken: other bytes")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--channel", "pigeon"], "no channel between nodes is named 'pigeon'; there are shm"),
        (["--sizes", "64KiB,large"], "'large' is not a size; write for example"),
        (["--sizes", ",".join(map(str, range(1, 18)))], "17 sizes; give 1 to 16"),
        (["--sizes", "64MiB", "--in-flight", "8"], "8 messages of 64 MiB in flight are more than the 256 MiB"),
        (["--in-flight", "1,many"], "'many' is not a number of messages; write for example --in-flight 1,8"),
        (["--memory", "64TiB"], "and 134217736 are needed: remove what lies there"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path, options, words):
    out = tmp_path / "out"
    done = CliRunner().invoke(main, ["bench", "transfer", "--out", str(out), *options])
    assert done.exit_code in (1, 2)
    assert words in done.output
    assert not out.exists()
