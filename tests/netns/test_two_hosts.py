"""Nodes on two hosts that share only a cable: CURVE, a roster, TCP; and what happens when the cable is pulled."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq.auth
from click.testing import CliRunner
from network import Host, connect, need_namespaces

import pdx
from pdx.cli.main import main
from pdx.config import NodeConfig
from pdx.testing.waiting import wait_until
from pdx.wire.status import NodeStatus, PeerStatus

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
PARTS = 8
NBYTES = PARTS * 2 * MIB
ARENA_BYTES = 64 * MIB
LOST_S = 2.0  # after so long a silence a peer is lost, where the cable is pulled
PATIENT_S = 60.0  # elsewhere: a stall of this machine is no silence
NAMES = ("alpha", "beta")


class Machine:
    """A host with a node on it. Its socket for processes is reached from here; its peers reach it over the cable."""

    def __init__(self, name: str, host: Host, place: Path, lost_s: float) -> None:
        self.name = name
        self.host = host
        self.config = NodeConfig(
            address=f"ipc://{place}/{name}.sock",
            arena_bytes=ARENA_BYTES,
            name=name,
            listen=f"tcp://{host.address}:7700",
            roster=str(place / "roster.toml"),
            keys=str(place / "keys" / f"{name}.key_secret"),
            channels=["tcp"],
            peer_timeout_s=lost_s,
            grant_s=2.0,
            push_s=60.0,  # longer than any wait of these tests: only a loss that is noticed gives room back
        )
        command = [sys.executable, "-P", "-m", "pdx.node", msgspec.json.encode(self.config).decode()]
        self._log = (place / f"{name}.log").open("wb")
        self.process = subprocess.Popen(
            host.inside(*command), stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )

    @property
    def log(self) -> str:
        """What the node logged."""
        return Path(self._log.name).read_text()

    def attach(self) -> pdx.Node:
        """A client of its node."""
        assert self.process.poll() is None, self.log
        return pdx.connect(self.config.address, timeout_s=20)

    def status(self) -> NodeStatus:
        """Its node's status."""
        with self.attach() as node:
            return node.status()

    def peer(self) -> PeerStatus | None:
        """What its node says of the other one."""
        return next((peer for peer in self.status().peers if peer.name != self.name), None)

    def landed_bytes(self) -> int:
        """What has arrived so far, of pushes under way too."""
        return self.status().counters["landed_bytes"]

    def is_at_rest(self) -> bool:
        """Nothing is pushed, landing, filled, held or kept back."""
        status = self.status()
        busy = [state for state, count in status.chunks.items() if count and state != "sealed"]
        peers = [peer for peer in status.peers if peer.pushes or peer.landing]
        return not busy and not peers and not status.leases and not status.transfers

    def close(self) -> None:
        """End the node; it cleans up after itself."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._log.close()
        assert status == 0, self.log


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    need_namespaces()
    made: list[Host] = []
    try:
        made += [Host("10.77.0.1"), Host("10.77.0.2")]
        connect(made)
        yield made
    finally:
        for host in made:
            host.close()


@pytest.fixture
def machines(request: pytest.FixtureRequest, hosts: list[Host], place: Path) -> Iterator[list[Machine]]:
    place.chmod(0o700)
    roster = []
    for name, host in zip(NAMES, hosts, strict=True):
        made = CliRunner().invoke(main, ["keygen", name, "--folder", str(place / "keys")])
        assert made.exit_code == 0, made.output
        public = zmq.auth.load_certificate(place / "keys" / f"{name}.key")[0].decode()
        roster += [f"[nodes.{name}]", f'address = "tcp://{host.address}:7700"', f"key = '{public}'"]
    (place / "roster.toml").write_text("\n".join(roster))
    started: list[Machine] = []
    try:
        for name, host in zip(NAMES, hosts, strict=True):
            started.append(Machine(name, host, place, getattr(request, "param", PATIENT_S)))
        yield started
    finally:
        for machine in started:
            machine.close()


def noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(NBYTES)


def push(sender: Machine, receiver: Machine, name: str, seed: int) -> None:
    """A chunk of `sender`, filled part by part, is read at `receiver`, byte by byte the same."""
    data = noise(seed)
    with sender.attach() as node, node.reserve(name, NBYTES, parts=PARTS, push_to=receiver.name) as chunk:
        chunk.view[:] = data
        for part in range(PARTS):
            chunk.fill(part)
        chunk.seal()
    with receiver.attach() as node, node.get(name, wait_s=20) as arrived:
        assert bytes(arrived.view) == data


def wait_at_rest(machines: list[Machine], timeout_s: float) -> None:
    for machine in machines:
        wait_until(machine.is_at_rest, timeout_s=timeout_s, what=f"{machine.name} is at rest")


def test_a_chunk_arrives_at_the_other_host_both_ways(machines: list[Machine]) -> None:
    alpha, beta = machines
    push(alpha, beta, "there", seed=1)
    push(beta, alpha, "back", seed=2)
    there, back = alpha.peer(), beta.peer()
    assert there is not None
    assert back is not None
    assert (there.state, there.channel, there.address) == ("ready", "tcp", beta.config.listen)
    assert (back.state, back.channel, back.address) == ("ready", "tcp", alpha.config.listen)
    assert there.sent_bytes >= NBYTES
    assert back.landed_bytes >= NBYTES
    assert there.landed_bytes >= NBYTES
    wait_at_rest(machines, 5)


@pytest.mark.long
def test_nobody_listens_beyond_the_address_that_was_named(machines: list[Machine]) -> None:
    """Neither the link nor the data channel is open on another address of the host."""
    alpha, beta = machines
    push(alpha, beta, "opens-everything", seed=3)
    for machine in machines:
        listening = machine.host.run("ss", "-Hltn").splitlines()
        addresses = {line.split()[3].rpartition(":")[0] for line in listening}
        assert addresses == {machine.host.address}, listening


@pytest.mark.long
@pytest.mark.parametrize("machines", [LOST_S], indirect=True)
@pytest.mark.parametrize("moment", ["between writes", "in the middle of a write"])
def test_the_cable_is_pulled_and_plugged_in_again(moment: str, machines: list[Machine]) -> None:
    """What was on its way is given up within deadlines, on both sides; nothing stays behind, and all works again."""
    alpha, beta = machines
    push(alpha, beta, "warm", seed=4)
    if moment != "between writes":
        alpha.host.slow_down(20)  # then the chunk takes more than six seconds
    landed = beta.landed_bytes()
    data = noise(5)
    with alpha.attach() as node:
        with node.reserve("cut", NBYTES, parts=PARTS, push_to="beta") as chunk:
            chunk.view[:] = data
            filled = PARTS // 2 if moment == "between writes" else PARTS
            for part in range(filled):
                chunk.fill(part)
            wait_until(lambda: beta.landed_bytes() > landed, timeout_s=10, what="it is on its way")
            beta.host.pull_out()
            for part in range(filled, PARTS):
                chunk.fill(part)
            chunk.seal()
        with node.get("cut") as kept:
            assert bytes(kept.view) == data
    wait_until(lambda: alpha.peer().state not in ("ready", "open"), timeout_s=5 * LOST_S, what="the peer is lost")
    wait_at_rest(machines, 10 * LOST_S)
    with beta.attach() as node:
        assert node.lookup(["cut"]) == 0, "half a chunk is no chunk"
        with node.reserve("all of it", ARENA_BYTES - 2 * NBYTES) as room:
            room.abort()
    beta.host.plug_in()
    wait_until(lambda: works(alpha, beta), timeout_s=30, what=f"pushes arrive again\n{alpha.log}\n{beta.log}")
    push(beta, alpha, "back again", seed=6)
    wait_at_rest(machines, 10)


def works(alpha: Machine, beta: Machine) -> bool:
    """Whether a chunk arrives; each try has a name of its own."""
    works.tries = getattr(works, "tries", 0) + 1
    name = f"again-{works.tries}"
    with alpha.attach() as node, node.reserve(name, 1 * MIB, push_to="beta") as chunk:
        chunk.view[:4] = b"here"
        chunk.seal()
    try:
        with beta.attach() as node, node.get(name, wait_s=2) as arrived:
            return bytes(arrived.view[:4]) == b"here"
    except pdx.errors.ChunkMissing:
        return False
