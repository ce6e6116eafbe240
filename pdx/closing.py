"""What is closed at the end of its `with` block."""

from __future__ import annotations

from typing import Self


class Closing:
    """A base for whatever has a `close`."""

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
