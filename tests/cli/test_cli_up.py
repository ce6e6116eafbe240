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
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdx.cli import guard
from pdx.cli import up as up_module
from pdx.cli.ports import free_ports
from pdx.cli.processes import Processes
from pdx.cli.up import Start, exposure, nodes_of, up
from pdx.client.api import connect
from pdx.config import private_folder
from pdx.errors import ConfigError, PdxError
from pdx.security.address import worker_address
from pdx.security.socket_lock import owned

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
    health = json.loads(_get(f"http://127.0.0.1:{first.port}/health"))
    assert (health["prefillers"], health["decoders"]) == (1, 2)
    assert len(first.everyone()) >= 12  # up, guard, node, proxy and two workers of it, three engines with a child each
    control = f"ipc://{first.place}/pdx/up-{first.port}/proxy.sock"
    workers = [Path(worker_address(control, number).removeprefix("ipc://")).is_socket() for number in (0, 1, 2)]
    assert workers == [True, True, False]
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
    second = start_up("--channel", "tcp", port=first.port).wait_ready()
    earlier = json.loads((second.place / "logs" / "prefill-0.log.1").read_text().splitlines()[0])
    assert earlier["child"] == prefill["child"] != second.facts("prefill-0")["child"]
    for role in ("prefill", "decode"):  # each has a node of its own, and both use the channel that was asked for
        with connect(second.connector(f"{role}-0")["node"]) as node:
            status = node.status()
        assert status.name == role
        command = Path(f"/proc/{status.pid}/cmdline").read_text().split("\0")
        assert command[command.index("--channel") + 1] == "tcp"
    second.process.kill()
    second.process.wait()
    second.wait_gone()


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
    monkeypatch.setattr(up_module, "connect", partial(connect, timeout_s=0.1))
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
        (["--gpu", "0", "--gpu", "0"], "a GPU has one arena; name each once"),
        (["--metrics", "127.0.0.1:1", "--channel", "tcp"], "choose one of them"),
        (["--channel", "pigeon"], "no channel between nodes is named 'pigeon'"),
        (["--channel", "tcp", "--node", "ipc:///tmp/x.sock"], "choose one of them"),
        (["--", "--uds", "/run/x"], "at loopback"),
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


# ---- from the start to the end, with small processes ----------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The exit status and the output of an `_Up` that has a node, which is there at once, and these engines."""
    monkeypatch.setattr(up_module, "LOOK_S", 0.01)

    def ran(*engines, signals=(), wait_s=60.0):
        stages = [[Start("node", _python(SLEEP), lambda: True)], list(engines)]
        with Processes(tmp_path / "logs", grace_s=1.0) as processes:
            status = up_module._Up(processes, signals, wait_s, tmp_path / "logs").run(stages, "a model", lambda: None)
        return status, capsys.readouterr().out

    return ran


SLEEP = "import time; time.sleep(600)"


def _python(code):
    return [sys.executable, "-S", "-c", code]


def test_an_engine_that_dies_ends_everything_and_leaves_its_last_words(run):
    engines = [Start("prefill-0", _python(SLEEP), lambda: True)]
    engines += [Start("decode-0", _python("print('out of luck'); raise SystemExit(3)"), lambda: False)]
    status, output = run(*engines)
    assert status == 1
    assert "decode-0 ended with status 3; the end of" in output
    assert output.endswith("  out of luck\n")


def test_ready_is_said_when_the_nodes_have_their_engines(run, monkeypatch):
    """Engines that serve without PDX are not what was asked for."""
    signals, told = [], [set(), {"http://p"}, {"http://p", "http://d"}]

    def attached_urls(address):
        signals.extend([signal.SIGINT] * (len(told) == 1))
        return told.pop(0)

    monkeypatch.setattr(up_module, "attached_urls", attached_urls)
    urls = {"prefill-0": "http://p", "decode-0": "http://d"}
    engines = [Start(name, _python(SLEEP), lambda: True, url=url, node="ipc:///n") for name, url in urls.items()]
    status, output = run(*engines, signals=signals)
    assert status == 0
    said = [line.partition("] ")[2] for line in output.splitlines() if "(pid" not in line]
    assert said[:2] == [f"waiting for {names} to attach to a node" for names in ("prefill-0 and decode-0", "decode-0")]
    assert said[2:] == ["ready: a model; Ctrl-C ends it; PDX_NODE=ipc:///n", "stopping", "stopped"]


def test_ctrl_c_while_starting_and_a_start_that_takes_too_long(run):
    signals = []
    status, output = run(Start("prefill-0", _python(SLEEP), lambda: signals.append(signal.SIGINT)), signals=signals)
    assert (status, "ready" in output.partition("prefill-0")[2], output.endswith("stopped\n")) == (0, False, True)
    status, output = run(Start("prefill-0", _python(SLEEP), lambda: False), wait_s=0.0)
    assert (status, "not ready within 0 s" in output) == (1, True)


# ---- before anything starts -----------------------------------------------------------------------


def test_a_second_one_on_the_port_touches_nothing(invoke, place):
    folder = place / "pdx" / f"up-{invoke.port}"
    private_folder(folder.parent)
    private_folder(folder)
    (folder / "node.sock").touch()
    with owned(folder, ConfigError):
        result = invoke()
        assert isinstance(result.exception, ConfigError)
        assert f"that of another pdx up, process {os.getpid()}; choose another with --port" in str(result.exception)
        assert [path.name for path in folder.iterdir()] == ["node.sock"]
        assert not (place / "logs").exists()


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


def test_a_signal_before_anything_starts_leaves_nothing(invoke, place, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests were started with nohup
    monkeypatch.setattr(up_module, "held_port", lambda host, port: _signalled(signal.SIGHUP))
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
    [(["--wait", wait], "seconds") for wait in ("nan", "0", "1e9")]
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
        ("::", ["--api-key", "k"], {}, False),
        ("0.0.0.0", [], {"VLLM_API_KEY": "k"}, False),
        ("0.0.0.0", [], {"VLLM_API_KEY": ""}, True),
        ("0.0.0.0", [], {"PDX_PROXY_API_KEYS": "file"}, False),
        ("127.0.0.1", [], {}, False),
        ("localhost", [], {}, False),
    ],
)
def test_what_is_open_to_others_is_said(host, flags, environ, says, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    warning = exposure(host, 8000, flags)
    assert bool(warning) == says
    assert "\n" not in warning


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
