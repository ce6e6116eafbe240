"""One copy of chunks from one tier to another: the record of it. The scheduler of copies goes here."""

from __future__ import annotations


class Copy:
    """Chunks on their way from one tier to another. Owned by the control loop."""

    number: int
