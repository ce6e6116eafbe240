"""What a terminal shows while a node counts the files of its disks."""

import io

import msgspec
from node_harness import MIB
from rich.console import Console

from pdx.cli.node import follow
from pdx.wire.status import COUNTING, TierStatus


def test_each_disk_has_a_line_until_its_files_are_counted(start_node):
    status = start_node(arena_bytes=MIB).status()

    def with_tiers(*tiers):
        return msgspec.structs.replace(status, tiers=[TierStatus(*each) for each in tiers])

    told = [
        with_tiers(("disk a", "/a", 10, 0, 0, COUNTING), ("disk b", "/b", 3, 0, 0, COUNTING), ("remote", "r")),
        with_tiers(("disk a", "/a", 1200, 0, 0, COUNTING), ("disk b", "/b", 5, 0, 0, "ok"), ("remote", "r")),
        with_tiers(("disk a", "/a", 1300, 0, 0, "ok"), ("disk b", "/b", 5, 0, 0, "ok"), ("remote", "r")),
    ]
    reads = iter(told)
    screen = io.StringIO()
    follow(lambda: next(reads), Console(file=screen, force_terminal=True, width=100), pause_s=0.15)
    assert "counting the files of /a" in screen.getvalue()
    assert "1200/?" in screen.getvalue()
    assert next(reads, None) is None
