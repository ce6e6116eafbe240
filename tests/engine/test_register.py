"""Which layer of which cache group each tensor of an engine's KV cache is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from toy_engine import layout

from pdx.config import ConnectorConfig
from pdx.engine import worker
from pdx.engine.worker import WorkerHalf
from pdx.errors import LayoutError

BLOCKS = 4


def test_groups_lie_over_each_other_and_layers_that_share_kv_are_those_of_others(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    monkeypatch.setattr(worker, "START_UP_S", 0.0)
    made: list[Any] = []
    monkeypatch.setattr("pdx.engine.cpu_copier.CpuCopier.__init__", lambda self, layers, *_: made.append(layers))
    monkeypatch.setattr("pdx.engine.cpu_copier.CpuCopier.close", lambda self: None)
    monkeypatch.setattr(worker.NodeLink, "serve", lambda *_: None)
    full = msgspec.structs.replace(layout(), num_layers=2, layers=(0, 2))
    window = msgspec.structs.replace(full, kind="window", window=64, layers=(1, 3))
    half = WorkerHalf(ConnectorConfig(node=f"ipc://{place}/none", start_node=False), [full, window], "e", 0)
    first, second = (torch.zeros(BLOCKS, full.page_bytes, dtype=torch.uint8) for _ in range(2))
    caches = {"0": first, "1": first, "2": second, "3": second, "4": second}
    try:
        half.register(caches, BLOCKS, {"0": 0, "1": 1, "2": 0, "3": 1})  # the last layer shares the KV of another
        addresses = [[rows.data_ptr() for rows in of_shard] for of_group in made[0] for of_shard in of_group]
        assert addresses == [[first.data_ptr(), second.data_ptr()]] * 2
        half.save_layer("4")
        with pytest.raises(LayoutError, match="1 layers with a KV cache, expected 2"):
            half.register(caches, BLOCKS, {"0": 0, "1": 1, "2": 0})
    finally:
        half.close()


def test_a_node_that_does_not_answer_is_named_with_its_log(
    monkeypatch: pytest.MonkeyPatch, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The node that the engine has started says there, and nowhere else, why it ended."""
    monkeypatch.setattr(worker, "START_UP_S", 0.0)
    shape = msgspec.structs.replace(layout(), num_layers=1)
    half = WorkerHalf(ConnectorConfig(node=f"ipc://{place}/none", start_node=False), shape, "e", 0)
    try:
        half.register({"0": torch.zeros(BLOCKS, shape.page_bytes, dtype=torch.uint8)}, BLOCKS)
    finally:
        half.close()
    said = [record.getMessage() for record in caplog.records if "not attached" in record.getMessage()]
    assert [(f"ipc://{place}/none" in each, f"{place}/none.log" in each.split()) for each in said] == [(True, True)]
