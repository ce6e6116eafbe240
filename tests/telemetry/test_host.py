"""The host's id: equal in all its processes."""

import subprocess
import sys

from pdx.telemetry.host import host_id
from pdx.wire.proxy import NodeReport


def test_processes_of_one_host_agree_and_reports_can_carry_it():
    code = "from pdx.telemetry.host import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id()
    assert 16 <= len(host_id()) <= 64
    assert NodeReport(1, "n", 1, 0, 0, [], [], host=host_id()).host == host_id()
