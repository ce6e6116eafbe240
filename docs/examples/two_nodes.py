"""A producer beside one node streams a tensor to a consumer beside another one, layer by layer, and is asked for more.

    python docs/examples/two_nodes.py ALPHA BETA

ALPHA and BETA are the addresses of two running nodes of these names that know each other. Each role is a process of its
own. docs/tutorials/python-api.md explains it.
"""

import sys
import time
from multiprocessing import get_context

import torch

import pdx
from pdx.errors import ChunkMissing

LAYERS, TOKENS, WIDTH = 16, 256, 512
SHAPE = (LAYERS, TOKENS, WIDTH)
NBYTES = LAYERS * TOKENS * WIDTH * 4  # float32: 8 MiB
WAIT_S = 20.0


def produce(address: str) -> None:
    """Fill a chunk layer by layer, and leave another one where it was made."""
    with pdx.connect(address) as alpha:
        with alpha.reserve("activations", NBYTES, parts=LAYERS, push_to="beta") as chunk:
            activations = chunk.tensor(torch.float32, SHAPE)
            for layer in range(LAYERS):
                torch.full((TOKENS, WIDTH), float(layer), out=activations[layer])
                chunk.fill(layer)  # this layer may travel now
            chunk.seal()

        table = torch.arange(1000, dtype=torch.int64)
        with alpha.reserve("table", table.nbytes) as chunk:
            chunk.tensor(torch.int64).copy_(table)
            chunk.seal()


def consume(address: str) -> None:
    """Wait for what is sent, ask for what is not, and take what was never there for a miss."""
    with pdx.connect(address) as beta:
        with beta.get("activations", wait_s=WAIT_S, source="alpha") as chunk:
            activations = chunk.tensor(torch.float32, SHAPE)
            means = activations.mean(dim=(1, 2)).tolist()
            chunk.check()  # raises StaleSlot if the lease ended while we computed
        assert means == [float(layer) for layer in range(LAYERS)]
        print(f"activations: {LAYERS} layers arrived, each as it was made")  # noqa: T201

        with beta.get("table", wait_s=WAIT_S, source="alpha") as chunk:
            assert int(chunk.tensor(torch.int64).sum()) == 999 * 1000 // 2
        print("table: fetched, because nobody had sent it")  # noqa: T201

        try:
            beta.get("no such thing", wait_s=1.0, source="alpha")
        except ChunkMissing as error:
            print(f"a miss costs a computation, not an answer: {error}")  # noqa: T201


def send_back(address: str) -> None:
    """Push a chunk that is sealed already; the call returns at once."""
    with pdx.connect(address) as beta:
        with beta.reserve("thanks", 6) as chunk:
            chunk.view[:] = b"thanks"
            chunk.seal()
        beta.push("thanks", to="alpha")


def look(address: str) -> None:
    """What came back, and which way everything went."""
    with pdx.connect(address) as alpha:
        with alpha.get("thanks", wait_s=WAIT_S, source="beta") as chunk:
            assert bytes(chunk.view) == b"thanks"
        (peer,) = (each for each in alpha.status().peers if each.name == "beta")
        print(f"to {peer.name} by {peer.channel}: {peer.sent_bytes} bytes, from it: {peer.landed_bytes}")  # noqa: T201
        alpha.delete("activations", "table", "thanks")


def main() -> None:
    """Run the roles, producer and consumer at the same time."""
    alpha, beta = sys.argv[1:]
    for roles in ([(produce, alpha), (consume, beta)], [(send_back, beta), (look, alpha)]):
        processes = [get_context("fork").Process(target=role, args=(at,), daemon=True) for role, at in roles]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 60.0
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                sys.exit(f"{process.name} ended with {process.exitcode}")


if __name__ == "__main__":
    main()
