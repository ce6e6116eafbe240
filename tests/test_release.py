"""`.ci/release`: what it refuses, and that nothing leaves the machine unless it is asked to."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = """
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"
[project]
name = "thing"
version = "0.1.0"
description = "one line"
readme = {text = "A thing.", content-type = "text/plain"}
[tool.setuptools]
py-modules = ["thing"]
"""
CHANGES = """# Changelog

## [0.1.0] – 2026-12-01

### Added

- **A thing.** #1 of many,
  on two lines.

## [0.0.9] – 2026-11-01

- Old.
"""
FILES = {"pyproject.toml": PYPROJECT, "CHANGELOG.md": CHANGES, "thing.py": "", ".gitignore": "dist\n"}


@pytest.fixture
def project(tmp_path):
    """A repository with a module and our script, and a `python` that writes down what it says to twine."""
    folder = tmp_path / "project"
    (folder / ".ci").mkdir(parents=True)
    (folder / ".ci" / "release").write_text((ROOT / ".ci" / "release").read_text())
    (folder / ".ci" / "release").chmod(0o755)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    python = tmp_path / "python"
    real = shlex.quote(sys.executable)
    python.write_text(
        f"""#!/bin/sh
        case "$1 $2" in
            "-m build") shift 2; exec {real} -m build --no-isolation "$@" ;;
            "-m twine") echo "$*" >>{tmp_path}/twine ;;
            *) exec {real} "$@" ;;
        esac"""
    )
    python.chmod(0o755)
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "x")


def release(folder: Path, *words: str, make: str = "true") -> subprocess.CompletedProcess[str]:
    who = {f"GIT_{role}_{what}": "a" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "PYTHON": str(folder.parent / "python"), "MAKE": make}
    command = [str(folder / ".ci" / "release"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def twine(folder: Path) -> list[str]:
    said = folder.parent / "twine"
    return [line.split()[2] for line in said.read_text().splitlines()] if said.exists() else []


@pytest.mark.long
def test_it_builds_and_checks_and_that_is_all(project):
    (project / "CHANGELOG.md").write_text(CHANGES.replace("2026-12-01", "unreleased"))
    commit(project)
    done = release(project)
    assert done.returncode == 0, done.stderr
    assert "CHANGELOG.md says 'unreleased'" in done.stdout
    assert sorted(path.name for path in (project / "dist").iterdir()) == [
        "tag-message", "thing-0.1.0-py3-none-any.whl", "thing-0.1.0.tar.gz",
    ]  # fmt: skip
    assert (
        project / "dist" / "tag-message"
    ).read_text() == "PDX 0.1.0\n\nAdded\n\n- **A thing.** #1 of many,\n  on two lines.\n\n"
    assert (twine(project), git(project, "tag")) == (["check"], "")


@pytest.mark.long
def test_it_tags_and_uploads_where_that_is_said(project):
    done = release(project, "--upload", "testpypi")
    assert done.returncode == 0, done.stderr
    assert twine(project) == ["check", "upload"]
    assert "--repository testpypi" in (project.parent / "twine").read_text()
    assert git(project, "for-each-ref", "--format=%(objecttype) %(refname:short) %(subject)", "refs/tags") == (
        "tag v0.1.0 PDX 0.1.0\n"
    )


def spoil(project: Path, what: str) -> None:
    if what == "uncommitted":
        (project / "thing.py").write_text("x = 1\n")
    elif what == "tag":
        git(project, "tag", "v0.1.0")
    else:
        (project / "CHANGELOG.md").write_text(CHANGES.replace(*what.split(">")))
        commit(project)


@pytest.mark.parametrize(
    ("what", "words", "make", "says"),
    [
        ("uncommitted", [], "true", "there is something uncommitted"),
        ("tag", [], "true", "there is a tag v0.1.0 already"),
        ("0.1.0>0.2.0", [], "true", "CHANGELOG.md begins with '## [0.2.0] – 2026-12-01', pyproject.toml says 0.1.0"),
        ("2026-12-01>unreleased", ["--upload", "pypi"], "true", "CHANGELOG.md has no date for 0.1.0: 'unreleased'"),
        ("many>all", [], "false", ""),
        ("many>all", ["--upload"], "true", "usage"),
    ],
)
def test_what_is_no_release(project, what, words, make, says):
    spoil(project, what)
    done = release(project, *words, make=make)
    assert done.returncode != 0
    assert says in done.stderr
    assert twine(project) == []
    assert not (project / "dist").exists()
