"""Processes in containers: other PID namespaces than the node's. Made by `unshare`, without a container engine."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from node_harness import MIB, Wire

from pdx.client.connection import attached
from pdx.errors import ProtocolError
from pdx.security.curve_keys import KeyPair
from pdx.testing.waiting import wait_until

IN_NAMESPACE = ["unshare", "--pid", "--ipc", "--net", "--uts", "--fork", "--kill-child", "--mount-proc"]

ENGINE = """
import os, sys
from pdx.client.connection import attached
with attached(sys.argv[1], 30.0) as node:
    print(os.getpid(), node.is_alive, flush=True)
    for line in sys.stdin:
        print(node.is_alive, flush=True)
"""


def _can_unshare():
    if not shutil.which("unshare"):
        return False
    return not subprocess.run([*IN_NAMESPACE, "true"], check=False, capture_output=True).returncode


pytestmark = pytest.mark.skipif(not _can_unshare(), reason="needs the right to make namespaces (root)")


@pytest.fixture
def engine(node):
    """A process attached to the node, as pid 1 of a namespace of its own."""
    command = [*IN_NAMESPACE, sys.executable, "-c", ENGINE, node.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "1 True\n"
        yield process
        process.kill()


def test_a_process_in_a_container_has_its_number_on_the_host_and_its_death_is_seen(node, engine):
    with Wire(node.address) as wire:
        wire.hello()
        (pid,) = (each.pid for each in wire.status().attached if each.pid != os.getpid())
        assert pid != 1
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: wire.status().counters.get("deaths"), what="the node sees that it has died")
        assert [each.pid for each in wire.status().attached] == [os.getpid()]


def test_a_process_in_a_container_sees_its_nodes_end(node, engine):
    node.close()
    print(file=engine.stdin, flush=True)
    assert engine.stdout.readline() == "False\n"


POD = """
import os, sys
from pdx.client.connection import attached
from pdx.config import NodeConfig
from pdx.node.start import start
run = sys.argv[1]
config = NodeConfig(
    address=f"ipc://{run}/node/node.sock", arena_bytes=8 << 20, listen="tcp://127.0.0.1:0", name="alpha",
    keys=sys.argv[2], roster=sys.argv[3],
)
process = start(config)
with attached(config.address, 60.0) as node:
    print(node.is_alive, oct(os.stat(f"{run}/node").st_mode & 0o777))
process.terminate()
process.wait()
"""


def test_a_node_runs_in_a_pod_with_a_read_only_root_and_a_folder_that_is_open_to_its_group(place):
    """A node's own folder lies in that one; nothing else can be written but /dev/shm, not even /tmp."""
    run, keys, roster = place / "run", place / "keys", place / "roster.toml"
    run.mkdir()
    keys.mkdir(mode=0o700)
    secret = KeyPair.make().save(keys, "alpha")[0]
    roster.write_text(f'[nodes.alpha]\naddress = "tcp://127.0.0.1:7700"\nkey = "{KeyPair.load(secret).public}"\n')
    roster.chmod(0o600)
    mounts = 'mount -t tmpfs -o mode=2777 tmpfs "$1" && mount -o remount,bind,ro /'
    script = f'{mounts} && TMPDIR="$1" exec "$0" -c "$2" "$1" "$3" "$4"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, str(run), POD, str(secret), str(roster)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.stdout == "True 0o700\n", said.stderr


def test_a_node_is_not_ended_from_a_container_nor_what_has_its_number_there(node):
    """Its number in the node's namespace was signalled in the container's."""
    code = "import sys; from pdx.cli.node import end_node; end_node(sys.argv[1], force=True)"
    command = [*IN_NAMESPACE, sys.executable, "-c", code, node.address]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "end it where it runs" in said
    with Wire(node.address) as wire:
        assert wire.hello().pid == node.pid


def test_a_node_in_a_container_says_that_it_does_not_see_who_is_outside(place):
    address = f"ipc://{place}/node.sock"
    settings = json.dumps({"address": address, "arena_bytes": 8 * MIB})
    command = [*IN_NAMESPACE, sys.executable, "-m", "pdx.node", settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: os.path.exists(f"{place}/node.sock"), what="the node serves")
            with pytest.raises(ProtocolError, match=f"process {os.getpid()} is not seen from here.*hostPID: true"):
                attached(address, 30.0)
        finally:
            os.kill(int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()), signal.SIGTERM)
