"""The site is built from docs/ without a warning, and a broken link, anchor or picture is one."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]  # test_docs.py looks at links and anchors, too
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` does, from `root` into `out`."""
    rule = (ROOT / "Makefile").read_text().split("\ndocs:", 1)[1].splitlines()[1]
    program, *options = shlex.split(rule)
    assert program.endswith("/sphinx-build")
    places = {"build/doctrees": str(out / "doctrees"), "build/site": str(out / "site")}
    command = [sys.executable, "-m", "sphinx", *(places.get(option, option) for option in options)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built."""
    out = tmp_path_factory.mktemp("site")
    result = build(ROOT, out)
    assert result.returncode == 0, result.stderr
    return out / "site"


def test_every_page_is_there(site):
    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert {path.relative_to(ROOT) for path in PAGES} <= built


def test_the_site_needs_no_other_host(site):
    loads = re.compile(r"<(?!a\b)\w+\b[^>]*\b(?:src|href)=[\"'](?:https?:)?//[^>]*>")
    assert [found for path in site.rglob("*.html") for found in loads.findall(path.read_text())] == []


def test_the_first_page_is_found_without_knowing_its_name(site):
    assert 'href="README.html"' in (site / "index.html").read_text()
    assert "Is it for me?" in (site / "README.html").read_text()


BROKEN = {
    "no_page": ("[nowhere](elsewhere.md)", "elsewhere.md"),
    "no_anchor_here": ("[nowhere](#there)", "'there'"),
    "no_anchor_there": ("[nowhere](good.md#there)", "local id not found"),
    "no_picture": ("![nothing](nothing.png)", "nothing.png"),
    "no_file": ("[nothing](nothing.py)", "nothing.py"),
    "unlisted": ("Nobody leads here.", "any toctree"),
}
GOOD = "# Good\n\n## Here\n\n[this](#here), [that](index.md#pages), [code](../pyproject.toml)\n"


def test_what_is_broken_is_an_error(tmp_path):
    broken = {name: f"# {name}\n\n{text}\n" for name, (text, _) in BROKEN.items()}
    result = build(small_site(tmp_path, {"good": GOOD, **broken}), tmp_path)
    assert result.returncode != 0
    said = dict(re.findall(r"docs/(\w+)\.md.*?WARNING: (.*)", result.stderr))
    assert said.keys() == BROKEN.keys(), "each of them, and nothing else"
    assert [name for name, (_, complaint) in BROKEN.items() if complaint not in said[name]] == []


def small_site(folder: Path, pages: dict[str, str]) -> Path:
    """A repository with these pages and our settings; all pages but `unlisted` are listed."""
    docs = folder / "small" / "docs"
    docs.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    shutil.copytree(ROOT / "docs" / "site", docs / "site")
    shutil.copy(ROOT / "pyproject.toml", docs.parent)
    entries = "".join(f"- [{name}]({name}.md)\n" for name in pages if name != "unlisted")
    (docs.parent / "README.md").write_text("# Site\n")
    (docs / "index.md").write_text(f"# Site\n\n## Pages\n\n{entries}")
    for name, text in pages.items():
        (docs / f"{name}.md").write_text(text)
    return docs.parent
