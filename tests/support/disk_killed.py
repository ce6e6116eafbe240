"""A process with a disk tier that kills itself at one of its system calls: `disk_killed.py FOLDER SEED CALLS`.

It stores, loads and evicts by `SEED`. The `CALLS`-th call that changes the folder, counted over all threads, is made,
or not, or half of it; then the process is gone.
"""

import os
import random
import signal
import sys
import threading
from pathlib import Path

from disk_bed import Bed, key

CALLS = ["open", "mkdir", "ftruncate", "pwritev", "rename", "unlink", "utime", "fdatasync"]
LIMIT_BYTES = 8 * 40_960


def main(folder, seed, last):
    random_ = random.Random(seed)
    lock = threading.Lock()
    left = last

    def deadly(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            nonlocal left
            if threading.current_thread() is threading.main_thread():
                return real(*args, **kwargs)
            with lock:
                left -= 1
                if left:
                    return real(*args, **kwargs)
                when = random.Random(seed).choice(["before", "half", "after"])
                try:
                    if when == "half" and name == "pwritev":
                        fd, [data], offset = args
                        return real(fd, [data[: len(data) // 2]], offset)
                    return real(*args, **kwargs) if when == "after" else None
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, call)

    for name in CALLS:
        deadly(name)
    bed = Bed(Path(folder), limit_bytes=LIMIT_BYTES)
    while True:
        copies = [bed.start_store(random_.randrange(20), at=at) for at in range(4)]
        number = random_.randrange(20)
        if bed.has(number):
            bed.load(number, at=8)
        if not random_.randrange(8):
            bed.tier.evict([key(random_.randrange(20))])
        for copy in copies:
            if copy is not None and bed.end(copy) is None:
                os.write(1, b"stored\n")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
