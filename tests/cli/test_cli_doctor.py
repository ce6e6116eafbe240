"""`pdx doctor`: real transfers through channels of ours and of a package beside us, in processes of their own."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pdx.cli import doctor as doctor_module
from pdx.cli.doctor import Finding, Report, view
from pdx.cli.loopback import Rate, Trial
from pdx.cli.machine import Fact, memlock, rdma, rdma_devices, shared_memory, ucx_transports
from pdx.cli.main import main

PLUGIN = Path(__file__).parent / "plugin"


@pytest.fixture
def strange(monkeypatch):
    """The package with strange channels is installed, here and in child processes."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))


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


@pytest.mark.parametrize("scheme", ["tcp", "shm", "nixl", "ucx"])
def test_our_own_channels_work(scheme):
    status, report = examine(scheme)
    if scheme in ("nixl", "ucx") and trial(report, scheme).state == "unavailable":
        assert status == 1
        pytest.skip(trial(report, scheme).why)
    assert trial(report, scheme).state == "ok", trial(report, scheme)
    assert status == 0
    assert trial(report, scheme).provider == f"pdx.transports.{scheme}:{scheme.capitalize()}Region"
    assert trial(report, scheme).rate.best_gb_s > 0
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


@pytest.mark.usefixtures("strange")
def test_a_channel_that_hangs_is_ended_with_all_its_processes():
    result = CliRunner().invoke(main, ["doctor", "--json", "--timeout", "2", "--channel", "hanging"])
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["channels"]
    assert "within 2 s" in found["trial"]["why"]
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
    monkeypatch.setattr(doctor_module, "schemes", lambda: ["absent", "copying", "inproc"])
    status, report = examine()
    assert status == 0
    assert [each.scheme for each in report.channels] == ["absent", "copying"]
    assert trial(report, "absent") == Trial("unavailable", "no carrier pigeon", "buy one", "strange_channels:Absent")
    assert examine("absent", "copying")[0] == 1


def test_unknown_channels_are_named():
    result = CliRunner().invoke(main, ["doctor", "--channel", "pigeon"])
    assert result.exit_code == 1
    assert "no channel between nodes is named 'pigeon'; there are shm, cuda_ipc, tcp" in result.output
    assert "inproc" not in result.output


@pytest.mark.usefixtures("strange")
def test_tables(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = CliRunner().invoke(main, ["doctor", "--channel", "copying", "--channel", "absent"])
    assert result.exit_code == 1
    for words in ("works", "not here", "no carrier pigeon", "buy one", "memcpy", "/dev/shm", "memlock", "RDMA"):
        assert words in result.output, result.output


def test_markup_in_what_a_channel_says_is_shown_as_it_is():
    from rich.console import Console

    text = "pip install 'pdx-transport[nixl]'"
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
    assert "8.0 MiB" in limited.found
    assert "--ulimit memlock=-1" in limited.fix


def test_rdma_devices_and_their_ports(tmp_path):
    assert rdma_devices(tmp_path / "none") == {}
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    devices = rdma_devices(tmp_path)
    assert devices == {"mlx5_0": ["ACTIVE"], "mlx5_1": ["DOWN"]}
    assert rdma(devices, {"/dev/infiniband/uverbs0": True}).is_ok
    assert not rdma(devices, {"/dev/infiniband/uverbs0": False}).is_ok
    assert "no port is active" in rdma({"mlx5_1": ["DOWN"]}, {}).fix
    assert rdma({}, {}).is_ok


def test_a_small_shared_memory_is_said(monkeypatch):
    stats = os.statvfs_result([4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255])  # Docker's 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda path: stats)
    fact = shared_memory()
    assert not fact.is_ok
    assert fact.found.startswith("64.0 MiB")
    assert "--shm-size" in fact.fix


def test_ucx_and_the_variables_that_limit_it():
    assert ucx_transports([], {}, has_rdma=True).is_ok
    assert "UCX_TLS=tcp" in ucx_transports(["tcp/lo"], {"UCX_TLS": "tcp"}, has_rdma=False).found
    assert not ucx_transports(["tcp/lo"], {"UCX_TLS": "tcp"}, has_rdma=True).is_ok
    assert ucx_transports(["rc_mlx5/mlx5_0:1", "tcp/lo"], {}, has_rdma=True).is_ok
