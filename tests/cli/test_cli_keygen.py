"""`pdx keygen`: keys where they should be, and lines that go into a roster as they are."""

from __future__ import annotations

import stat
import tomllib

import pytest
from click.testing import CliRunner

from pdx.cli.main import main
from pdx.security.curve_keys import KeyPair
from pdx.security.roster import RosterFile


def keygen(*arguments):
    return CliRunner().invoke(main, ["keygen", *map(str, arguments)])


@pytest.mark.parametrize(("name", "table"), [("a.b-c_d", "nodes"), ("proxy", None)])
def test_the_lines_go_into_a_roster(tmp_path, name, table):
    result = keygen(name, "--folder", tmp_path / "keys")
    assert result.exit_code == 0, result.output
    keys = KeyPair.load(tmp_path / "keys" / f"{name}.key_secret")
    parsed = tomllib.loads(result.stdout)
    entry = parsed[table][name] if table else parsed["proxy"]
    assert entry == {"address": "tcp://IP:PORT", "key": keys.public}
    assert keys.secret not in result.output
    file = tmp_path / "roster.toml"
    file.write_text(result.stdout.replace("IP:PORT", "10.0.0.1:7700"))
    file.chmod(0o644)
    roster = RosterFile.load(file, has_keys=True)
    assert (list(roster.nodes) == [name]) == (table is not None)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["ops", "proxy"])
def test_a_readers_lines_name_no_address(tmp_path, name):
    result = keygen(name, "--reader", "--folder", tmp_path / "keys")
    file = tmp_path / "roster.toml"
    file.write_text(result.stdout)
    file.chmod(0o644)
    roster = RosterFile.load(file, has_keys=True)
    keys = KeyPair.load(tmp_path / "keys" / f"{name}.key_secret")
    assert {name: each.key for name, each in roster.readers.items()} == {name: keys.public}
    assert (roster.nodes, roster.proxy) == ({}, None)


def test_keys_are_replaced_with_force_only(tmp_path):
    folder = tmp_path / "keys"
    keygen("alpha", "--folder", folder)
    first = KeyPair.load(folder / "alpha.key_secret")
    again = keygen("alpha", "--folder", folder)
    assert again.exit_code == 1
    assert "exists already" in again.output
    assert KeyPair.load(folder / "alpha.key_secret") == first
    assert keygen("alpha", "--folder", folder, "--force").exit_code == 0
    assert KeyPair.load(folder / "alpha.key_secret") != first


@pytest.mark.parametrize("name", ["", "../alpha", 'a"]', "a\n", "x" * 65])
def test_a_name_that_is_none(tmp_path, name):
    result = keygen("--folder", tmp_path / "keys", "--", name)
    assert result.exit_code == 1
    assert "is not a name" in result.output
    assert not (tmp_path / "keys").exists()
