"""The lock beside a socket: one owner, who is named to whoever comes second."""

import os
import subprocess
import sys

import pytest

from pdx.errors import NodeRunning
from pdx.ownership import owned

OWNER = """
import sys
from pathlib import Path
from pdx.ownership import owned
with owned(Path(sys.argv[1]), RuntimeError):
    print("owned", flush=True)
    sys.stdin.read()
"""


def test_a_path_has_one_owner_as_long_as_that_lives(tmp_path):
    path = tmp_path / "node.sock"
    command = [sys.executable, "-c", OWNER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "owned\n"
        with pytest.raises(NodeRunning, match=f"^{owner.pid}$"), owned(path, NodeRunning):
            pass
        owner.kill()
    with owned(path, NodeRunning):
        assert (tmp_path / "node.sock.lock").read_text() == str(os.getpid())
        with pytest.raises(NodeRunning, match=f"^{os.getpid()}$"), owned(path, NodeRunning):
            pass
    with owned(path, NodeRunning):
        pass
