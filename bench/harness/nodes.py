"""Processes of the benches: a node and its client, two connected nodes, and helper programs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pdx.bench.harness.report import ROOT
from pdx.client.api import Node, connect
from pdx.client.connection import Connection
from pdx.config import NodeConfig
from pdx.errors import NodeUnavailable
from pdx.node.start import start
from pdx.testing.waiting import wait_until
from pdx.transports.registry import find
from pdx.wire.messages import VERSION, Admit, Admitted, Answer, Ask, Fill, Hello

ATTACH_S = 20.0
LINK_S = 10.0
ANSWER_S = 60.0
TO = "b"  # the name of the node that receives pushes


def why_not(scheme: str) -> str:
    """Why this channel does not work here; empty if it does."""
    found = find(scheme).availability()
    return "" if found.is_ok else found.why


@contextlib.contextmanager
def nodes(names: Sequence[str], **settings: Any) -> Iterator[list[str]]:
    """Addresses of nodes with these names, which know each other; they end with this context."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdx-bench-")))
        addresses = [f"ipc://{folder}/{name}.sock" for name in names]
        if len(names) > 1:
            roster = folder / "roster.toml"
            known = zip(names, addresses, strict=True)
            roster.write_text("".join(f'[nodes.{name}]\naddress = "{address}.peers"\n' for name, address in known))
            roster.chmod(0o600)
            settings["roster"] = str(roster)
        for name, address in zip(names, addresses, strict=True):
            stack.callback(end, start(NodeConfig(address=address, name=name, **settings)))
        yield addresses


@contextlib.contextmanager
def one_node(arena_bytes: int, **settings: Any) -> Iterator[str]:
    """The address of a node that ends with this context."""
    with nodes(("node",), arena_bytes=arena_bytes, **settings) as (address,):
        yield address


class TimedClient:
    """A client using the engines' own connection, with the duration of each timed answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.times: dict[str, list[float]] = {}

    def call(self, body: Ask) -> Answer:
        return self._connection.call(body, ANSWER_S)

    def timed(self, name: str, body: Ask) -> Answer:
        """Same as an untimed call, but records the time."""
        start_at = time.perf_counter()
        answer = self.call(body)
        self.times.setdefault(name, []).append(time.perf_counter() - start_at)
        return answer

    def admit(self, name: str, body: Admit) -> Admitted:
        answer = self.timed(name, body) if name else self.call(body)
        assert isinstance(answer, Admitted)
        return answer

    def seal(self, keys: list[bytes], chunk_bytes: int, layers: int = 1) -> None:
        """Seal chunks under these keys. :raises RuntimeError: there is not enough room for all of them."""
        reserved = self.admit("", Admit(keys, chunk_bytes, layers))
        if len(reserved.granted) != len(keys):
            raise RuntimeError(f"the node has no room for {len(keys):,} chunks: {reserved}")
        self.call(Fill(reserved.granted_slots, layers=layers, seal=True))


@contextlib.contextmanager
def timed_client(address: str) -> Iterator[TimedClient]:
    """A client of that node. :raises NodeUnavailable: it does not answer."""
    with Connection(address, Hello(VERSION, os.getpid(), "client", name="bench")) as connection:
        if not connection.attach(ATTACH_S):
            raise NodeUnavailable(f"the node at {address} does not answer within {ATTACH_S:g} s")
        yield TimedClient(connection)


@contextlib.contextmanager
def node_pair(scheme: str, arena_bytes: int, **settings: Any) -> Iterator[tuple[Node, Node]]:
    """A node and its peer `TO`, connected by `scheme`; both end with this context."""
    more = {"arena_bytes": arena_bytes, "channels": [scheme], **settings}
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(nodes(("a", TO), **more))
        a, b = (stack.enter_context(connect(address, ATTACH_S)) for address in addresses)
        _warm(a, b, scheme)
        yield a, b


def _warm(a: Node, b: Node, scheme: str) -> None:
    """Connect by a first push."""
    with a.reserve("warm", 1 << 20, push_to=TO) as chunk:
        chunk.seal()
    wait_until(lambda: b.lookup(["warm"]) == 1, f"a first push over {scheme}: {a.status().peers}", LINK_S)
    for node in (a, b):
        node.delete("warm")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


TIMEOUT_S = 20.0


class Child:
    """A helper program in its own process: `python -m module`. It runs while its standard input is open, and prints
    lines of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, value: Any) -> None:
        """Send it one line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Its next line. :raises RuntimeError: it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with {self.process.wait(TIMEOUT_S)}")
        return json.loads(line)

    def finish(self) -> Any:
        """Its output after its standard input is closed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.receive()

    def close(self) -> None:
        """Close its pipes and wait for its end; kill it if it does not end by itself. Idempotent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
