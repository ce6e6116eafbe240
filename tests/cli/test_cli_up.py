"""`pdx up` with a real node and proxy, and with servers that stand in for vLLM."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdx.cli import guard
from pdx.cli import up as up_module
from pdx.cli.ports import free_ports
from pdx.cli.processes import Processes
from pdx.cli.up import exposure, nodes_of, up
from pdx.client.api import connect
from pdx.errors import ConfigError, PdxError

STANDIN = Path(__file__).parent / "standin"
ROOT = Path(__file__).parent.parent.parent


class Up:
    """A running `pdx up`, its output and its logs."""

    def __init__(self, place: Path, *flags: str, port: int = 0) -> None:
        self.place = place
        self.port = port or free_ports(1)[0]
        self.output = place / f"output{len(list(place.glob('output*')))}"
        options = ["--port", str(self.port), "--arena", "8MiB", "--logs", str(place / "logs")]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdx.cli.main", "up", "some/model", *options, *flags],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{STANDIN}{os.pathsep}{ROOT}",
                    "XDG_RUNTIME_DIR": str(place),
                    "CUDA_VISIBLE_DEVICES": "",
                },
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )

    def wait_ready(self) -> Up:
        wait_for(lambda: "ready: http" in self.text() or self.process.poll() is not None)
        assert "ready: http" in self.text(), self.text()
        return self

    def text(self) -> str:
        return self.output.read_text()

    def facts(self, engine: str) -> dict:
        return json.loads((self.place / "logs" / f"{engine}.log").read_text().splitlines()[0])

    def everyone(self) -> list[int]:
        """All processes that carry this test's folder in their environment."""
        mark = f"XDG_RUNTIME_DIR={self.place}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def wait_gone(self) -> None:
        wait_for(lambda: self.everyone() == [])


@pytest.fixture
def start_up(place):
    place.chmod(0o700)
    started: list[Up] = []

    def start(*flags: str, port: int = 0) -> Up:
        started.append(Up(place, *flags, port=port))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.terminate()
            each.process.wait()
    for each in started:
        each.wait_gone()


def wait_for(condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read()


def test_one_ctrl_c_ends_everything(start_up):
    running = start_up("--prefill", "1", "--decode", "2", "--", "--max-model-len", "99").wait_ready()
    health = json.loads(_get(f"http://127.0.0.1:{running.port}/health"))
    assert (health["prefillers"], health["decoders"]) == (1, 2)
    everyone = running.everyone()
    assert len(everyone) >= 10  # up, guard, node, proxy, three engines with a child each
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(20) == 0
    running.wait_gone()
    assert list((running.place / "pdx").iterdir()) == []


def test_engines_get_roles_ports_cores_and_the_flags(start_up):
    running = start_up("--", "--max-model-len", "99").wait_ready()
    prefill, decode = running.facts("prefill-0"), running.facts("decode-0")
    for role, facts in (("prefill", prefill), ("decode", decode)):
        argv = facts["argv"]
        settings = json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        assert settings["role"] == role
        assert settings["url"] == f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"
        assert settings["node"] == f"ipc://{running.place}/pdx/up-{running.port}/node.sock"
        assert argv[argv.index("--model") + 1] == "some/model"
        assert argv[argv.index("--max-model-len") + 1] == "99"
    if len(os.sched_getaffinity(0)) > 1:
        assert set(prefill["bind"].split(",")).isdisjoint(decode["bind"].split(","))


def test_two_nodes_joined_by_a_channel(start_up):
    """Each role has a node of its own, and both nodes use the channel that was asked for."""
    running = start_up("--channel", "tcp").wait_ready()
    folder = running.place / "pdx" / f"up-{running.port}"
    for role in ("prefill", "decode"):
        argv = running.facts(f"{role}-0")["argv"]
        settings = json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        assert settings["node"] == f"ipc://{folder}/{role}.sock"
        with connect(settings["node"]) as node:
            assert node.status().name == role
        command = Path(f"/proc/{node_pid(running, role)}/cmdline").read_text().split("\0")
        assert command[command.index("--channel") + 1] == "tcp"
    assert node_pid(running, "prefill") != node_pid(running, "decode")


def node_pid(running: Up, role: str) -> int:
    with connect(f"ipc://{running.place}/pdx/up-{running.port}/{role}.sock") as node:
        return node.status().pid


@pytest.mark.parametrize(
    ("channel", "options"),
    [
        (None, [[]]),
        ("auto", [["--name", "prefill"], ["--name", "decode"]]),
        ("nixl", [["--name", "prefill", "--channel", "nixl"], ["--name", "decode", "--channel", "nixl"]]),
    ],
)
def test_nodes_choose_their_channel_where_none_is_named(channel, options):
    assert [list(node.options) for node in nodes_of(Path("/run"), channel, {})] == options


@pytest.mark.parametrize(
    ("channel", "gpus", "options"),
    [
        (None, ["GPU-1"], [["--gpu", "GPU-1"]]),
        (None, ["0", "1"], [["--gpu", "0", "--gpu", "1"]]),
        ("auto", ["0"], [["--name", "prefill", "--gpu", "0"], ["--name", "decode", "--gpu", "0"]]),
        ("auto", ["0", "1"], [["--name", "prefill", "--gpu", "0"], ["--name", "decode", "--gpu", "1"]]),
    ],
)
def test_arenas_go_to_the_gpus_that_are_named(channel, gpus, options):
    assert [list(node.options) for node in nodes_of(Path("/run"), channel, {"gpus": gpus})] == options


def test_two_nodes_have_a_folder_each_on_the_disk():
    nodes = nodes_of(Path("/run"), "tcp", {"disk": ["/cache"], "disk_limit": "2GiB"})
    rest = [list(node.options)[list(node.options).index("--disk") :] for node in nodes]
    assert rest == [["--disk", f"/cache/{role}", "--disk-limit", "2GiB"] for role in ("prefill", "decode")]


def test_the_node_gets_a_disk_and_serves_metrics(start_up, place):
    (port,) = free_ports(1)
    running = start_up(
        "--disk", str(place / "cache"), "--disk-limit", "2GiB", "--metrics", f"127.0.0.1:{port}"
    ).wait_ready()
    with connect(f"ipc://{running.place}/pdx/up-{running.port}/node.sock") as node:
        disk = node.status().tiers[0]
    assert (disk.place, disk.limit_bytes) == (str(place / "cache"), 2 << 30)
    assert b"pdx_node_arena_bytes" in _get(f"http://127.0.0.1:{port}/metrics")


def test_an_arena_on_a_gpu_that_is_not_there_ends_it_with_the_reason(start_up):
    running = start_up("--gpu", "0")
    assert running.process.wait(30) == 1
    assert "node ended with status 1" in running.text()
    assert "without --gpu chunks lie in host memory" in running.text()
    running.wait_gone()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "0,1,2", "--channel", "auto"], "two nodes: name one or two"),
        (["--gpu", "0,", "--channel", "auto"], "two nodes: name one or two"),
        (["--gpu", "0", "--gpu", "0"], "a GPU has one arena; name each once"),
        (["--disk-limit", "much"], "'much' is not a size"),
        (["--metrics", "127.0.0.1:1", "--channel", "tcp"], "choose one of them"),
        (["--disk", "cache", "--node", "ipc:///tmp/x.sock"], "--disk is for a node that this command starts"),
        (["--gpu", "0", "--node", "ipc:///tmp/x.sock"], "choose one of them"),
        (["--channel", "pigeon"], "no channel between nodes is named 'pigeon'"),
        (["--channel", "inproc"], "no channel between nodes is named 'inproc'"),
        (["--channel", "tcp", "--node", "ipc:///tmp/x.sock"], "choose one of them"),
    ],
)
def test_a_channel_that_cannot_be_is_said_before_anything_starts(flags, words):
    result = CliRunner().invoke(up, ["some/model", *flags])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_an_engine_that_dies_ends_everything_and_leaves_its_last_words(start_up):
    running = start_up().wait_ready()
    argv = running.facts("decode-0")["argv"]
    with contextlib.suppress(OSError):
        _get(f"http://127.0.0.1:{argv[argv.index('--port') + 1]}/die")
    assert running.process.wait(20) == 1
    assert "decode-0 ended with status 3" in running.text()
    assert "out of luck" in running.text()
    running.wait_gone()


def test_an_engine_that_does_not_start_is_reported_at_once(start_up):
    running = start_up("--", "--broken")
    assert running.process.wait(30) == 1
    assert "ended with status 1" in running.text()
    assert "cannot load the model" in running.text()
    assert "Traceback" not in running.text()
    running.wait_gone()


def test_nothing_survives_when_it_is_killed(start_up):
    running = start_up().wait_ready()
    running.process.kill()
    running.process.wait()
    running.wait_gone()


def test_ready_is_said_when_the_nodes_have_their_engines(start_up):
    """Engines that serve without PDX are not what was asked for."""
    running = start_up("--", "--late")
    wait_for(lambda: "waiting for prefill-0 and decode-0 to attach" in running.text())
    for engine, left in (("prefill-0", "waiting for decode-0 to attach"), ("decode-0", "ready: http")):
        assert "ready: http" not in running.text()
        argv = running.facts(engine)["argv"]
        _get(f"http://127.0.0.1:{argv[argv.index('--port') + 1]}/attach")
        wait_for(lambda left=left: left in running.text())


def test_a_second_one_on_the_port_touches_nothing(start_up, place):
    """While the first one loads its model, nobody listens at its port yet."""
    loads = place / "loads"
    os.mkfifo(loads)
    first = start_up("--", "--loads", str(loads))
    wait_for(lambda: "prefill-0 (pid" in first.text() and "decode-0 (pid" in first.text())
    folder, logs = first.place / "pdx" / f"up-{first.port}", first.place / "logs"
    before = sorted(folder.iterdir()), sorted(logs.iterdir())  # the node is ready: its sockets have their names
    second = start_up(port=first.port)
    assert second.process.wait() == 1
    assert f"that of another pdx up, process {first.process.pid}" in second.text()
    assert "--port" in second.text()
    assert (sorted(folder.iterdir()), sorted(logs.iterdir())) == before
    with loads.open("w"):  # also for an engine that comes later
        first.wait_ready()
    with connect(f"ipc://{folder}/node.sock") as node:
        assert node.status().attached
    third = start_up(port=first.port)
    assert third.process.wait() == 1
    assert folder.exists()


def test_the_port_is_had_again_at_once(start_up):
    first = start_up().wait_ready()
    _get(f"http://127.0.0.1:{first.port}/health")
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait() == 0
    again = start_up(port=first.port).wait_ready()
    assert again.port == first.port


def test_logs_of_the_last_run_are_kept(start_up):
    for _ in range(2):
        running = start_up().wait_ready()
        pid = node_pid(running, "node")
        running.process.send_signal(signal.SIGINT)
        running.process.wait()
        logs = running.place / "logs"
        names = sorted(path.name for path in logs.glob("*.log*"))
    assert names == sorted(
        f"{name}.log{end}" for name in ("node", "prefill-0", "decode-0", "proxy") for end in ("", ".1")
    )
    assert pid
    first, last = (
        json.loads((logs / name).read_text().splitlines()[0])["child"] for name in ("prefill-0.log.1", "prefill-0.log")
    )
    assert first != last


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--", "--uds", "/run/x"], "at loopback"),
        (["--", "--ssl-certfile=c.pem"], "at loopback"),
        (["--host", "nosuchhost.invalid"], "'nosuchhost.invalid' is no host"),
        (["--host", "203.0.113.7"], "203.0.113.7 is no address of this host"),
        (["--host", ""], "'' is no host"),
        (["--node", "foo"], "'foo' is not an ipc:///absolute/path address"),
        (["--node", "tcp://127.0.0.1:1"], "is not an ipc:///absolute/path address"),
        (["--node", "ipc:///nonexistent/node.sock"], "no node answers at ipc:///nonexistent/node.sock"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_starts(flags, words, place, monkeypatch):
    place.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    (port,) = free_ports(1)
    result = CliRunner().invoke(up, ["some/model", "--port", str(port), *flags])
    assert isinstance(result.exception, PdxError), result.output
    assert words in str(result.exception)
    assert list((place / "pdx").iterdir()) == [] if (place / "pdx").exists() else True


def test_logs_that_cannot_be_written_are_said_before_anything_starts(place, monkeypatch):
    place.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    (place / "file").touch()
    (port,) = free_ports(1)
    result = CliRunner().invoke(up, ["some/model", "--port", str(port), "--logs", str(place / "file" / "logs")])
    assert isinstance(result.exception, ConfigError), result.output
    assert "--logs" in str(result.exception)


def test_a_lock_that_cannot_be_had_is_said(place, monkeypatch):
    place.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    (port,) = free_ports(1)
    lock = place / "pdx" / f"up-{port}.lock"
    lock.mkdir(parents=True)
    lock.parent.chmod(0o700)
    result = CliRunner().invoke(up, ["some/model", "--port", str(port)])
    assert isinstance(result.exception, ConfigError), result.output
    assert str(lock) in str(result.exception)


def test_a_runtime_folder_that_cannot_be_made_is_said(place, monkeypatch):
    (place / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "file"))
    result = CliRunner().invoke(up, ["some/model"])
    assert isinstance(result.exception, ConfigError), result.output
    assert str(place / "file" / "pdx") in str(result.exception)


def test_a_folder_of_logs_is_one_commands_at_a_time(place, monkeypatch):
    """Each would move the other's logs away, and cut off what is not its own."""
    place.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    logs = place / "logs"
    logs.mkdir()
    (port,) = free_ports(1)
    owner = os.open(logs, os.O_RDONLY)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        result = CliRunner().invoke(up, ["some/model", "--port", str(port), "--logs", str(logs)])
    finally:
        os.close(owner)
    assert isinstance(result.exception, ConfigError), result.output
    assert "another pdx up" in str(result.exception)
    assert str(logs) in str(result.exception)
    assert list(logs.iterdir()) == []


def test_who_keeps_logs_there_may_start_pdx_up(place, monkeypatch):
    """As the bench does, with the log of `pdx up` beside those of its processes."""
    place.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setattr(up_module, "held_port", lambda host, port: _signalled(signal.SIGTERM))
    (port,) = free_ports(1)
    with Processes(place / "logs"):
        result = CliRunner().invoke(up, ["some/model", "--port", str(port), "--logs", str(place / "logs")])
    assert result.exit_code == 0, result.output


@pytest.fixture
def hangups_arrive():
    """Also where the tests were started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups_arrive")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anything_starts_leaves_nothing(place, monkeypatch, number):
    place.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setattr(up_module, "held_port", lambda host, port: _signalled(number))
    (port,) = free_ports(1)
    result = CliRunner().invoke(up, ["some/model", "--port", str(port), "--logs", str(place / "logs")])
    assert (result.exit_code, "stopped" in result.output) == (0, True), result.output
    assert list((place / "pdx").iterdir()) == []
    assert list((place / "logs").iterdir()) == []


@contextlib.contextmanager
def _signalled(number):
    os.kill(os.getpid(), number)
    yield lambda: None


@pytest.mark.parametrize("wait", ["nan", "inf", "0", "-1", "1e9"])
def test_a_wait_is_a_number_of_seconds(wait):
    result = CliRunner().invoke(up, ["some/model", "--wait", wait])
    assert result.exit_code == 2
    assert "seconds" in result.output


def test_an_option_of_vllm_says_where_it_goes():
    result = CliRunner().invoke(up, ["some/model", "--max-model-len", "8192"])
    assert result.exit_code == 2
    assert "pdx up MODEL -- --max-model-len" in result.output


@pytest.mark.parametrize(
    ("host", "flags", "environ", "says"),
    [
        ("0.0.0.0", [], {}, True),
        ("10.0.0.1", ["--max-model-len", "9"], {}, True),
        ("::", ["--api-key", "k"], {}, False),
        ("0.0.0.0", [], {"VLLM_API_KEY": "k"}, False),
        ("0.0.0.0", [], {"VLLM_API_KEY": ""}, True),
        ("0.0.0.0", ["--api-key="], {}, True),
        ("127.0.0.1", [], {}, False),
        ("localhost", [], {}, False),
        ("::1", [], {}, False),
    ],
)
def test_what_is_open_to_others_is_said(host, flags, environ, says, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    warning = exposure(host, 8000, flags)
    assert bool(warning) == says
    assert "\n" not in warning


def test_ctrl_c_while_starting(start_up):
    running = start_up()
    wait_for(lambda: "prefill-0" in running.text())
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(20) == 0
    running.wait_gone()


def test_a_hangup_that_nohup_has_it_ignore_is_ignored(start_up):
    """Whoever starts it by nohup goes away."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = start_up().wait_ready()
    finally:
        signal.signal(signal.SIGHUP, before)
    ignored = next(
        int(line.split()[1], 16)
        for line in Path(f"/proc/{running.process.pid}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    )
    assert ignored & 1 << signal.SIGHUP - 1


def test_a_port_in_use_is_said_before_anything_starts(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(up, ["some/model", "--port", str(port)])
    assert isinstance(result.exception, ConfigError)
    assert "--port" in str(result.exception)


def test_members_ignore_zombies():
    child = subprocess.Popen(["true"], start_new_session=True)
    wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert guard.members({child.pid}) == []
    child.wait()
