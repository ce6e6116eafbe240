"""The suite that all tiers pass, over `shelf`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shelf import make

from pdx.store.remote.backend import RemoteSettings
from pdx.store.tier import Tier, TierHost
from pdx.testing.tier_conformance import TierConformance
from pdx.testing.tier_stage import TierStore


class Folder(TierStore):
    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, host: TierHost, codec: str = "none") -> Tier:
        settings = RemoteSettings(url=f"shelf://{self._root}", timeout_s=1.0, lookup_s=1.0, codec=codec)
        return make(host, settings)

    def alter(self, key: bytes, shard: int, change: Callable[[bytes], bytes | None]) -> None:
        path = self._root / f"v3/{key.hex()}-{shard}"
        data = change(path.read_bytes())
        path.unlink()
        if data is not None:
            path.write_bytes(data)


class TestShelf(TierConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> TierStore:
        return Folder(tmp_path)
