"""The units' services, with the environment and the read-only file systems that systemd gives them."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from pdx.cli.ports import free_ports
from pdx.testing.waiting import wait_until

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
NAMESPACE = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"]), "sh", "-euc"]
FOLDERS = {"RuntimeDirectory": "/run", "StateDirectory": "/var/lib", "CacheDirectory": "/var/cache"}
READ_ONLY = """
while read -r _ at _; do
    case $at in /dev | /dev/* | /proc | /proc/* | /sys | /sys/*) continue ;; esac
    case " $WRITABLE " in *" $at "*) continue ;; esac
    mount -o remount,bind,ro "$at" 2>/dev/null || true
done </proc/mounts
[ ! -w /etc ]
"""


def has_namespaces():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "mount -o remount,bind,ro /"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="no mount namespaces here")


@pytest.fixture
def start(tmp_path):
    """Start a unit's command as systemd does; what services write to in /run and /var lies in `tmp_path`."""
    processes = []

    def started(name, config):
        unit = defaultdict(list)
        for line in (UNITS / f"{name}.service").read_text().splitlines():
            key, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                unit[key] += shlex.split(value) if key != "ExecStart" else [value]
        assert unit["ProtectSystem"] == ["strict"]
        writable = ["/tmp", "/var/tmp"] if unit["PrivateTmp"] == ["yes"] else []
        mounts = []
        for key, folder in FOLDERS.items():
            mounts.append(f"mount --bind {tmp_path / key} {folder}")
            (tmp_path / key).mkdir(exist_ok=True)
            for each in unit[key]:
                (tmp_path / key / each).mkdir(mode=0o700, exist_ok=True)
                writable.append(f"{folder}/{each}")
        mounts += [f"mount --bind {each} {each}" for each in writable]
        file = tmp_path / f"{name}.toml"
        file.write_text(config)
        _, *args, _ = shlex.split(unit["ExecStart"][0])
        environment = {each.partition("=")[0]: each.partition("=")[2] for each in unit["Environment"]}
        command = [sys.executable, "-m", "pdx.cli.main", *args, str(file)]
        script = "\n".join([*mounts, READ_ONLY, "cd /", f"exec {shlex.join(command)}"])
        kept = {each: os.environ[each] for each in ("PATH", "PYTHONPATH") if each in os.environ}
        process = subprocess.Popen([*NAMESPACE, script], env={**kept, **environment, "WRITABLE": " ".join(writable)})
        processes.append(process)
        return process

    yield started
    for each in reversed(processes):
        each.send_signal(signal.SIGTERM)
        each.wait()


def health(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)
    except OSError:
        return {}


def test_node_and_proxy_of_the_units_start_and_meet(start):
    port, listen = free_ports(2)
    node = start("pdx-node", f'arena = "16MiB"\nlisten = "tcp://127.0.0.1:{listen}"\ndisk = "/var/cache/pdx/chunks"\n')
    proxy = start("pdx-proxy", f"port = {port}\n")
    wait_until(
        lambda: node.poll() is not None or proxy.poll() is not None or health(port).get("nodes") == 1,
        timeout_s=60,
        what="they have met",
    )
    assert (node.poll(), proxy.poll()) == (None, None)
