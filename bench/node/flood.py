"""What a node does under a flood, and whom it keeps waiting.

    python -m pdx.bench.node.flood [--seconds N] [--limit FILES]

First strangers without a key: 2,000 connections that say nothing and 1,000 hellos, from the address that the honest
peer has, too. Meanwhile an engine asks the node all the time, and the peer pushes chunks. Then one process has 400
lookups of 16,384 hits queued while another one asks for signs of life. The reference is the same without the flood.
`--only proxy`: the same of a proxy, see `pdx.bench.proxy.flood`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from pdx.bench.harness.nodes import end
from pdx.bench.harness.report import Figure, at_least, at_most, plain, publish
from pdx.bench.proxy import flood as proxy_flood
from pdx.client.api import Node, connect
from pdx.config import NodeConfig
from pdx.node.start import start
from pdx.security.curve_keys import KeyPair
from pdx.testing.waiting import wait_until
from pdx.wire.messages import VERSION, Admit, Admitted, Fill, Hello, ToNode, decode_from_node, encode

NAMES = ("alpha", "beta")  # beta pushes to alpha, which is flooded
CONNECTS, HELLOS = 2000, 1000
LOOKUPS, HITS = 400, 16_384
CHUNK_BYTES = 4096
ATTACH_S = 30.0
GOAL_MEMORY = 50 << 20
GOAL_PING_MS = 100.0


class Child:
    """A process of `flood_child`."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "pdx.bench.node.flood_child", *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> None:
        """Wait until it says so."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def end(self) -> Any:
        """What it found."""
        output, _ = self._process.communicate("")
        return json.loads(output.splitlines()[-1])


class Stage:
    """Two nodes with keys at loopback addresses; alpha may open `limit` files."""

    def __init__(self, folder: Path, limit: int, *, keys: bool) -> None:
        roster = folder / "roster.toml"
        pairs = {name: KeyPair.make() for name in NAMES} if keys else {}
        secrets = {name: str(pair.save(folder / "keys", name)[0]) for name, pair in pairs.items()}
        self._write(roster, dict.fromkeys(NAMES, "tcp://127.0.0.1:1"), pairs)
        self.processes = {}
        self.address = {name: f"ipc://{folder}/{name}.sock" for name in NAMES}
        for name in NAMES:
            config = NodeConfig(
                address=self.address[name],
                name=name,
                listen="tcp://127.0.0.1:0",
                roster=str(roster),
                keys=secrets.get(name, ""),
                channels=["tcp"],
                arena_bytes=128 << 20,
            )
            self.processes[name] = start(config)
        if limit:
            resource.prlimit(self.processes["alpha"].pid, resource.RLIMIT_NOFILE, (limit, limit))
        self.clients = {name: connect(self.address[name], ATTACH_S) for name in NAMES}
        self.listen = {name: client.status().listen for name, client in self.clients.items()}
        self._write(roster, self.listen, pairs)
        wait_until(self._are_linked, "beta has a link to alpha", ATTACH_S)

    def _are_linked(self) -> bool:
        peers = self.clients["beta"].status().peers
        return any(peer.name == "alpha" and peer.state == "ready" for peer in peers)

    @staticmethod
    def _write(roster: Path, addresses: dict[str, str], pairs: dict[str, KeyPair]) -> None:
        entries = (
            f'[nodes.{name}]\naddress = "{address}"\n' + (f'key = "{pairs[name].public}"\n' if pairs else "")
            for name, address in addresses.items()
        )
        partial = roster.with_suffix(".new")
        partial.write_text("".join(entries))
        partial.chmod(0o600)
        partial.replace(roster)

    def push(self, name: str) -> float:
        """Have beta push one chunk; returns the seconds until alpha has it."""
        started_at = time.perf_counter()
        with self.clients["beta"].reserve(name, CHUNK_BYTES, push_to="alpha") as chunk:
            chunk.seal()
        wait_until(
            lambda: self.clients["alpha"].lookup([name]) == 1, f"chunk {name} is at alpha", ATTACH_S, pause_s=0.001
        )
        return time.perf_counter() - started_at

    def memory(self) -> int:
        """Resident bytes of alpha that are no file's and no arena's."""
        text = Path(f"/proc/{self.processes['alpha'].pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon"))

    def close(self) -> None:
        """End everything. Idempotent."""
        for client in self.clients.values():
            client.close()
        for process in self.processes.values():
            end(process)


@contextlib.contextmanager
def stage(limit: int, *, keys: bool) -> Iterator[Stage]:
    """See `Stage`."""
    with (
        tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder,
        contextlib.closing(Stage(Path(folder), limit, keys=keys)) as made,
    ):
        yield made


def under_flood(made: Stage, seconds: float, *, floods: bool) -> tuple[list[float], list[float], int]:
    """Times of pings and pushes, and the most memory that the node had."""
    host, _, port = made.listen["alpha"].removeprefix("tcp://").rpartition(":")
    engine = Child("pings", made.address["alpha"])
    engine.ready()
    flooding = (
        [Child("connects", host, port, CONNECTS), Child("hellos", made.listen["alpha"], HELLOS)] if floods else []
    )
    pushes: list[float] = []
    most = 0
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        pushes.append(made.push(f"{floods}-{len(pushes)}"))
        most = max(most, made.memory())
        time.sleep(0.02)
    for child in flooding:
        print(child.end())
    return engine.end()["times"], pushes, most


def measure_flood(seconds: float, limit: int, *, keys: bool) -> list[Figure]:
    """The node without and with strangers."""
    with stage(limit, keys=keys) as made:
        made.push("first")
        before = made.memory()
        calm_pings, calm_pushes, _ = under_flood(made, seconds / 3, floods=False)
        pings, pushes, most = under_flood(made, seconds, floods=True)
        lives = made.processes["alpha"].poll() is None
        counters = made.clients["alpha"].status().counters
        made.push("last")
    print({name: value for name, value in counters.items() if "stranger" in name or "descr" in name or "error" in name})
    kind = "CURVE" if keys else "plain"
    return [
        at_least(f"{kind}: the node lives", float(lives), "", 1),
        at_most(f"{kind}: memory that the flood adds", (most - before) / 1e6, "MB", GOAL_MEMORY / 1e6),
        plain(f"{kind}: an engine's ping, worst", max(pings) * 1e3, "ms", f"without: {max(calm_pings) * 1e3:.1f}"),
        plain(
            f"{kind}: an engine's ping, median", _median(pings) * 1e3, "ms", f"without: {_median(calm_pings) * 1e3:.2f}"
        ),
        plain(
            f"{kind}: a peer's push, median", _median(pushes) * 1e3, "ms", f"without: {_median(calm_pushes) * 1e3:.2f}"
        ),
        plain(f"{kind}: pushes that arrived", len(pushes), "", f"in {seconds:g} s, all that were begun"),
    ]


def measure_lookups() -> list[Figure]:
    """How long a ping of one process waits beside the lookups of another."""
    with tempfile.TemporaryDirectory(prefix="pdx-bench-") as folder:
        address = f"ipc://{folder}/node.sock"
        process = start(NodeConfig(address=address, arena_bytes=(HITS + 64) * CHUNK_BYTES))
        try:
            with connect(address, ATTACH_S) as client:
                keys = _fill(client)
                calm = Child("pings", address)
                calm.ready()
                time.sleep(2.0)
                reference = calm.end()["times"]
                pings, took_s = _beside_lookups(address, keys)
        finally:
            end(process)
    return [
        at_most("a ping beside 400 queued lookups of 16,384 hits, worst", max(pings) * 1e3, "ms", GOAL_PING_MS),
        plain("the same, median", _median(pings) * 1e3, "ms", f"without: {_median(reference) * 1e3:.2f}"),
        plain(
            "one such lookup",
            took_s / LOOKUPS * 1e3,
            "ms",
            f"without lookups the worst ping is {max(reference) * 1e3:.1f}",
        ),
    ]


def measure_proxy(seconds: float, limit: int) -> list[Figure]:
    """The proxy without and with strangers."""
    with proxy_flood.stage(limit) as made:
        calm = proxy_flood.asked(made, seconds / 3)
        floods = [
            Child("connects", "127.0.0.1", made.port, proxy_flood.CONNECTS),
            Child("connects", "127.0.0.1", made.control_port, proxy_flood.CONTROL_CONNECTS),
        ]
        before, started_at = made.log_bytes(), time.monotonic()
        flooded = proxy_flood.asked(made, seconds)
        log_rate = (made.log_bytes() - before) / (time.monotonic() - started_at)
        for child in floods:
            print(child.end())
        print(Counter(flooded.failures).most_common(5))
        lives = made.process.exit_status is None
        return proxy_flood.figures(calm, flooded, lives=lives, log_rate=log_rate, flood_s=seconds)


def _fill(client: Node) -> list[bytes]:
    keys = [os.urandom(16) for _ in range(HITS)]
    for first in range(0, HITS, 1024):
        reserved = client._connection.call(Admit(keys[first : first + 1024], CHUNK_BYTES), ATTACH_S)
        assert isinstance(reserved, Admitted)
        client._connection.call(Fill(reserved.granted_slots, seal=True), ATTACH_S)
    return keys


def _beside_lookups(address: str, keys: list[bytes]) -> tuple[list[float], float]:
    pinger = Child("pings", address)
    pinger.ready()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        dealer.send(encode(ToNode(1, True, Hello(VERSION, os.getpid(), "client", name="lookups"))))
        decode_from_node(dealer.recv())
        started_at = time.perf_counter()
        for number in range(LOOKUPS):
            dealer.send(encode(ToNode(number + 2, True, Admit(keys, lease_s=60.0))))
        for _ in range(LOOKUPS):
            dealer.recv()
        return pinger.end()["times"], time.perf_counter() - started_at


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument(
        "--limit", type=int, default=1024, help="files that the flooded node may have open; 0: as it is"
    )
    parser.add_argument("--only", choices=("flood", "lookups", "proxy"))
    options = parser.parse_args()
    figures: list[Figure] = []
    if options.only == "proxy":
        found = measure_proxy(options.seconds, options.limit)
        publish("flood-proxy", f"a proxy with {options.limit or 'all'} files under a flood", found)
        return
    if options.only != "lookups":
        for keys in (False, True):
            figures += measure_flood(options.seconds, options.limit, keys=keys)
    if options.only != "flood":
        figures += measure_lookups()
    publish("flood", f"a node with {options.limit or 'all'} files under a flood, and beside long lookups", figures)


if __name__ == "__main__":
    main()
