"""`pdx doctor`: real transfers through channels of ours and of a package beside us, in processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from node_harness import attached
from rich.console import Console

from pdx.cli import doctor as doctor_module
from pdx.cli.doctor import EngineFact, Finding, Report, view
from pdx.cli.loopback import Rate, Trial
from pdx.cli.machine import (
    Fact,
    FindingName,
    files,
    huge_pages,
    memlock,
    rdma,
    rdma_devices,
    shared_memory,
    ucx_transports,
)
from pdx.cli.main import main
from pdx.testing.channel_stage import HostFile
from pdx.transports.registry import schemes

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Has a shell script run instead of each program that the doctor starts: `$3` is the module, the rest follows."""

    def stand_in(script):
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return stand_in


@pytest.fixture
def strange(monkeypatch, programs):
    """The package with strange channels is installed, here and in child processes. What else there is of UCX and GPUs
    is not looked for, which takes seconds."""
    monkeypatch.syspath_prepend(PLUGIN)
    programs(f'[ "$4" = measure ] && exec {sys.executable} "$@"; echo "[]"')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # PLUGIN is the first


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory(monkeypatch):
    monkeypatch.setattr(doctor_module, "REGION_BYTES", doctor_module.SMALL_REGION_BYTES)
    with tempfile.TemporaryDirectory(prefix="pdx-test-", dir=doctor_module.SHM) as folder:  # others run a doctor, too
        monkeypatch.setattr(doctor_module, "SHM", Path(folder))
        yield
        assert not list(Path(folder).iterdir())


def examine(*names: str, timeout: str = "20") -> tuple[int, Report]:
    """Exit status and report of `pdx doctor --json` on these channels."""
    options = [part for name in names for part in ("--channel", name)]
    result = CliRunner().invoke(main, ["doctor", "--json", "--timeout", timeout, *options])
    return result.exit_code, msgspec.json.decode(result.stdout, type=Report)


def trial(report: Report, scheme: str) -> Trial:
    (found,) = [each.trial for each in report.channels if each.scheme == scheme]
    return found


def named(report: Report) -> dict[str, FindingName | None]:
    """What is wrong with each channel."""
    return {each.scheme: each.finding for each in report.channels}


@pytest.mark.parametrize(
    "schemes",
    [("tcp", "shm"), pytest.param(("nixl",), marks=pytest.mark.long), pytest.param(("ucx",), marks=pytest.mark.long)],
)
def test_our_own_channels_work_and_all_that_is_not_well_has_a_name(schemes):
    status, report = examine(*schemes)
    for scheme in schemes:
        found = trial(report, scheme)
        if scheme in ("nixl", "ucx") and found.state == "unavailable":
            continue
        assert (status, found.state, named(report)[scheme]) == (0, "ok", None), found
        module = f"{scheme}.region" if scheme in ("nixl", "ucx") else scheme
        assert found.provider == f"pdx.transports.{module}:{scheme.capitalize()}Region"
        assert found.rate.best_gb_s > 0
    assert report.memcpy.best_gb_s > 0
    assert [fact.name for fact in report.machine if not fact.is_ok and not fact.finding] == []


@pytest.mark.usefixtures("strange")
def test_a_broken_channel_of_another_package_harms_no_other_one():
    status, report = examine("crashing", "unloadable", "lying", "copying")
    assert status == 1
    assert (trial(report, "copying").state, trial(report, "copying").provider) == ("ok", "strange_channels:Copying")
    crashed = trial(report, "crashing")
    assert "pigeon down" in crashed.why or "the peer process ended" in crashed.why
    assert "strange_channels:Nothing" in trial(report, "unloadable").why
    assert "other bytes arrived" in trial(report, "lying").why
    assert named(report) == {
        "crashing": FindingName.CHANNEL_BROKEN,  # the receiving process, not the one that tries
        "unloadable": FindingName.CHANNEL_UNLOADABLE,
        "lying": FindingName.CHANNEL_BROKEN,
        "copying": None,
    }


def test_a_side_has_its_memory_before_it_is_written_to():
    """Where /dev/shm is full this says so, and no write ends the process."""
    side = HostFile(64 << 10)
    try:
        assert side.path.stat().st_blocks * 512 == 64 << 10
    finally:
        side.close()


@pytest.mark.usefixtures("strange")
def test_a_channel_that_hangs_is_ended_with_all_its_processes():
    result = CliRunner().invoke(main, ["doctor", "--json", "--timeout", "1", "--channel", "hanging"])
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["channels"]
    assert "within 1 s" in found["trial"]["why"]
    assert found["finding"] == "channel-hangs"
    assert not [each for each in commands() if f"hanging\0{doctor_module.SHM}/" in each]


def commands() -> Iterator[str]:
    """Of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text()


@pytest.mark.usefixtures("strange")
def test_what_cannot_work_here_is_said_with_what_would_help():
    result = CliRunner().invoke(main, ["doctor", "--channel", "absent"], env={"COLUMNS": "120"})
    assert result.exit_code == 1
    for words in ("not here", "no carrier pigeon", "buy one", "memcpy", "/dev/shm", "memlock", "RDMA"):
        assert words in result.output, result.output
    assert "see troubleshooting: channel-unavailable" in result.output
    assert "explained in PDX's documentation, on the page Troubleshooting" in result.output


def test_what_cannot_work_here_matters_only_where_it_was_asked_for(programs):
    trials = {state: msgspec.json.encode(Trial(state)).decode() for state in ("ok", "unavailable", "broken")}
    for one, others, named, is_well in (
        ("unavailable", "ok", (), True),
        ("broken", "ok", (), False),
        ("unavailable", "unavailable", (), False),
        ("unavailable", "ok", ("shm", "tcp"), False),
    ):
        said = f"""[ "$5" = shm ] && echo '{trials[one]}' || echo '{trials[others]}'"""
        programs(f'if [ "$4" = measure ]; then {said}; else echo "[]"; fi')
        status, report = examine(*named)
        assert (status, report.is_well) == (0 if is_well else 1, is_well)
        found = {each.scheme: each.trial.state for each in report.channels}
        assert found == {scheme: one if scheme == "shm" else others for scheme in named or schemes()}


@pytest.mark.parametrize(("status", "end"), [(None, "exec sleep 60"), (1, "exit 1"), (-11, "kill -SEGV $$")])
def test_a_process_that_fails_while_it_looks_ends_nothing_else(programs, status, end):
    programs(end)
    timeout = "0.2" if status is None else "20"
    result, report = examine("shm", timeout=timeout)
    assert result == 1
    (found,) = report.channels
    assert found.finding is (FindingName.CHANNEL_HANGS if status is None else FindingName.CHANNEL_CRASHED)
    assert ("within 0.2 s" if status is None else f"status {status}") in found.trial.why
    (gpu,) = [fact for fact in report.machine if fact.name == "GPU"]
    assert (gpu.is_ok, gpu.finding) == (False, FindingName.GPU_LOOK_FAILED)
    assert ("no answer within 0.2 s" if status is None else f"ended with {status}") in gpu.found
    assert FindingName.UCX_UNAVAILABLE in [fact.finding for fact in report.machine]


@pytest.mark.parametrize("scheme", ["shm", "cuda_ipc", "nixl", "ucx"])
def test_each_of_ours_that_is_not_here_has_a_name_of_its_own(programs, scheme):
    programs(f"echo '{msgspec.json.encode(Trial('unavailable', 'no', 'install it', 'some:Class')).decode()}'")
    found = doctor_module.examine_channel(scheme, 4096, 20.0)
    assert found.finding == f"{scheme.replace('_', '-')}-unavailable"


def test_the_engines_of_a_node_are_listed_with_their_groups_and_shards_and_what_keeps_them_apart(node_here):
    shape = {"model": "m", "num_shards": "4"}
    window = {"kind": "window", "layers": "0,2", "window": "512"}
    groups = {block: [{"layers": "1,3"}, window | {"block_tokens": block}] for block in ("16", "32")}
    with contextlib.ExitStack() as stack:
        for settings in (
            {"kind": "worker", "engine": "one", "shard": 0, "shards": 2},
            {"kind": "worker", "engine": "one", "shard": 2, "shards": 2},
            {"kind": "scheduler", "engine": "one", "shape": shape, "groups": groups["16"]},
            {"kind": "worker", "engine": "two", "shard": 0, "shards": 1},
            {"kind": "worker", "engine": "two", "shard": 0, "shards": 0},
            {"kind": "scheduler", "engine": "two", "shape": shape, "groups": groups["32"]},
        ):
            stack.enter_context(attached(node_here.address, **settings))
        engines = doctor_module.engines_at(node_here.address)
    name = "the window group (layers 0,2; 512 tokens)"
    pid = os.getpid()
    assert engines == [
        EngineFact(
            "one",
            ["the full group (layers 1,3)", name],
            4,
            [f"pid {pid} writes shards 0 to 1", f"pid {pid} writes shards 2 to 3"],
        ),
        EngineFact(
            "two",
            ["the full group (layers 1,3)", name],
            4,
            [f"pid {pid} writes shard 0", f"pid {pid} reads shard 0"],
            f"with engine 'one': block_tokens '32' and '16' (--block-size) of {name}",
            FindingName.ENGINES_APART,
        ),
    ]
    output = shown(Report(True, [], Rate(1, 1), [], engines), width=250)
    for words in (name, "writes shards 2 to 3", "shares no chunks with engine 'one'", "engines-apart"):
        assert words in output, output


def test_a_node_that_was_named_has_to_answer_and_that_of_the_host_need_not_be_there(place, monkeypatch):
    monkeypatch.setenv("PDX_NODE", f"ipc://{place}/none.sock")
    monkeypatch.setattr(doctor_module, "LOOK_S", 0.1)
    assert doctor_module.engines_at(None) == []
    monkeypatch.setattr(doctor_module, "NAMED_S", 0.1)
    result = CliRunner().invoke(main, ["doctor", "--node", f"ipc://{place}/none.sock"])
    assert result.exit_code == 1
    assert "none.sock" in result.output


def shown(report, width=150):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(report))
    return console.export_text()


def test_what_is_well_is_not_explained_and_markup_is_shown_as_it_is():
    report = Report(True, [Finding("x", Trial("ok", rate=Rate(1, 1)))], Rate(1, 1), [Fact("memlock", "unlimited")])
    assert "troubleshooting" not in shown(report)
    text = "pip install 'redis[hiredis]'"
    report = Report(True, [Finding("x", Trial("unavailable", "no", text))], Rate(1, 1), [Fact("n", text, False, text)])
    assert shown(report).count(text) == 3


# ---- the machine ----------------------------------------------------------------------------


def test_what_a_machine_may_lack():
    for fact in (
        memlock(resource.RLIM_INFINITY, False, has_rdma=True),
        memlock(8 << 20, True, has_rdma=True),
        memlock(8 << 20, False, has_rdma=False),
        files(resource.RLIM_INFINITY),
        files(4096),
        ucx_transports(["rc_mlx5/mlx5_0:1", "tcp/lo"], {}, has_rdma=True),
    ):
        assert (fact.is_ok, fact.finding) == (True, None)
    assert ucx_transports([], {}, has_rdma=True).finding is FindingName.UCX_UNAVAILABLE
    assert "UCX_TLS=tcp" in ucx_transports(["tcp/lo"], {"UCX_TLS": "tcp"}, has_rdma=False).found
    for fact, finding, found, fix in (
        (memlock(8 << 20, False, has_rdma=True), FindingName.MEMLOCK_SMALL, "8.0 MiB", "--ulimit memlock=-1"),
        (files(1024), FindingName.FILES_FEW, "1,024", "ulimit -Hn"),
        (ucx_transports(["tcp/lo"], {}, has_rdma=True), FindingName.UCX_NO_RDMA, "tcp/lo", "check UCX_TLS"),
    ):
        assert (fact.is_ok, fact.finding) == (False, finding)
        assert found in fact.found
        assert fix in fact.fix


def test_rdma_devices_and_their_ports(tmp_path):
    assert rdma_devices(tmp_path / "none") == {}
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    devices = rdma_devices(tmp_path)
    assert devices == {"mlx5_0": ["ACTIVE"], "mlx5_1": ["DOWN"]}
    good = rdma(devices, {"/dev/infiniband/uverbs0": True})
    assert (good.is_ok, good.finding) == (True, None)
    closed = rdma(devices, {"/dev/infiniband/uverbs0": False})
    assert (closed.is_ok, closed.finding) == (False, FindingName.RDMA_NO_ACCESS)
    down = rdma({"mlx5_1": ["DOWN"]}, {})
    assert "no port is active" in down.fix
    assert (down.is_ok, down.finding) == (False, FindingName.RDMA_PORT_DOWN)
    none = rdma({}, {})
    assert (none.is_ok, none.finding) == (True, FindingName.RDMA_NONE)


NEVER = "always within_size advise [never] deny force\n"
ADVISE = "always within_size [advise] never deny force\n"
PLAIN = "tmpfs /dev/shm tmpfs rw,relatime,size=100k 0 0\n"
ASKED = "tmpfs /dev/shm tmpfs rw,relatime,size=100k,huge=advise 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "setting", "said", "finding"),
    [
        (ASKED, NEVER, "(/dev/shm has huge=advise)", None),
        (PLAIN + ASKED, NEVER, "(/dev/shm has huge=advise)", None),
        (PLAIN, NEVER.replace("[never]", "never").replace("force", "[force]"), "(shmem_enabled is force)", None),
        (ASKED.replace("advise", "never"), NEVER, "(/dev/shm has huge=never)", FindingName.HUGE_PAGES_NONE),
        (ASKED + PLAIN, NEVER, "(/dev/shm has huge=never)", FindingName.HUGE_PAGES_NONE),
        (PLAIN, ADVISE, "never)", FindingName.HUGE_PAGES_NONE),
        (ASKED, NEVER.replace("[never] deny", "never [deny]"), "is deny)", FindingName.HUGE_PAGES_NONE),
        (None, None, "(/dev/shm has huge=never)", FindingName.HUGE_PAGES_NONE),
    ],
)
def test_whether_arenas_get_huge_pages_is_said(tmp_path, mounts, setting, said, finding):
    """The mount says so: `shmem_enabled` is for shared memory that has none."""
    if mounts is not None:
        (tmp_path / "mounts").write_text(mounts)
    if setting is not None:
        (tmp_path / "shmem_enabled").write_text(setting)
    fact = huge_pages(tmp_path / "mounts", tmp_path / "shmem_enabled")
    assert said in fact.found
    assert (fact.is_ok, fact.finding) == (True, finding)


def test_a_small_shared_memory_is_said(monkeypatch):
    stats = os.statvfs_result([4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255])  # Docker's 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda path: stats)
    fact = shared_memory()
    assert not fact.is_ok
    assert fact.finding is FindingName.SHM_SMALL
    assert fact.found.startswith("64.0 MiB")
    assert "--shm-size" in fact.fix
