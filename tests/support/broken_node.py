"""A node whose disks a test can break: `broken_node.py CONFIG FOLDER`.

As long as there is a file FOLDER/fail, each read of a chunk fails as that of a broken disk does; as long as there is
FOLDER/hang, none comes back. Tiers pause shortly: a test waits until they are tried again.
"""

import errno
import os
import sys
import time
from pathlib import Path

from pdx.node.__main__ import main
from pdx.store.disk import tier as disk
from pdx.store.remote import tier as remote

PAUSE_S = 1.0


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
    disk.PAUSE_S = remote.PAUSE_S = disk.JOIN_S = PAUSE_S
    os.preadv = broken(Path(sys.argv[2]))
    sys.exit(main())
