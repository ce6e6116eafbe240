"""A node that starts with very many files on its disk: `python -m pdx.bench.store.count FOLDER`.

1,000,000 files as of chunks of 4 KiB are made, with their names and sizes and no bytes, because a node that counts
looks at no more. Then a node is started and asked for a ping again and again until it has counted all of them. The
time counts from the start of its process. Its memory is that beyond a node with an empty folder, arenas not counted.
The longest answer to a ping is the longest stop of its control loop. The files are new, so that the system has their
names in its caches. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path

import click

from pdx.bench.harness.nodes import asking, one_node
from pdx.client.api import connect
from pdx.config import private_folder
from pdx.memory.keys import named_key
from pdx.store.chunk_format import header_bytes
from pdx.store.disk.chunk_file import ChunkFile, disk_bytes, path_of
from pdx.wire.messages import Ping
from pdx.wire.status import COUNTING, NodeStatus

CHUNK_BYTES, LAYERS = 4096, 1
ARENA_BYTES = 4 << 20
STATUS_S = 0.1  # between two looks at what is counted
PING_S = 0.001


def make(root: Path, files: int) -> None:
    """So many files in a tier's folders."""
    private_folder(root)
    for number in range(files):
        path = path_of(root, ChunkFile(named_key(str(number)), 0, LAYERS, CHUNK_BYTES))
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        with path.open("xb") as file:
            file.truncate(header_bytes(LAYERS) + CHUNK_BYTES)


def counted(root: Path, files: int) -> tuple[int, float, float, float]:
    """The files that a node has counted, the seconds until then, its memory in MB, and its longest stop in seconds."""
    with contextlib.ExitStack() as stack:
        started_at = time.perf_counter()
        limit_bytes = max(1 << 20, files * disk_bytes(CHUNK_BYTES, LAYERS))
        address = stack.enter_context(
            one_node(ARENA_BYTES, disks=[str(root)], disk_limit_bytes=limit_bytes, disk_reserve_bytes=0)
        )
        client = stack.enter_context(asking(address))
        looking = stack.enter_context(connect(address))
        status, looked_at = looking.status(), time.perf_counter()
        while status.tiers[0].state == COUNTING:
            client.timed("ping", Ping())
            time.sleep(PING_S)
            if time.perf_counter() - looked_at > STATUS_S:
                status, looked_at = looking.status(), time.perf_counter()
        taken_s = time.perf_counter() - started_at
        client.timed("ping", Ping())
        return status.tiers[0].chunks, taken_s, memory_mb(status), max(client.times["ping"])


def memory_mb(status: NodeStatus) -> float:
    """What the node's process has for itself alone, without the arena."""
    lines = Path(f"/proc/{status.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024 / 1e6


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--files", default=1_000_000, type=click.IntRange(1), show_default=True)
def main(folder: Path, files: int) -> None:
    """Have a node count files; FOLDER is on the disk in question."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root, empty = Path(name) / "tier", Path(name) / "empty"
        _, _, before_mb, _ = counted(empty, 0)
        make(root, files)
        found, taken_s, used_mb, stop_s = counted(root, files)
    figures = {"counted": found, "taken_s": round(taken_s, 3), "memory_mb": round(used_mb - before_mb, 3)}
    print(json.dumps({"bench": "count", "files": files, **figures, "longest_stop_s": round(stop_s, 4)}))


if __name__ == "__main__":
    main()
