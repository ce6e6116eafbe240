"""Two hosts on one machine: network namespaces joined by a cable (a veth pair) that tests can pull.

A namespace lives as long as the process that holds it, and its end of the cable with it, so nothing can be left behind.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import pytest

CABLE = "pdx0"


def need_namespaces() -> None:
    """Skip the test where this user or kernel cannot make them."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"network namespaces are not allowed here: {tried.stderr.strip()}")


class Host:
    """A network namespace with an address of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "echo held; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "held\n"

    @property
    def pid(self) -> int:
        """A process inside."""
        return self._holder.pid

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host, in the same process."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *command]

    def run(self, *command: str) -> str:
        """What `command` says on this host."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def slow_down(self, mbit: int) -> None:
        """What it sends leaves at this rate; skip the test where the kernel cannot do that."""
        limit = ["tc", "qdisc", "add", "dev", CABLE, "root", "tbf", "rate", f"{mbit}mbit"]
        command = self.inside(*limit, "burst", "256kb", "latency", "200ms")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the cable cannot be made slow here: {done.stderr.strip()}")

    def plug_in(self) -> None:
        """Its end of the cable works."""
        self.run("ip", "link", "set", CABLE, "up")

    def pull_out(self) -> None:
        """Nothing comes in or goes out any more, and nobody is told."""
        self.run("ip", "link", "set", CABLE, "down")

    def close(self) -> None:
        """End the holder; the namespace goes with the last process inside."""
        self._holder.communicate()


def connect(hosts: Sequence[Host]) -> None:
    """Lay the cable between two hosts; skip the test where the kernel has none."""
    one, other = hosts
    make = ["ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(other.pid)]
    made = subprocess.run(one.inside(*make), capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"veth pairs cannot be made here: {made.stderr.strip()}")
    for host in hosts:
        host.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
        host.run("ip", "link", "set", "lo", "up")
        host.plug_in()
