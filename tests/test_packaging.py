"""The wheel, the source distribution and the extras: complete, and enough for what each is for.

What is built and installed takes long. Extras whose packages have gigabytes are resolved and not installed.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pdx", "transports", "kernels", "proxy", "bench")
PAGES = ("README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
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


def takes_long(test):
    """It downloads."""
    return pytest.mark.long(pytest.mark.timeout(900)(test))


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


def modules() -> set[str]:
    """Names of all there are; those of folders at the top are parts of `pdx`, by links."""
    files = [file.relative_to(ROOT) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    linked = [file for file in files if file.parts[0] == "pdx" and file.parts[1] in FOLDERS]
    return {str(file) if file.parts[0] == "pdx" else f"pdx/{file}" for file in {*files} - {*linked}}


def test_every_folder_with_modules_is_a_package_of_the_wheel():
    """What `packages` in pyproject.toml leaves out, a wheel lacks."""
    folders = {str(Path(name).parent).replace("/", ".") for name in modules()}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_each_extra_is_installed_somewhere():
    assert sorted(USES) == SMALL, "USES says what each is for"


def test_the_version_is_that_of_pyproject_everywhere():
    """`pdx.__version__` and `pdx --version` tell that of what is installed, `make docs` that of pyproject.toml."""
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    chart = (ROOT / "deploy/helm/pdx/Chart.yaml").read_text()
    images = (ROOT / "deploy/helm/pdx/values.yaml").read_text() + (ROOT / "docs/deploy.md").read_text()
    assert top is not None
    named = {top[1], *re.findall(r"(?i)^(?:app)?version: (\S+)", chart, re.MULTILINE)}
    named |= {*re.findall(r"pdx-(?:node|engine):(\d\S*)", images)}
    assert named == {PROJECT["version"]}


# ---- built and installed --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution, and the wheel that is made from it, of what git has here."""
    folder = tmp_path_factory.mktemp("built")
    call("git", "-c", "safe.directory=*", "clone", "-q", ROOT, folder / "source")
    call(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source")
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    [found] = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def contents(built, wheel) -> dict[str, dict[str, bytes]]:
    """Of both, by name: what lies in the wheel, and in the folder of the source distribution."""
    with zipfile.ZipFile(wheel) as archive:
        found = {"wheel": {name: archive.read(name) for name in archive.namelist()}, "source": {}}
    [source] = built.glob("*.tar.gz")
    with tarfile.open(source) as packed:
        for each in packed:
            assert each.isreg() or each.isdir(), f"{each.name} is a link"
            if (file := packed.extractfile(each)) is not None:
                found["source"][each.name.partition("/")[2]] = file.read()
    return found


@takes_long
def test_both_hold_every_module_and_what_belongs_to_them_and_nothing_else(contents):
    """So neither holds a test, a fake of CUDA, or results of benches."""
    wheel = {name for name in contents["wheel"] if ".dist-info/" not in name}
    source = {name for name in contents["source"] if ".egg-info/" not in name}
    assert wheel == modules() | {"pdx/py.typed", "pdx/proxy/status.html"}
    assert source == wheel | {"pyproject.toml", "MANIFEST.in", "PKG-INFO", "setup.cfg", *PAGES}


@takes_long
@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_nothing_of_the_machine_that_built_it_is_in_it(contents, built, kind):
    places = {str(ROOT), sys.prefix, str(built.parent), *([str(Path.home())] * (Path.home() != Path("/")))}
    told = {name: [place for place in places if f"{place}/".encode() in data] for name, data in contents[kind].items()}
    assert {name: found for name, found in told.items() if found} == {}


@takes_long
@pytest.mark.parametrize(("kind", "licence"), [("wheel", "licenses/LICENSE"), ("source", "LICENSE")])
def test_the_licence_and_what_it_says_of_itself_are_in_it(contents, kind, licence):
    [text] = {data for name, data in contents[kind].items() if name.endswith(licence)}
    assert text == (ROOT / "LICENSE").read_bytes()
    [said] = {data for name, data in contents[kind].items() if name.endswith(("METADATA", "/PKG-INFO"))}
    told = email.message_from_bytes(said)
    assert (told["Version"], told["License-Expression"]) == (PROJECT["version"], "Apache-2.0")
    assert (told["Requires-Python"], told["Description-Content-Type"]) == (">=3.11", "text/markdown")
    assert set(told.get_all("Provides-Extra")) == {*PROJECT["optional-dependencies"]}


@takes_long
def test_an_index_would_take_both(built):
    call(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))


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


@takes_long
def test_base_without_torch(install, place):
    programs = install()
    call(programs / "pip", "check")
    use(programs, place)
    assert subprocess.run([programs / "python", "-c", "import torch"], capture_output=True, check=False).returncode == 1


@takes_long
def test_base_with_the_least_versions_that_it_says_it_needs(install, place, tmp_path):
    least = [re.sub(r"^([\w.-]+)>=([\w.]+)$", r"\1==\2", each) for each in PROJECT["dependencies"]]
    assert all("==" in each for each in least)
    (tmp_path / "least.txt").write_text("\n".join(least))
    use(install("", "--constraint", tmp_path / "least.txt"), place)


@takes_long
@pytest.mark.parametrize("extra", SMALL)
def test_an_extra_brings_what_it_is_for(install, extra):
    programs = install(extra)
    call(programs / "pip", "check")
    call(programs / "python", "-c", f"import {USES[extra]}")


@takes_long
@pytest.mark.parametrize("extra", LARGE)
def test_a_large_extra_is_resolved(tmp_path, wheel, extra):
    venv.create(tmp_path / "venv", with_pip=True)
    wanted = f"pdx-transport[{extra}] @ {wheel.as_uri()}"
    said = call(tmp_path / "venv" / "bin" / "pip", "install", "--dry-run", wanted)
    names = {re.split(r"[\[>=<;]", each)[0] for each in PROJECT["optional-dependencies"][extra]}
    [found] = (line for line in said.splitlines() if line.startswith("Would install"))
    assert [name for name in names if f" {name.replace('_', '-')}-" not in found.replace("_", "-")] == []
