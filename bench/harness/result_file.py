"""The file that a user's bench leaves, in the format of `pdx.bench.harness.report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdx.bench.harness.report import Figure, as_text


class ResultFile:
    """`folder`/`bench`.json: written anew whenever there is more, whole or not at all."""

    def __init__(self, folder: Path, bench: str, title: str) -> None:
        self.path = folder / f"{bench}.json"
        self._bench = bench
        self._title = title

    def write(self, figures: Sequence[Figure], details: dict[str, Any]) -> str:
        """The text that is now in it.

        :raises OSError: it cannot be written.
        """
        text = as_text(self._bench, self._title, figures, details, {})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(self.path)
        return text
