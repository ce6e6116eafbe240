"""Ports for servers that start later: nobody else is given them meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdx.cli import ports


def test_they_are_none_that_the_kernel_gives_away() -> None:
    found = ports.free_ports(5)
    assert len(set(found)) == 5
    assert all(1024 <= port < int(ports.EPHEMERAL.read_text().split()[0]) for port in found)


def test_any_port_will_do_where_all_are_given_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    assert len(set(ports.free_ports(5))) == 5
