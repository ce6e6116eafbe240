"""The pages of docs/tutorials, and the code in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page.stem for page in (ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """The code of a page that is fenced with this language."""
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text()
    return [code for name, code in BLOCK.findall(text) if name == language]


def commands(page: str, program: str) -> list[list[str]]:
    """The command lines of a page that start with this, as words, without the variables before them."""
    lines = [line for code in blocks(page, "") for line in code.splitlines()]
    words = [shlex.split(re.sub(r"^(\w+=\S+ )+", "", line)) for line in lines]
    return [line for line in words if " ".join(line).startswith(program)]
