"""Both halves of an engine of one shard on raw connections: it saves and finds chunks of any bytes under any keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node_harness import Wire, attached

from pdx.memory.arena import Arena
from pdx.wire.messages import Admit, Fill, Release

CHUNK_BYTES = 64 << 10
LAYERS = 4


def key(number: int) -> bytes:
    """The key of this number."""
    return number.to_bytes(4, "big") * 4


class Engine:
    """Both halves of an engine of one shard, attached to a node."""

    def __init__(self, address: str, **hello: Any) -> None:
        self.scheduler = Wire(address)
        welcome = self.scheduler.hello(kind="scheduler", engine="e" * 16, **hello)
        self.worker = attached(address, kind="worker", engine="e" * 16)
        self.arena = Arena.open(Path(welcome.arena_path), welcome.arena_bytes)

    def save(self, contents: Mapping[bytes, bytes], **ask: Any) -> None:
        """Whole chunks by their keys."""
        keys = list(contents)
        nbytes = len(next(iter(contents.values())))
        granted = self.scheduler.ask(Admit(keys, nbytes, LAYERS, partial=True, **ask))
        for index, slot in zip(granted.granted, granted.granted_slots, strict=True):
            self.arena.view(slot)[:] = contents[keys[index]]
        assert self.worker.ask(Fill(granted.granted_slots, 0, LAYERS, seal=True)).count == len(granted.granted)

    def look(self, keys: Sequence[bytes], wait_s: float = 5.0) -> list[bytes]:
        """The bytes of the leading ones that are there, or come in time."""
        found = self.scheduler.ask(Admit(list(keys), lease_s=20.0, wait_s=wait_s))
        contents = [bytes(self.arena.view(slot)) for slot in found.slots]
        if found.lease:
            self.scheduler.ask(Release(found.lease))
        return contents

    def close(self) -> None:
        """Detach both halves."""
        self.worker.close()
        self.scheduler.close()
        self.arena.close()
