"""A base class for context managers that close themselves."""

from __future__ import annotations

from typing import Self


class Closing:
    """Closes itself at the end of its `with` block."""

    def close(self) -> None:
        """Release all resources. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
