"""Eight processes do random things to one small node at once; half of them die at it (invariants 4)."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from node_harness import MIB

import pdx
from pdx.testing.waiting import wait_until

pytestmark = pytest.mark.long

STEPS = 1000  # of each process
CLIENT = Path(__file__).with_name("node_storm_client.py")


def test_after_a_storm_everything_is_back_within_a_second(start_node):
    node = start_node(arena_bytes=2 * MIB)
    storm = [
        subprocess.Popen(
            [sys.executable, str(CLIENT), node.address, str(seed), str(STEPS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(8)
    ]
    for process in storm:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in storm:
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=50)[1] for process in storm]
    assert [process.returncode for process in storm] == [-signal.SIGKILL, 0] * 4, errors

    with pdx.connect(node.address, timeout_s=30.0) as client:

        def is_back():
            status = client.status()
            return len(status.attached) == 1 and status.leases == 0 and set(status.chunks) <= {"sealed"}

        wait_until(is_back, timeout_s=1.0, what="leases and reservations are back")
        counters = client.status().counters
        assert counters["deaths"] == 4
        for counter in ("sealed", "aborted", "hit_chunks"):  # how many depends on the machine
            assert counters[counter] > 0, f"the storm did not reach far: {counters}"
        assert counters.get("messages_dropped", 0) == 0
        client.delete(*map(str, range(24)))
        assert client.status().free_bytes == 2 * MIB
