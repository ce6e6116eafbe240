"""The wheel in environments of its own: what each extra brings is enough for what it is for.

Extras whose packages have gigabytes are resolved and not installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # downloads
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LARGE = ("torch", "gpu", "nixl", "ucx")
SMALL = sorted({*PROJECT["optional-dependencies"]} - {"dev", *LARGE})
USES = {  # modules that cannot do without the extra
    "bench": "matplotlib, pdx.bench.breakdown.command",
    "docs": "furo, myst_parser, sphinx",
    "otel": "opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.grpc, opentelemetry.exporter.otlp.proto.http",
    "parity": "anthropic, openai, pdx.bench.parity.command",
    "redis": "hiredis, pdx.store.remote.redis_backend",
    "s3": "obstore, pdx.store.remote.s3_backend",
    "testing": "hypothesis, pdx.testing",
    "tls": "cryptography.x509, pdx.transports.tls",
}
STORE = """
import sys, pdx
with pdx.connect(timeout_s=60) as node:
    with node.reserve("word", nbytes=4096) as chunk:
        chunk.view[:3] = b"pdx"
        chunk.seal()
    with node.get("word") as chunk:
        print(bytes(chunk.view[:3]), pdx.__version__, "torch" in sys.modules)
"""


def call(*command: object, **environment: str) -> str:
    given = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**given, **environment},
        cwd="/",
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """As `python -m build` makes it of what git has here."""
    folder = tmp_path_factory.mktemp("wheel")
    call("git", "-c", "safe.directory=*", "clone", "-q", ROOT, folder / "source")
    call(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source")
    [built] = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture
def install(tmp_path, wheel):
    """Makes an environment with the wheel, with an extra of it; returns where its programs are."""

    def made(extra: str = "", *options: object) -> Path:
        venv.create(tmp_path / "venv", with_pip=True)
        programs = tmp_path / "venv" / "bin"
        wanted = f"pdx-transport[{extra}] @ {wheel.as_uri()}" if extra else wheel
        call(programs / "pip", "install", "--quiet", *options, wanted)
        return programs

    return made


def use(programs: Path, place: Path) -> None:
    """What needs no engine: help, what works here, a node with a client, and a proxy's options."""
    reach = {"XDG_RUNTIME_DIR": str(place), "PDX_NODE": f"ipc://{place}/node.sock"}
    assert "pdx up MODEL" in call(programs / "pdx", "--help")
    assert call(programs / "pdx", "--version").split()[-1] == PROJECT["version"]
    assert "--max-body" in call(programs / "pdx", "proxy", "--help")
    assert "memcpy" in call(programs / "pdx", "doctor", **reach)
    command = [str(programs / "pdx"), "node", "--arena", "16MiB", "--proxy", ""]
    with subprocess.Popen(command, env={**os.environ, **reach}, cwd="/") as node:
        try:
            assert call(programs / "python", "-c", STORE, **reach).split() == ["b'pdx'", PROJECT["version"], "False"]
            assert "has ended" in call(programs / "pdx", "node", "--stop", **reach)
        finally:
            node.terminate()
    call(programs / "python", "-c", "import pdx.proxy.workers, pdx.node.daemon, pdx.testing.channel_stage")


def test_base_without_torch(install, place):
    programs = install()
    call(programs / "pip", "check")
    use(programs, place)
    assert subprocess.run([programs / "python", "-c", "import torch"], capture_output=True, check=False).returncode == 1


def test_base_with_the_least_versions_that_it_says_it_needs(install, place, tmp_path):
    least = [re.sub(r"^([\w.-]+)>=([\w.]+)$", r"\1==\2", each) for each in PROJECT["dependencies"]]
    assert all("==" in each for each in least)
    (tmp_path / "least.txt").write_text("\n".join(least))
    use(install("", "--constraint", tmp_path / "least.txt"), place)


@pytest.mark.parametrize("extra", SMALL)
def test_an_extra_brings_what_it_is_for(install, extra):
    programs = install(extra)
    call(programs / "pip", "check")
    call(programs / "python", "-c", f"import {USES[extra]}")


@pytest.mark.parametrize("extra", LARGE)
def test_a_large_extra_is_resolved(tmp_path, wheel, extra):
    venv.create(tmp_path / "venv", with_pip=True)
    wanted = f"pdx-transport[{extra}] @ {wheel.as_uri()}"
    said = call(tmp_path / "venv" / "bin" / "pip", "install", "--dry-run", wanted)
    names = {re.split(r"[\[>=<;]", each)[0] for each in PROJECT["optional-dependencies"][extra]}
    [found] = (line for line in said.splitlines() if line.startswith("Would install"))
    assert [name for name in names if f" {name.replace('_', '-')}-" not in found.replace("_", "-")] == []
