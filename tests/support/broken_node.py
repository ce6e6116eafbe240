"""A node whose disks a test can break: `broken_node.py CONFIG FOLDER`.

As long as there is a file FOLDER/fail, each read of a chunk fails as that of a broken disk does; as long as there is
FOLDER/hang, none comes back. Tiers pause shortly: a test waits until they are tried again.
"""

import errno
import os
import sys
import time
from pathlib import Path

from node_harness import NodeProcess

from pdx.config import NodeConfig
from pdx.node.__main__ import main
from pdx.store import health
from pdx.store.disk import files
from pdx.store.remote import tier as remote

PAUSE_S = 1.0


class BreakableNode(NodeProcess):
    """Such a node, with its log and what breaks it in the folder `place`."""

    def __init__(self, config: NodeConfig, place: Path) -> None:
        super().__init__(config, [__file__], str(place))

    def warnings(self, word: str) -> list[str]:
        return [line for line in self.log.splitlines() if " WARNING " in line and word in line]


def broken(folder):
    """`os.preadv`, but for what there is in this folder."""
    real = os.preadv

    def preadv(*arguments):
        while (folder / "hang").exists():
            time.sleep(0.01)
        if (folder / "fail").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    return preadv


if __name__ == "__main__":
    health.PAUSE_S = remote.PAUSE_S = files.SILENT_S = PAUSE_S
    os.preadv = broken(Path(sys.argv[2]))
    sys.exit(main())
