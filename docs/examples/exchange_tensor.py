"""Two processes exchange a 256 MB tensor through a node; none of them copies it for the other.

    python docs/examples/exchange_tensor.py [ADDRESS]

ADDRESS is that of a running node with at least 300 MB of arena (default: PDX_NODE, else this host's node).
"""

import sys
import time
from multiprocessing import get_context

import torch

import pdx

NAME = "exchange_tensor/weights"
ROWS, COLUMNS = 8192, 8192
NBYTES = ROWS * COLUMNS * 4  # float32: 256 MiB


def produce(address: str | None) -> None:
    """Compute straight into the node's memory: the tensor is the chunk."""
    with pdx.connect(address) as node, node.reserve(NAME, NBYTES) as chunk:
        tensor = chunk.tensor(torch.float32, (ROWS, COLUMNS))
        torch.arange(ROWS * COLUMNS, dtype=torch.float32, out=tensor.view(-1))
        chunk.seal()  # leaving the block without it gives the room back


def consume(address: str | None) -> None:
    """Use the same memory, mapped into this process."""
    with pdx.connect(address) as node, node.get(NAME) as chunk:
        started = time.perf_counter()
        tensor = chunk.tensor(torch.float32, (ROWS, COLUMNS))
        took_ms = (time.perf_counter() - started) * 1e3

        first, last = mapping_of(tensor)
        assert first <= tensor.data_ptr()
        assert tensor.data_ptr() + NBYTES <= last, "the tensor is not the node's memory"
        assert tensor[0, :3].tolist() == [0.0, 1.0, 2.0]
        assert tensor[-1, -1].item() == float(torch.tensor(ROWS * COLUMNS - 1, dtype=torch.float32))
        total = tensor.sum(dtype=torch.float64).item()
        chunk.check()  # raises StaleSlot if the memory was given to another meanwhile
        print(f"got {NBYTES >> 20} MiB in {took_ms:.2f} ms without a copy, sum {total:.3e}")  # noqa: T201
    with pdx.connect(address) as node:
        node.delete(NAME)


def mapping_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses [first, last) of the node's arena in this process, if the tensor lies in it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(".arena"):
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                if first <= tensor.data_ptr() < last:
                    return first, last
    raise AssertionError("the tensor lies in no arena")


def main() -> None:
    """Run producer and consumer, each in a process of its own."""
    address = sys.argv[1] if len(sys.argv) > 1 else None
    for role in (produce, consume):
        process = get_context("fork").Process(target=role, args=(address,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
