"""`pdx doctor`: real transfers through channels of ours and of a package beside us, in processes of their own."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from fake_cuda import fake_cuda

from pdx.cli import doctor as doctor_module
from pdx.cli import gpus
from pdx.cli.doctor import Finding, Report, view
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

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture
def strange(monkeypatch):
    """The package with strange channels is installed, here and in child processes."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # PLUGIN is the first


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory():
    yield
    assert not list(Path("/dev/shm").glob("pdx-doctor-*"))


def examine(*names: str) -> tuple[int, Report]:
    """Exit status and report of `pdx doctor --json` on these channels."""
    options = [part for name in names for part in ("--channel", name)]
    result = CliRunner().invoke(main, ["doctor", "--json", "--timeout", "20", *options])
    return result.exit_code, msgspec.json.decode(result.stdout, type=Report)


def trial(report: Report, scheme: str) -> Trial:
    (found,) = [each.trial for each in report.channels if each.scheme == scheme]
    return found


def named(report: Report) -> dict[str, FindingName | None]:
    """What is wrong with each channel."""
    return {each.scheme: each.finding for each in report.channels}


@pytest.mark.parametrize("scheme", ["tcp", "shm", "nixl", "ucx"])
def test_our_own_channels_work(scheme):
    status, report = examine(scheme)
    if scheme in ("nixl", "ucx") and trial(report, scheme).state == "unavailable":
        assert status == 1
        pytest.skip(trial(report, scheme).why)
    assert trial(report, scheme).state == "ok", trial(report, scheme)
    assert status == 0
    module = f"{scheme}.region" if scheme in ("nixl", "ucx") else scheme
    assert trial(report, scheme).provider == f"pdx.transports.{module}:{scheme.capitalize()}Region"
    assert trial(report, scheme).rate.best_gb_s > 0
    assert named(report) == {scheme: None}
    assert report.memcpy.best_gb_s > 0


@pytest.mark.usefixtures("strange")
def test_a_channel_of_another_package_is_tried_too():
    status, report = examine("copying")
    assert status == 0
    assert trial(report, "copying").state == "ok", trial(report, "copying")
    assert trial(report, "copying").provider == "strange_channels:Copying"


@pytest.mark.usefixtures("strange")
def test_a_broken_channel_harms_no_other_one_and_makes_the_status_1():
    status, report = examine("crashing", "unloadable", "lying", "copying")
    assert status == 1
    assert trial(report, "copying").state == "ok"
    crashed = trial(report, "crashing")
    assert crashed.state == "broken"
    assert "pigeon down" in crashed.why or "receiving process ended" in crashed.why
    assert "strange_channels:Nothing" in trial(report, "unloadable").why
    assert "other bytes arrived" in trial(report, "lying").why
    assert named(report) == {
        "crashing": FindingName.CHANNEL_BROKEN,  # the receiving process, not the one that tries
        "unloadable": FindingName.CHANNEL_UNLOADABLE,
        "lying": FindingName.CHANNEL_BROKEN,
        "copying": None,
    }


@pytest.mark.usefixtures("strange")
def test_a_channel_that_hangs_is_ended_with_all_its_processes():
    result = CliRunner().invoke(main, ["doctor", "--json", "--timeout", "2", "--channel", "hanging"])
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["channels"]
    assert "within 2 s" in found["trial"]["why"]
    assert found["finding"] == "channel-hangs"
    assert not [pid for pid in pids() if "pdx.cli.loopback" in command(pid) and "hanging" in command(pid)]


def pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.usefixtures("strange")
def test_what_cannot_work_here_matters_only_where_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(doctor_module, "schemes", lambda: ["absent", "copying"])
    status, report = examine()
    assert status == 0
    assert [each.scheme for each in report.channels] == ["absent", "copying"]
    assert trial(report, "absent") == Trial("unavailable", "no carrier pigeon", "buy one", "strange_channels:Absent")
    assert examine("absent", "copying")[0] == 1
    assert named(report) == {"absent": FindingName.CHANNEL_UNAVAILABLE, "copying": None}


def test_a_process_that_ends_while_it_tries_is_a_crash(monkeypatch):
    monkeypatch.setattr(doctor_module, "_run", lambda command, timeout_s, errors: (b"", -11))
    found = doctor_module.examine_channel("shm", 4096, 1.0)
    assert found.finding is FindingName.CHANNEL_CRASHED
    assert "status -11" in found.trial.why


@pytest.mark.parametrize("scheme", ["shm", "cuda_ipc", "nixl", "ucx"])
def test_each_of_ours_that_is_not_here_has_a_name_of_its_own(monkeypatch, scheme):
    said = msgspec.json.encode(Trial("unavailable", "not installed", "install it", "some:Class"))
    monkeypatch.setattr(doctor_module, "_run", lambda command, timeout_s, errors: (said, 0))
    found = doctor_module.examine_channel(scheme, 4096, 1.0)
    assert found.finding == f"{scheme.replace('_', '-')}-unavailable"


def test_unknown_channels_are_named():
    result = CliRunner().invoke(main, ["doctor", "--channel", "pigeon"])
    assert result.exit_code == 1
    assert "no channel between nodes is named 'pigeon'; there are shm, cuda_ipc, tcp" in result.output


@pytest.mark.usefixtures("strange")
def test_tables(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = CliRunner().invoke(main, ["doctor", "--channel", "copying", "--channel", "absent"])
    assert result.exit_code == 1
    for words in ("works", "not here", "no carrier pigeon", "buy one", "memcpy", "/dev/shm", "memlock", "RDMA"):
        assert words in result.output, result.output
    assert "see troubleshooting: channel-unavailable" in result.output
    assert "explained in PDX's documentation, on the page Troubleshooting" in result.output


def test_what_is_well_is_not_explained():
    from rich.console import Console

    report = Report(True, [Finding("x", Trial("ok", rate=Rate(1, 1)))], Rate(1, 1), [Fact("memlock", "unlimited")])
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    console.print(view(report))
    console.file.close()
    assert "troubleshooting" not in console.export_text()


def test_the_report_of_this_machine_names_all_that_is_not_well():
    _, report = examine("shm")
    assert [fact.name for fact in report.machine if not fact.is_ok and not fact.finding] == []
    raw = json.loads(msgspec.json.encode(report))
    assert all(row["finding"] is None or row["finding"] in set(FindingName) for row in raw["machine"])


def test_markup_in_what_a_channel_says_is_shown_as_it_is():
    from rich.console import Console

    text = "pip install 'redis[hiredis]'"
    report = Report(True, [Finding("x", Trial("unavailable", "no", text))], Rate(1, 1), [Fact("n", text, False, text)])
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    console.print(view(report))
    console.file.close()
    assert console.export_text().count(text) == 3


# ---- the machine ----------------------------------------------------------------------------


def test_memlock_matters_where_there_is_rdma():
    assert memlock(resource.RLIM_INFINITY, False, has_rdma=True).is_ok
    assert memlock(8 << 20, True, has_rdma=True).is_ok
    assert memlock(8 << 20, False, has_rdma=False).is_ok
    limited = memlock(8 << 20, False, has_rdma=True)
    assert not limited.is_ok
    assert limited.finding is FindingName.MEMLOCK_SMALL
    assert "8.0 MiB" in limited.found
    assert "--ulimit memlock=-1" in limited.fix


def test_few_files_are_found():
    assert files(resource.RLIM_INFINITY).is_ok
    assert files(4096).is_ok
    few = files(1024)
    assert not few.is_ok
    assert few.finding is FindingName.FILES_FEW
    assert "1,024" in few.found


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
        (ASKED.replace("advise", "within_size"), NEVER, "(/dev/shm has huge=within_size)", None),
        (PLAIN + ASKED, NEVER, "(/dev/shm has huge=advise)", None),
        (ASKED, None, "(/dev/shm has huge=advise)", None),
        (PLAIN, NEVER.replace("[never]", "never").replace("force", "[force]"), "(shmem_enabled is force)", None),
        (ASKED.replace("advise", "never"), NEVER, "(/dev/shm has huge=never)", FindingName.HUGE_PAGES_NONE),
        (ASKED + PLAIN, NEVER, "(/dev/shm has huge=never)", FindingName.HUGE_PAGES_NONE),
        (ASKED.replace("/shm", "/other"), NEVER, "(/dev/shm has huge=never)", FindingName.HUGE_PAGES_NONE),
        (PLAIN, ADVISE, "never)", FindingName.HUGE_PAGES_NONE),
        (ASKED, NEVER.replace("[never] deny", "never [deny]"), "is deny)", FindingName.HUGE_PAGES_NONE),
        ("", "", "(/dev/shm has huge=never)", FindingName.HUGE_PAGES_NONE),
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


@pytest.mark.parametrize("status", [None, 1, -11])
def test_a_look_at_ucx_that_failed_ends_nothing_else(monkeypatch, status):
    monkeypatch.setattr(doctor_module, "_run", lambda command, timeout_s, errors: (b"", status))
    assert doctor_module._ucx_transports(1.0) == []


def test_ucx_and_the_variables_that_limit_it():
    missing = ucx_transports([], {}, has_rdma=True)
    assert (missing.is_ok, missing.finding) == (True, FindingName.UCX_UNAVAILABLE)
    assert "UCX_TLS=tcp" in ucx_transports(["tcp/lo"], {"UCX_TLS": "tcp"}, has_rdma=False).found
    slow = ucx_transports(["tcp/lo"], {"UCX_TLS": "tcp"}, has_rdma=True)
    assert (slow.is_ok, slow.finding) == (False, FindingName.UCX_NO_RDMA)
    assert ucx_transports(["rc_mlx5/mlx5_0:1", "tcp/lo"], {}, has_rdma=True).is_ok


@pytest.mark.parametrize(
    ("settings", "failing", "row", "finding"),
    [
        ({"gpus": 0}, "", "GPU", FindingName.GPU_UNUSABLE),
        ({"vmm": False}, "", "GPU arena", FindingName.GPU_ARENA_LEGACY),
        ({"gpus": 2, "peer_access": False}, "", "peer access", FindingName.GPU_NO_PEER_ACCESS),
        ({}, "cuMemHostRegister", "page-locking", FindingName.PAGE_LOCK_REFUSED),
        ({}, "cuMemCreate", "GPU arena", FindingName.GPU_FAILED),
    ],
)
def test_what_a_gpu_cannot_do_has_a_name(tmp_path, settings, failing, row, finding):
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    with fake_cuda(**settings) as fake:
        if failing:
            fake.fail(failing, times=1 << 30)
        found = {fact.name: fact for fact in gpus.facts(tmp_path)}
        fake.heal()
    assert (found[row].is_ok, found[row].finding) == (False, finding)
    assert [fact.name for fact in found.values() if not fact.is_ok and not fact.finding] == []


def test_a_gpu_that_is_not_there_and_a_look_that_failed_have_names(tmp_path, monkeypatch):
    with fake_cuda(gpus=0):
        (none,) = gpus.facts(tmp_path)
    assert (none.is_ok, none.finding) == (True, FindingName.GPU_NONE)
    monkeypatch.setattr(doctor_module, "_run", lambda command, timeout_s, errors: (b"", None))
    (failed,) = doctor_module._gpus(1.0)
    assert (failed.is_ok, failed.finding) == (False, FindingName.GPU_LOOK_FAILED)
