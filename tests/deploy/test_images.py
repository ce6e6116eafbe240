"""The node's image, built by Buildah on a Debian made here, and run by Podman: no registry of images is asked."""

import json
import re
import resource
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pdx.cli.ports import free_ports
from pdx.testing.waiting import wait_until

ROOT = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
TOOLS = ("buildah", "debootstrap", "podman", "runc")
# Packages come from where this machine's pip finds them.
EXTRAS = re.search("^ARG EXTRAS=(.*)", (ROOT / "deploy/docker/node.Dockerfile").read_text(), re.MULTILINE)[1]
IMAGE = "localhost/pdx-node-under-test"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    *(pytest.mark.skipif(shutil.which(each) is None, reason=f"needs Debian's package {each}") for each in TOOLS),
]


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, f"{command[:2]}: {(done.stdout + done.stderr)[-1500:]}"
    return done.stdout


def podman(*words):
    return run("podman", "--runtime", "runc", *words)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    place = tmp_path_factory.mktemp("image")
    base, source, wheels = place / "base", place / "source", place / "wheels"
    packages = "--include=python3,python3-venv,ca-certificates"
    run("debootstrap", "--variant=minbase", packages, "bookworm", str(base), MIRROR)
    (base / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    run("tar", "-C", str(base), "-cf", str(place / "base.tar"), ".")
    podman("import", str(place / "base.tar"), f"{IMAGE}-base")
    version = run("chroot", str(base), "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    wanted = [f"{ROOT}[{EXTRAS}]", "setuptools>=77", "async-timeout"]  # the latter for redis before Python 3.11.3
    select = ["--only-binary", ":all:", "--python-version", version]
    try:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT))
        (own,) = wheels.iterdir()
        wanted[0] = f"{own}[{EXTRAS}]"
        run(sys.executable, "-m", "pip", "download", "-q", "-d", str(wheels), *select, *wanted)
        source.mkdir()
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-C", str(source), "-x"], input=archive, check=True)
        command = ["buildah", "bud", "--isolation", "chroot", "--network", "host", "-v", f"{wheels}:/wheels:ro"]
        command += ["--build-arg", f"BASE={IMAGE}-base"]
        run(*command, "-f", "deploy/docker/node.Dockerfile", "-t", IMAGE, ".", cwd=source)
        yield IMAGE
    finally:
        subprocess.run(["podman", "rmi", "-f", IMAGE, f"{IMAGE}-base"], capture_output=True, check=False)


@pytest.fixture
def start(image):
    """Run a container as the compose file does: a read-only root, the user of the image, a volume for sockets."""
    made = []
    limits = [f"{name}={hard}:{hard}" for name, hard in (("nofile", _hard("NOFILE")), ("nproc", _hard("NPROC") // 2))]
    podman("volume", "create", f"{Path(image).name}-run")

    def started(name, *words, options=()):
        more = [word for limit in limits for word in ("--ulimit", limit)]
        more += ["--network", "host", "--read-only", "-v", f"{Path(image).name}-run:/run/pdx", *options]
        podman("run", "-d", "--name", f"{Path(image).name}-{name}", *more, image, *words)
        made.append(f"{Path(image).name}-{name}")
        return made[-1]

    yield started
    for each in reversed(made):
        podman("rm", "-f", "-t", "0", each)
    podman("volume", "rm", f"{Path(image).name}-run")


def _hard(name):
    return min(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] % (1 << 63), 16384)


def answer(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def test_a_node_and_a_proxy_in_containers_of_one_pid_namespace(start):
    metrics, port = free_ports(2)
    node = start("node", "node", "--arena", "32MiB", "--metrics", f"127.0.0.1:{metrics}", options=["--shm-size", "64m"])
    proxy = start("proxy", "proxy", "--port", str(port), options=["--pid", f"container:{node}"])
    wait_until(lambda: '"nodes": 1' in answer(f"http://127.0.0.1:{port}/health"), timeout_s=60, what="they have met")
    assert answer(f"http://127.0.0.1:{metrics}/readyz")
    assert "pdx_node_arena_bytes" in answer(f"http://127.0.0.1:{metrics}/metrics")
    assert "arena 32.0 MiB" in podman("exec", node, "pdx", "node", "--status")
    assert podman("exec", node, "id", "-u").strip() == "10001"
    assert json.loads(podman("inspect", node))[0]["HostConfig"]["ReadonlyRootfs"]
    for each in (proxy, node):
        podman("stop", "-t", "60", each)
        assert podman("inspect", each, "--format", "{{.State.ExitCode}}").strip() == "0", podman("logs", each)
