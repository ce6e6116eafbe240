"""The bench of a disk, with next to no data."""

import json

import pytest

from pdx.bench.store import disk


@pytest.mark.long
def test_the_tier_is_compared_with_plain_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(disk, "TOTAL_BYTES", 2 << 20)
    monkeypatch.setattr(disk, "CHUNK_MIB", (1,))
    monkeypatch.setattr(disk, "ROUNDS", 1)
    disk.main(str(tmp_path))
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["operation"], row["chunk_mib"]) for row in rows] == [("write", 1), ("read", 1), ("replace", 1)]
    assert all(row["ratio"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
