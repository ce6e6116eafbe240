"""How Sphinx makes the site: `make docs`. The source folder is the repository, so that every relative link means the
same on the site and on a git forge. The first page is README.md. The order of pages is that of the links in
docs/index.md, and of the table of decisions.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
_PAGES = {"README.md", "CHANGELOG.md", "SECURITY.md", "docs"}  # nothing else of the repository is a page
_ENTRY = re.compile(r"^(?:- |\| )\[[^\]]+\]\(([^)#]+)\.md\)", re.MULTILINE)
_DECISIONS = "docs/adr/0001-record-decisions"

project = "PDX"
author = "the PDX developers"
copyright = author  # noqa: A001 - Sphinx's name for it
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["README.md", "CHANGELOG.md", "SECURITY.md", "docs/**"]
exclude_patterns = sorted(entry.name for entry in ROOT.iterdir() if entry.name not in _PAGES)
myst_heading_anchors = 6  # the anchors that git forges make, so links to them can be checked
highlight_language = "none"
nitpicky = True

html_theme = "furo"
html_title = f"PDX {release}"
html_extra_path = ["site"]  # its index.html leads to the first page
html_copy_source = False
html_show_sphinx = False


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a table of contents behind the first page, by the sections of the index, and behind the list of decisions; a
    page in none of them is a warning."""
    if docname == root_doc:
        sections = (ROOT / "docs" / "index.md").read_text().split("\n## ")
        source[0] += _contents("All", ["index"]) + "".join(map(_listed, sections))
    elif docname == _DECISIONS:
        source[0] += _contents("Decisions", _ENTRY.findall(source[0]), folder="")


def _listed(section: str) -> str:
    return _contents(section.partition("\n")[0], _ENTRY.findall(section))


def _contents(caption: str, names: list[str], *, folder: str = "docs/") -> str:
    listed = "\n".join(folder + name for name in names)
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n" if names else ""


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
