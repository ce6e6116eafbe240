"""What a terminal shows while a node counts the files of its disks, which it does beside serving."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import TaskID, TimeElapsedColumn

from pdx.cli.tables import progress
from pdx.client.api import connect
from pdx.errors import PdxError
from pdx.wire.status import COUNTING, NodeStatus

ATTACH_S = 60.0
PAUSE_S = 0.25


def follow_in_background(address: str) -> None:
    """Show it for the node at `address`, which this process runs or is about to; from a thread, until it is over."""
    console = Console(stderr=True)
    if console.is_terminal:
        threading.Thread(target=_follow, args=(address, console), name="pdx-counting", daemon=True).start()


def _follow(address: str, console: Console) -> None:
    with contextlib.suppress(PdxError), connect(address, timeout_s=ATTACH_S) as node:  # it ends, or never begins
        follow(node.status, console)


def follow(read: Callable[[], NodeStatus], console: Console, pause_s: float = PAUSE_S) -> None:
    """Show a bar for each tier that counts, as `read` says, until none does. How many there are is not known before."""
    with progress(TimeElapsedColumn(), console=console) as shown:
        bars: dict[str, TaskID] = {}
        while True:
            counting = [tier for tier in read().tiers if tier.state == COUNTING]
            for tier in counting:
                if tier.name not in bars:
                    bars[tier.name] = shown.add_task(f"{COUNTING} of {tier.place}", total=None)
                shown.update(bars[tier.name], completed=tier.chunks)
            if not counting:
                return
            time.sleep(pause_s)
