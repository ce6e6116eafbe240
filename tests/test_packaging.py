"""The wheel: complete, and enough for a working `pdx` command without vLLM and torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pdx", "transports", "kernels", "proxy", "bench")


def call(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because setuptools leaves a build folder where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    offline = ["--no-build-isolation"] if _has_setuptools() else []
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *offline, "--wheel-dir", folder, source)
    [built] = folder.glob("*.whl")
    return built


def _has_setuptools() -> bool:
    code = "import setuptools, sys; sys.exit(int(setuptools.__version__.split('.')[0]) < 77)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for folder in FOLDERS:
        prefix = "" if folder == "pdx" else "pdx/"
        for file in (ROOT / folder).rglob("*.py"):
            relative = file.relative_to(ROOT)
            if folder == "pdx" and relative.parts[1] in FOLDERS:
                continue  # through a link; it comes again under its own name
            expected.add(f"{prefix}{relative.as_posix()}")
    assert names == expected | {"pdx/py.typed"}


def test_the_wheel_carries_its_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.namelist())


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
