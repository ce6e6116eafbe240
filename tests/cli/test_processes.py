"""Supervision with small real processes: what starts must end, whatever happens to whom."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import has_ended

from pdx.cli import guard
from pdx.cli import processes as processes_module
from pdx.cli.processes import Process, Processes, ProcessState, answers
from pdx.errors import ConfigError
from pdx.testing.waiting import wait_until as wait_for

SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
# A child in the same group, as vLLM's engine core is; its id is the first line of the log.
FAMILY = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
    f"print(child.pid, flush=True); {SLEEP}"
)
# What `pdx up` is to its children: this process is killed while they run.
PARENT = f"""
import sys, time
from pathlib import Path
from pdx.cli.processes import Processes
with Processes(Path(sys.argv[1]), grace_s=1.0) as processes:
    processes.start("family", [sys.executable, "-S", "-c", {FAMILY!r}], is_ready=lambda: True)
    processes.start("stubborn", [sys.executable, "-S", "-c", {STUBBORN!r}], is_ready=lambda: True)
    time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def says_something(log: Path) -> bool:
    return log.exists() and log.read_bytes().endswith(b"\n")


def test_a_process_becomes_ready_and_its_log_is_kept(tmp_path):
    with Processes(tmp_path) as processes:
        log = tmp_path / "one.log"
        one = processes.start(
            "one", python(f"print('hello'); print('ready', flush=True); {SLEEP}"), is_ready=lambda: says_something(log)
        )
        assert one.state is ProcessState.STARTING
        wait_for(lambda: one.look() is ProcessState.READY)
        assert one.tail(5) == ["hello", "ready"]
        assert one.exit_status is None
    assert one.state is ProcessState.STOPPED
    assert one.exit_status == 128 + signal.SIGTERM
    assert has_ended(one.pid)


def test_each_death_is_seen_with_status_and_last_words(tmp_path):
    with Processes(tmp_path) as processes:
        healthy = processes.start("healthy", python(SLEEP), is_ready=lambda: True)
        dying = processes.start("dying", python("raise SystemExit('no memory left')"), is_ready=lambda: False)
        ghost = processes.start("ghost", [str(tmp_path / "ghost")], is_ready=lambda: False)
        victim = processes.start("victim", python(SLEEP), is_ready=lambda: True)
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: processes.look() == [dying, ghost, victim])
        assert (dying.exit_status, ghost.exit_status, victim.exit_status) == (1, 1, 128 + signal.SIGKILL)
        assert dying.tail(1) == ["no memory left"]
        assert "FileNotFoundError" in ghost.tail(1)[0]
        assert healthy.state is ProcessState.READY
    assert dying.state is ProcessState.DIED
    assert has_ended(healthy.pid)


def test_the_whole_group_ends_even_if_its_leader_went_first(tmp_path):
    with Processes(tmp_path) as processes:
        family = processes.start("family", python(FAMILY), is_ready=lambda: True)
        wait_for(lambda: says_something(family.log))
        child = int(family.tail(1)[0])
        os.kill(family.pid, signal.SIGKILL)
        wait_for(lambda: family.look() is ProcessState.DIED)
        assert not has_ended(child)
    assert has_ended(child)


def test_a_process_deaf_to_term_is_killed_after_the_grace(tmp_path):
    with Processes(tmp_path, grace_s=0.3) as processes:
        stubborn = processes.start("stubborn", python(STUBBORN), is_ready=lambda: True)
        wait_for(lambda: says_something(stubborn.log))
    assert stubborn.exit_status == 128 + signal.SIGKILL


def test_a_stopped_process_gets_its_grace_and_an_odd_name_keeps_nobody_alive(tmp_path):
    """The kernel cuts names after 15 bytes, which may be inside a character."""
    says = "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit()))"
    names = "open('/proc/self/comm', 'wb').write(b'\\xc3')"
    code = f"import signal, sys; {says}; {names}; print('ready', flush=True); {SLEEP}"
    with Processes(tmp_path, grace_s=30.0) as processes:
        stopped = processes.start("stopped", python(code), is_ready=lambda: True)
        wait_for(lambda: says_something(stopped.log))
        assert guard.members({stopped.pid}) == [stopped.pid]
        os.kill(stopped.pid, signal.SIGSTOP)
    assert (stopped.tail(1), stopped.exit_status) == (["bye"], 0)


def test_stages_end_in_reverse(tmp_path, monkeypatch):
    ended: list[set[int]] = []
    end = guard.end
    monkeypatch.setattr(guard, "end", lambda groups, grace_s: (ended.append(set(groups)), end(groups, grace_s)))
    with Processes(tmp_path) as processes:
        first = processes.start("first", python(SLEEP), is_ready=lambda: True)
        processes.stage()
        second = processes.start("second", python(SLEEP), is_ready=lambda: True)
        third = processes.start("third", python(SLEEP), is_ready=lambda: True)
    assert ended == [{second.pid, third.pid}, {first.pid}]


def test_a_log_of_many_lines_is_read_from_its_end(tmp_path):
    log = tmp_path / "big.log"
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(10_000)) + "\r 50%\r100% \N{CHECK MARK}\n\n".encode())
    done = subprocess.Popen(["true"])
    done.wait()
    big = Process("big", done, log, lambda: True)
    assert big.tail(2) == [" 50%", "100% \N{CHECK MARK}"]
    assert big.tail(3)[0] == "line 9999"


def test_a_log_that_grows_without_end_begins_anew(tmp_path, monkeypatch):
    """Of what it said before so much is kept, and what comes afterwards is at the beginning."""
    monkeypatch.setattr(processes_module, "MAX_LOG_BYTES", 1_000)
    waits = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [10])"
    talks = f"print('x' * 99_999 + 'y', flush=True)\nsignal.sigwait([10])\nprint('on', flush=True)\n{SLEEP}"
    with Processes(tmp_path) as processes:
        talker = processes.start("talker", python(f"{waits}\n{talks}"), is_ready=lambda: True)
        wait_for(lambda: says_something(talker.log))
        assert processes.look() == []
        assert talker.log.stat().st_size == 0
        assert (tmp_path / "talker.log.1").read_text() == "x" * 998 + "y\n"
        os.kill(talker.pid, 10)
        wait_for(lambda: says_something(talker.log))
        assert talker.log.read_bytes() == b"on\n"


def test_the_last_runs_log_is_kept_once(tmp_path):
    for word in ("one", "two", "three"):
        with Processes(tmp_path) as processes:
            talker = processes.start("talker", python(f"print({word!r}, flush=True); {SLEEP}"), is_ready=lambda: True)
            wait_for(lambda talker=talker: says_something(talker.log))
    found = {path.name: path.read_text() for path in tmp_path.glob("*.log*")}
    assert found == {"talker.log": "three\n", "talker.log.1": "two\n"}


@pytest.mark.parametrize("where", ["file", "file/below", "taken"])
def test_logs_that_cannot_be_written_are_named(tmp_path, where):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "one.log").mkdir(parents=True)
    (tmp_path / "taken" / "one.log.1").touch()
    with pytest.raises(ConfigError, match="--logs"), Processes(tmp_path / where) as processes:
        processes.start("one", python(SLEEP), is_ready=lambda: True)


@pytest.mark.parametrize("leads_to", ["nothing", "file"])
def test_a_mark_that_is_a_link_is_not_followed(tmp_path, leads_to):
    logs = tmp_path / "logs"
    (tmp_path / "file").touch()
    logs.mkdir()
    (logs / processes_module.MARK).symlink_to(tmp_path / leads_to)
    before = [(path, path.lstat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    with pytest.raises(ConfigError, match=r"\.pdx-logs is a symbolic link, .*--logs"), Processes(logs) as processes:
        processes.start("one", python(SLEEP), is_ready=lambda: True)
    assert [(path, path.lstat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == before


@pytest.mark.parametrize("name", ["one.log", "one.log.1"])
def test_a_log_that_is_a_link_is_not_followed(tmp_path, name, monkeypatch):
    monkeypatch.setattr(processes_module, "MAX_LOG_BYTES", 2)
    logs, target = tmp_path / "logs", tmp_path / "target"
    target.write_text("somebody's own")
    logs.mkdir()
    (logs / processes_module.MARK).touch()
    (logs / name).symlink_to(target)
    with Processes(logs) as processes:
        one = processes.start("one", python(f"print('hello', flush=True); {SLEEP}"), is_ready=lambda: True)
        wait_for(lambda: says_something(one.log))
        processes.look()
        assert one.log.read_bytes() == b""
    assert target.read_text() == "somebody's own"


def test_logs_that_somebody_removed_have_no_last_lines(tmp_path):
    logs = tmp_path / "logs"
    with Processes(logs) as processes:
        one = processes.start("one", python(SLEEP), is_ready=lambda: True)
        one.log.unlink()
        assert (one.tail(3), processes.look()) == ([], [])
        logs.rename(tmp_path / "away")
        logs.touch()
        assert (one.tail(3), processes.look()) == ([], [])


def test_all_of_them_end_although_the_guard_was_killed(tmp_path):
    with Processes(tmp_path) as processes:
        first = processes.start("first", python(f"print('hello', flush=True); {SLEEP}"), is_ready=lambda: True)
        processes.stage()
        second = processes.start("second", python(f"print('hello', flush=True); {SLEEP}"), is_ready=lambda: True)
        wait_for(lambda: says_something(first.log) and says_something(second.log))
        (watching,) = (pid for pid in _descendants(os.getpid()) if b"watch" in _argv(pid))
        os.kill(watching, signal.SIGKILL)
        wait_for(lambda: has_ended(watching))
    assert has_ended(first.pid)
    assert has_ended(second.pid)


def test_no_orphans_when_the_parent_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    wait_for(lambda: says_something(tmp_path / "family.log") and says_something(tmp_path / "stubborn.log"))
    child = int((tmp_path / "family.log").read_text())
    group = os.getpgid(child)
    everyone = [child, *_descendants(parent.pid)]
    assert len(everyone) >= 4  # child, its leader, the stubborn one, the guard
    parent.kill()
    parent.wait()
    wait_for(lambda: all(has_ended(pid) for pid in everyone))
    assert guard.members({group}) == []


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def _argv(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


# ---- whatever listens there: it is asked again, or is ready ---------------------------------------


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The URL of a server that gives one connection this answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client:
                client.recv(4096)
                client.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.join()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"HTTP/1.1 503 No\r\n\r\n"]
)
def test_what_is_no_whole_answer_is_not_ready(answer: bytes) -> None:
    with answering(answer) as url:
        assert not answers(url)


@pytest.mark.parametrize(
    ("body", "is_ready"),
    [
        (b"<p>", False),
        (b"[]", False),
        (b'{"nodes": "many", "prefillers": 1}', False),
        (b'{"nodes": 2, "prefillers": 0}', False),
        (b'{"nodes": 2, "prefillers": 1}', True),
    ],
)
def test_a_proxy_is_ready_when_it_knows_the_nodes_and_engines(
    body: bytes, is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port may be that of another server, as an engine's was once: one of vLLM's says nothing in its answer."""
    monkeypatch.setattr(processes_module, "ANSWER_S", 600.0)  # the body decides, not how soon it comes
    with answering(ok(body)) as url:
        assert answers(url, nodes=2, prefillers=1) is is_ready
