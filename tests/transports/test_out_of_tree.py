"""A channel that is none of ours, installed beside PDX: found by its name. The suite is in test_inproc.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from pdx.errors import ChannelUnavailable, ConfigError
from pdx.transports import registry
from pdx.transports.channel import Region

_SOURCE = Path(__file__).with_name("out_of_tree") / "farshore.py"


def install(folder: Path, name: str, entries: str) -> None:
    """What `pip install` leaves of a distribution with these entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pdx.channels]\n{entries}\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed distributions."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "farshore.py").write_text(_SOURCE.read_text())
    (folder / "farbroken.py").write_text("import a_library_that_is_not_installed\n")
    install(folder, "farshore", "farshore = farshore:FarshoreRegion\ntcp = farshore:FarshoreRegion")
    install(folder, "farbroken", "farbroken = farbroken:Region\nfarmissing = farshore:Missing")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    for module in ("farshore", "farbroken"):
        sys.modules.pop(module, None)


def test_it_is_listed_behind_ours(site):
    names = registry.schemes()
    assert {"farshore", "farbroken", "farmissing"} <= set(names)
    assert names.index("farshore") > max(map(names.index, ("shm", "tcp", "nixl", "ucx")))
    assert names.count("tcp") == 1


def test_it_is_not_imported_before_it_is_asked_for(site):
    sys.modules.pop("farshore", None)
    registry.schemes()
    registry.find("tcp")
    assert "farshore" not in sys.modules
    assert issubclass(registry.find("farshore"), Region)
    assert "farshore" in sys.modules
    assert registry.find("tcp").__module__ == "pdx.transports.tcp", "ours win"


@pytest.mark.parametrize("scheme", ["farbroken", "farmissing"])
def test_one_that_cannot_be_imported(site, scheme):
    with pytest.raises(ChannelUnavailable, match=scheme):
        registry.find(scheme)


@pytest.mark.parametrize("scheme", ["unheard-of", "pdx.transports.tcp:TcpRegion"])
def test_a_name_that_nobody_provides(site, scheme):
    with pytest.raises(ConfigError, match="no channel is named"):
        registry.find(scheme)
