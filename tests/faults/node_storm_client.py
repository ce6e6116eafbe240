"""One process of a storm: does so many random things to a node, then dies or leaves politely."""

import os
import random
import signal
import sys

import pdx
from pdx.errors import ArenaFull, ChunkExists, ChunkMissing, StaleSlot


def main(address, seed, steps):
    source = random.Random(seed)
    node = pdx.connect(address, timeout_s=20.0)
    print("ready", flush=True)  # noqa: T201
    sys.stdin.readline()
    held = []
    for _ in range(steps):
        name = str(source.randrange(24))
        try:
            match source.randrange(8):
                case 0 | 1 | 2:
                    chunk = node.reserve(name, source.choice([4096, 50_000, 300_000]), parts=2)
                    chunk.view[:] = bytes([int(name)]) * chunk.nbytes
                    source.choice([chunk.seal, chunk.seal, chunk.abort, lambda chunk=chunk: held.append(chunk)])()
                case 3 | 4:
                    chunk = node.get(name, lease_s=source.choice([0.05, 5.0]))
                    bytes_seen = set(bytes(chunk.view))
                    chunk.check()
                    assert bytes_seen == {int(name)}, f"read {bytes_seen} in {name}"
                    source.choice([chunk.release, lambda chunk=chunk: held.append(chunk)])()
                case 5:
                    node.delete(name)
                case 6 if held:
                    held.pop(source.randrange(len(held)))
                case _:
                    node.lookup([name])
        except (ArenaFull, ChunkExists, ChunkMissing, StaleSlot):
            pass
    if seed % 2:
        node.close()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
