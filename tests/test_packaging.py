"""The wheel and the source distribution: complete, and enough for a working `pdx` without vLLM and torch."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from test_install import SMALL, USES, call

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pdx", "transports", "kernels", "proxy", "bench")
PAGES = ("README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution, and the wheel that is made from it. Built from a copy, because setuptools
    leaves a build folder where it builds."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "MANIFEST.in", *PAGES):
        shutil.copy(ROOT / name, source / name)
    offline = ["--no-isolation"] if _has_setuptools() else []
    call(sys.executable, "-m", "build", *offline, "--outdir", folder / "dist", source)
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


def _has_setuptools() -> bool:
    code = "import setuptools, sys; sys.exit(int(setuptools.__version__.split('.')[0]) < 77)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def modules() -> set[str]:
    """Names of all there are; those of folders at the top are parts of `pdx`, by links."""
    files = [file.relative_to(ROOT) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    linked = [file for file in files if file.parts[0] == "pdx" and file.parts[1] in FOLDERS]
    return {str(file) if file.parts[0] == "pdx" else f"pdx/{file}" for file in {*files} - {*linked}}


def test_both_hold_every_module_and_what_belongs_to_them_and_nothing_else(contents):
    """So neither holds a test, a fake of CUDA, or results of benches."""
    wheel = {name for name in contents["wheel"] if ".dist-info/" not in name}
    source = {name for name in contents["source"] if ".egg-info/" not in name}
    assert wheel == modules() | {"pdx/py.typed", "pdx/proxy/status.html"}
    assert source == wheel | {"pyproject.toml", "MANIFEST.in", "PKG-INFO", "setup.cfg", *PAGES}


@pytest.mark.parametrize("kind", ["wheel", "source"])
def test_nothing_of_the_machine_that_built_it_is_in_it(contents, built, kind):
    places = {str(ROOT), sys.prefix, str(built.parent), *([str(Path.home())] * (Path.home() != Path("/")))}
    told = {name: [place for place in places if f"{place}/".encode() in data] for name, data in contents[kind].items()}
    assert {name: found for name, found in told.items() if found} == {}


@pytest.mark.parametrize(("kind", "licence"), [("wheel", "licenses/LICENSE"), ("source", "LICENSE")])
def test_the_licence_and_what_it_says_of_itself_are_in_it(contents, kind, licence):
    [text] = {data for name, data in contents[kind].items() if name.endswith(licence)}
    assert text == (ROOT / "LICENSE").read_bytes()
    [said] = {data for name, data in contents[kind].items() if name.endswith(("METADATA", "/PKG-INFO"))}
    told = email.message_from_bytes(said)
    assert (told["Version"], told["License-Expression"]) == (PROJECT["version"], "Apache-2.0")
    assert (told["Requires-Python"], told["Description-Content-Type"]) == (">=3.11", "text/markdown")
    assert set(told.get_all("Provides-Extra")) == {*PROJECT["optional-dependencies"]}


def test_each_extra_is_installed_somewhere():
    assert sorted(USES) == SMALL, "tests/test_install.py says what each is for"


def test_an_index_would_take_both(built):
    call(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))


def test_the_version_is_that_of_pyproject_everywhere():
    """`pdx.__version__` and `pdx --version` tell that of what is installed, `make docs` that of pyproject.toml."""
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    chart = (ROOT / "deploy/helm/pdx/Chart.yaml").read_text()
    images = (ROOT / "deploy/helm/pdx/values.yaml").read_text() + (ROOT / "docs/deploy.md").read_text()
    assert top is not None
    named = {top[1], *re.findall(r"(?i)^(?:app)?version: (\S+)", chart, re.MULTILINE)}
    named |= {*re.findall(r"pdx-(?:node|engine):(\d\S*)", images)}
    assert named == {PROJECT["version"]}


def test_the_command_works_without_vllm_and_torch(wheel, tmp_path):
    """Installed where only the declared dependencies are to be had, not what else is in this environment."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    site = next(place.glob("lib/python*/site-packages"))
    call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    for path in _installed(_needed()):
        (site / path.name).symlink_to(path)
    python = place / "bin" / "python"
    code = "from pdx.cli.main import main; main()"
    for arguments in (["--help"], ["--version"], *([name, "--help"] for name in ("node", "up", "serve", "proxy"))):
        call(python, "-c", code, *arguments)
    call(python, "-c", "import pdx.transports, pdx.kernels, pdx.proxy.app, pdx.node.daemon, pdx.store.store")
    refused = subprocess.run(
        [python, "-c", code, "serve", "both", "model"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "pip install vllm" in refused.stderr
    scripts = call(python, "-c", "from importlib.metadata import entry_points as e; print(*e(group='console_scripts'))")
    assert "pdx.cli.entry:run" in scripts


def _needed() -> set[str]:
    """Names of the distributions that ours needs, and those need, without extras."""
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = ["pdx-transport"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another platform or Python
        found.add(name)
        parsed = map(Requirement, requirements)
        waiting += [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found - {"pdx-transport"}


def _installed(names: set[str]) -> set[Path]:
    """Top-level files and folders of these distributions."""
    from importlib.metadata import distribution

    tops = set()
    for name in names:
        one = distribution(name)
        root = Path(str(one.locate_file("")))
        tops |= {root / file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}
    return tops
