"""Fixtures for all tests: a private folder, real nodes in it, and a check that each test gives back what it took."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import examples  # noqa: F401 - before any property
import forked
import pytest
import zmq
from hypothesis import settings

pytest.register_assert_rewrite("pdx.testing")  # the suite's own modules, whichever test imports one of them first

from forge import Forge  # noqa: E402
from node_harness import MIB, NodeProcess, NodeThread, Puppet, Wire, arenas_of, attached  # noqa: E402

from pdx.config import NodeConfig  # noqa: E402
from pdx.testing.waiting import wait_until  # noqa: E402
from pdx.wire.status import COUNTING  # noqa: E402

# Processes that tests start find tests/support, too: the fake CUDA driver is there.
_support = str(Path(__file__).with_name("support"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_support, os.environ.get("PYTHONPATH"))))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started us in the background; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

LEAK_ROUNDS = 250  # of 0.02 s and more; not a time, in which the machine may have stood still
_HARMLESS_FDS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/nvidia", "/memfd:/.nvidia", "/proc/driver/nvidia")
# CUDA, NVML and UCX open one or the other of these when they first need it, and keep it.
_KEPT_BY_DRIVERS = ("anon_inode:[eventfd]", "anon_inode:[eventpoll]", "socket", "pipe")
_kept_by_drivers: set[str] = set()  # kinds that were seen in a test on a GPU: each is forgiven once
_HARMLESS_CHILDREN = ("resource_tracker", "forkserver", "forked.py")


PARTS = {"beside": "", "engines": "engine", "long": "long"}  # and the mark of their tests


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part`: `make test` runs most tests side by side (`-n`), then those of real engines, which use all cores;
    `make test-long` those that take long, or whose outcome rests on how fast the machine is, and all properties again,
    with more examples."""
    parser.addoption("--part", choices=PARTS, help="the tests that may run beside others, or one of the other parts")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("part") == "long":
        settings.load_profile("all")


@pytest.hookimpl(trylast=True)  # properties have their mark by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part that is asked for; a test that has several marks is of the last part."""
    wanted = config.getoption("part")
    if wanted is None:
        return
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        parts = [part for part, mark in PARTS.items() if mark and item.get_closest_marker(mark)]
        is_property = item.get_closest_marker("hypothesis") is not None
        kept[(parts or ["beside"])[-1] == wanted or (wanted == "long" and is_property)].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


def _fds() -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith(_HARMLESS_FDS) and target != f"/proc/{os.getpid()}/fd":
                found[target.partition(":[")[0] if target.startswith(("socket", "pipe")) else target] += 1
    return found


_commands: dict[str, str] = {}  # of children, as they were last seen


def _children() -> Counter[str]:
    found: Counter[str] = Counter()
    for task in [*Path("/proc/self/task").iterdir(), *Path(f"/proc/{forked.origin().pid}/task").iterdir()]:
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if not any(word in command for word in _HARMLESS_CHILDREN):
                    _commands[pid] = command or "not waited for"
                    found[pid] += 1  # by its number alone: some write their command anew
    return found


def _threads() -> Counter[str]:
    return Counter(f"{thread.name} ({thread.ident})" for thread in threading.enumerate())


def _holdings() -> dict[str, Counter[str]]:
    return {"open files": _fds(), "children": _children(), "threads": _threads()}


@pytest.fixture(scope="session", autouse=True)
def _origin_of_processes() -> Iterator[None]:
    """Started before the first test, which would otherwise be said to leave it behind."""
    forked.origin()
    yield
    forked.close()


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Where vLLM's engines of several families come from, and what they say of them."""
    with Forge(tmp_path_factory.mktemp("forge")) as forge:
        yield forge


@pytest.fixture(scope="session", autouse=True)
def _zmq_has_its_thread() -> None:
    """pyzmq starts it when something is sent without a copy for the first time, and keeps it."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://one")
        other.connect("inproc://one")
        tracker = one.send(bytes(1 << 20), copy=False, track=True)
        other.recv()
        tracker.wait(60)


@pytest.fixture(scope="module", autouse=True)
def _the_collector_looks_at_what_is_new() -> None:
    """A collection walks through what a module's tests have made, and not through all that pytest and imports hold.

    With all tests in one process it walked for half a second, after each of hundreds of tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Open files, threads and child processes are after a test what they were before it.

    Not checked for tests marked `engine`: engines keep pools and processes of their own.
    """
    if request.node.get_closest_marker("engine"):
        yield
        return
    before = _holdings()
    yield
    for _ in range(LEAK_ROUNDS):
        leaks = {kind: now - before[kind] for kind, now in _holdings().items() if now - before[kind]}
        if not leaks:
            return
        gc.collect()
        time.sleep(0.02)
    if request.node.get_closest_marker("gpu"):
        leaks = not_the_drivers(leaks, _kept_by_drivers)
    if leaks:
        commands = {pid: _commands[pid] for pid in leaks.get("children", ())}
        pytest.fail(f"leaked: {leaks} {commands or ''}")


def not_the_drivers(leaks: dict[str, Counter[str]], known: set[str]) -> dict[str, Counter[str]]:
    """Without open files of a kind that a driver keeps, the first time it is seen; the kind is added to `known`."""
    files = {name for name in leaks.get("open files", {}) if name in _KEPT_BY_DRIVERS}
    forgiven, left = files - known, dict(leaks)
    known |= files
    if forgiven:
        found = leaks["open files"]
        left["open files"] = Counter({name: found[name] for name in found.keys() - forgiven})
    return {kind: found for kind, found in left.items() if found}


@contextlib.contextmanager
def _private_place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="pdx-test-"))  # not tmp_path: a socket's path has at most 100 bytes
    try:
        yield folder
        addresses = [f"ipc://{lock}".removesuffix(".lock") for lock in folder.rglob("*.lock")]
        left = [path for address in addresses for path in arenas_of(address)]
        left += [path for path in folder.rglob("*") if path.is_socket()]
        for path in left:
            path.unlink()
        assert not left, f"left behind: {left}"
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def place() -> Iterator[Path]:
    """A private folder with a short path. After the test, no socket in it and no arena of its nodes is left."""
    with _private_place() as folder:
        yield folder


@pytest.fixture
def address(place: Path) -> str:
    """An address for a node that no other test uses."""
    return f"ipc://{place}/node.sock"


@contextlib.contextmanager
def _nodes(address: str, make: Callable[[NodeConfig], Any] = NodeProcess.ready) -> Iterator[Callable[..., Any]]:
    nodes: list[Any] = []

    def start_node(**settings: Any) -> Any:
        nodes.append(make(NodeConfig(**{"address": address, "arena_bytes": 8 * MIB, **settings})))
        if nodes[-1].config.disks:  # until then nobody knows what was never stored
            wait_until(lambda: COUNTING not in {tier.state for tier in nodes[-1].status().tiers}, what="all is counted")
        return nodes[-1]

    try:
        yield start_node
    finally:
        for node in nodes:
            node.close()


@pytest.fixture
def start_node(address: str) -> Iterator[Callable[..., NodeProcess]]:
    """Starts real nodes with the given settings (8 MiB of arena otherwise); ends them after the test."""
    with _nodes(address) as start:
        yield start


@pytest.fixture
def start_here(address: str) -> Iterator[Callable[..., NodeThread]]:
    """Starts nodes in threads of this process, with the same settings; ends them after the test."""
    with _nodes(address, NodeThread) as start:
        yield start


@pytest.fixture
def node(start_node: Callable[..., NodeProcess]) -> NodeProcess:
    """A real node process with an arena of 8 MiB."""
    return start_node()


@pytest.fixture(scope="module")
def module_node() -> Iterator[NodeProcess]:
    """One node process for all tests of a file, which must leave nothing in it."""
    with _private_place() as folder, _nodes(f"ipc://{folder}/node.sock") as start:
        yield start()


@pytest.fixture(scope="module")
def node_here() -> Iterator[NodeThread]:
    """The same in a thread of this process."""
    with _private_place() as folder, _nodes(f"ipc://{folder}/node.sock", NodeThread) as start:
        yield start()


@pytest.fixture
def attach() -> Iterator[Callable[..., Wire]]:
    """Makes attached raw connections: `attach(node, kind="worker", …)`; closes them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda node, **settings: stack.enter_context(attached(node.address, **settings))


@pytest.fixture
def puppets(address: str) -> Iterator[Callable[[], Puppet]]:
    """Starts real client processes of the node at `address`; ends them after the test."""
    started: list[Puppet] = []

    def start() -> Puppet:
        started.append(Puppet(address))
        return started[-1]

    yield start
    for puppet in started:
        puppet.close()
