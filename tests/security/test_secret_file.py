"""Who may read a file with a secret, besides who uses it."""

from __future__ import annotations

import os
import stat

import pytest

from pdx.errors import ConfigError
from pdx.security.secret_file import check_private

ME, OTHER, ROOT = 1000, 1001, 0
MINE, THEIRS = 2000, 2001


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Of user ME, with the group MINE beside its own, as that of a pod with an fsGroup."""
    for name, value in {"getuid": ME, "getgid": ME, "getegid": ME, "getgroups": [MINE]}.items():
        monkeypatch.setattr(os, name, lambda value=value: value)


def check(mode: int, user: int, group: int, kind: int = stat.S_IFREG) -> None:
    check_private(os.stat_result((kind | mode, 1, 1, 1, user, group, 0, 0, 0, 0)), "key file", "/k")


@pytest.mark.parametrize(
    ("mode", "user", "group"),
    [(0o600, ME, ME), (0o400, ME, THEIRS), (0o600, ROOT, ROOT), (0o440, ROOT, MINE), (0o640, ROOT, MINE)]
    + [(0o440, ROOT, ME)],
)
def test_private(mode, user, group):
    check(mode, user, group)


@pytest.mark.parametrize(
    ("mode", "user", "group"),
    [(0o640, ME, MINE), (0o440, ROOT, THEIRS), (0o440, OTHER, MINE), (0o660, ROOT, MINE), (0o444, ROOT, MINE)]
    + [(0o600, OTHER, OTHER), (0o450, ROOT, MINE), (0o644, ME, ME)],
)
def test_not_private(mode, user, group):
    with pytest.raises(ConfigError, match=rf"key file /k has mode 0{mode:o} .* group {group}; nobody but user {ME}"):
        check(mode, user, group)


def test_what_is_no_file():
    with pytest.raises(ConfigError, match="key file /k"):
        check(0o600, ME, ME, stat.S_IFIFO)
