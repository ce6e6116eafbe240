"""`pdx up` with a real node and proxy, and with servers that stand in for vLLM."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
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
from pdx.security.address import worker_address

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

    def connector(self, engine: str) -> dict:
        argv = self.facts(engine)["argv"]
        return json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]

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


def test_two_runs_on_one_port_one_ended_by_ctrl_c_and_one_killed(start_up):
    first = start_up("--decode", "2", "--workers", "2", "--", "--max-model-len", "99").wait_ready()
    for _ in range(20):  # the kernel deals them out
        health = json.loads(_get(f"http://127.0.0.1:{first.port}/health"))
        assert (health["prefillers"], health["decoders"]) == (1, 2)
    assert len(first.everyone()) >= 12  # up, guard, node, proxy and two workers of it, three engines with a child each
    control = f"ipc://{first.place}/pdx/up-{first.port}/proxy.sock"
    assert [Path(worker_address(control, number).removeprefix("ipc://")).is_socket() for number in (0, 1, 2)] == [
        *(True, True, False)
    ]
    prefill = first.facts("prefill-0")
    for role, facts in (("prefill", prefill), ("decode", first.facts("decode-0"))):
        argv, settings = facts["argv"], first.connector(f"{role}-0")
        assert settings["role"] == role
        assert settings["url"] == f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"
        assert settings["node"] == f"ipc://{first.place}/pdx/up-{first.port}/node.sock"
        assert argv[argv.index("--model") + 1] == "some/model"
        assert argv[argv.index("--max-model-len") + 1] == "99"
    if len(os.sched_getaffinity(0)) > 2:
        assert set(prefill["bind"].split(",")).isdisjoint(facts["bind"].split(","))
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(20) == 0
    first.wait_gone()
    assert list((first.place / "pdx").iterdir()) == []
    second = start_up(port=first.port).wait_ready()
    logs = second.place / "logs"
    names = {path.name for path in logs.glob("*.log*")}
    ours = {f"{name}.log{end}" for name in ("node", "prefill-0", "decode-0", "proxy") for end in ("", ".1")}
    assert names == {"decode-1.log", *ours}
    earlier = json.loads((logs / "prefill-0.log.1").read_text().splitlines()[0])
    assert earlier["child"] == prefill["child"] != second.facts("prefill-0")["child"]
    second.process.kill()
    second.process.wait()
    second.wait_gone()


def test_two_nodes_joined_by_a_channel(start_up):
    """Each role has a node of its own, and both nodes use the channel that was asked for."""
    running = start_up("--channel", "tcp").wait_ready()
    pids = set()
    for role in ("prefill", "decode"):
        address = running.connector(f"{role}-0")["node"]
        assert address == f"ipc://{running.place}/pdx/up-{running.port}/{role}.sock"
        with connect(address) as node:
            status = node.status()
        assert status.name == role
        command = Path(f"/proc/{status.pid}/cmdline").read_text().split("\0")
        assert command[command.index("--channel") + 1] == "tcp"
        pids.add(status.pid)
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("channel", "of_node", "options"),
    [
        (None, {}, [""]),
        ("auto", {}, ["--name prefill", "--name decode"]),
        ("nixl", {}, ["--name prefill --channel nixl", "--name decode --channel nixl"]),
        (None, {"gpus": ["GPU-1"]}, ["--gpu GPU-1"]),
        (None, {"gpus": ["0", "1"]}, ["--gpu 0 --gpu 1"]),
        ("auto", {"gpus": ["0"]}, ["--name prefill --gpu 0", "--name decode --gpu 0"]),
        ("auto", {"gpus": ["0", "1"]}, ["--name prefill --gpu 0", "--name decode --gpu 1"]),
        ("auto", {"disk": ["/c"]}, ["--name prefill --disk /c/prefill", "--name decode --disk /c/decode"]),
    ],
)
def test_which_nodes_are_started_and_how(channel, of_node, options):
    assert [" ".join(node.options) for node in nodes_of(Path("/run"), channel, of_node)] == options


@pytest.fixture
def invoke(place, monkeypatch):
    """`pdx up` in this process, where it starts nothing."""
    place.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    (port,) = free_ports(1)

    def run(*flags):
        options = ["--port", str(port), "--logs", str(place / "logs"), *flags]
        return CliRunner().invoke(up, ["some/model", *options])

    run.port = port
    return run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "0,1,2", "--channel", "auto"], "two nodes: name one or two"),
        (["--gpu", "0,", "--channel", "auto"], "two nodes: name one or two"),
        (["--gpu", "0", "--gpu", "0"], "a GPU has one arena; name each once"),
        (["--metrics", "127.0.0.1:1", "--channel", "tcp"], "choose one of them"),
        (["--disk", "cache", "--node", "ipc:///tmp/x.sock"], "--disk is for a node that this command starts"),
        (["--channel", "pigeon"], "no channel between nodes is named 'pigeon'"),
        (["--channel", "tcp", "--node", "ipc:///tmp/x.sock"], "choose one of them"),
        (["--", "--uds", "/run/x"], "at loopback"),
        (["--", "--ssl-certfile=c.pem"], "at loopback"),
        (["--host", "nosuchhost.invalid"], "'nosuchhost.invalid' is no host"),
        (["--node", "tcp://127.0.0.1:1"], "is not an ipc:///absolute/path address"),
        (["--node", "ipc:///nonexistent/node.sock"], "no node answers at ipc:///nonexistent/node.sock"),
        (["--logs", "/dev/null/logs"], "name a folder with --logs"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(invoke, place, flags, words):
    result = invoke(*flags)
    assert isinstance(result.exception, PdxError), result.output
    assert words in str(result.exception)
    assert list((place / "pdx").iterdir()) == [] if (place / "pdx").exists() else True


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


def test_a_lock_or_a_folder_that_cannot_be_had_is_said(invoke, place, monkeypatch):
    lock = place / "pdx" / f"up-{invoke.port}.lock"
    lock.mkdir(parents=True)
    lock.parent.chmod(0o700)
    assert str(lock) in str(invoke().exception)
    (place / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "file"))
    result = invoke()
    assert isinstance(result.exception, ConfigError)
    assert str(place / "file" / "pdx") in str(result.exception)


def test_a_folder_of_logs_is_one_commands_at_a_time(invoke, place):
    """Each would move the other's logs away, and cut off what is not its own."""
    logs = place / "logs"
    logs.mkdir()
    owner = os.open(logs, os.O_RDONLY)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        result = invoke()
    finally:
        os.close(owner)
    assert isinstance(result.exception, ConfigError), result.output
    assert f"another pdx up writes its logs to {logs}" in str(result.exception)
    assert list(logs.iterdir()) == []


def test_who_keeps_logs_there_may_start_pdx_up(invoke, place, monkeypatch):
    """As the bench does, with the log of `pdx up` beside those of its processes."""
    monkeypatch.setattr(up_module, "held_port", lambda host, port: _signalled(signal.SIGTERM))
    with Processes(place / "logs"):
        result = invoke()
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anything_starts_leaves_nothing(invoke, place, monkeypatch, number):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests were started with nohup
    monkeypatch.setattr(up_module, "held_port", lambda host, port: _signalled(number))
    result = invoke()
    signal.signal(signal.SIGHUP, before)
    assert (result.exit_code, "stopped" in result.output) == (0, True), result.output
    assert list((place / "pdx").iterdir()) == []
    assert list((place / "logs").iterdir()) == []


@contextlib.contextmanager
def _signalled(number):
    os.kill(os.getpid(), number)
    yield lambda: None


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--wait", wait], "seconds") for wait in ("nan", "inf", "0", "1e9")]
    + [(["--max-model-len", "8192"], "pdx up MODEL -- --max-model-len")],
)
def test_a_usage_error_says_what_is_meant(flags, words):
    result = CliRunner().invoke(up, ["some/model", *flags])
    assert result.exit_code == 2
    assert words in result.output


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


def test_a_hangup_that_nohup_has_it_ignore_is_ignored(invoke, monkeypatch):
    """Whoever starts it by nohup goes away."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen = []

    def held_port(host, port):
        seen.append(signal.getsignal(signal.SIGHUP))
        return _signalled(signal.SIGTERM)

    monkeypatch.setattr(up_module, "held_port", held_port)
    invoke()
    signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def test_members_ignore_zombies():
    child = subprocess.Popen(["true"], start_new_session=True)
    wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert guard.members({child.pid}) == []
    child.wait()
