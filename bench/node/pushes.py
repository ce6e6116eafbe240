"""What pushes cost the nodes, by how much is under way: `python -m pdx.bench.node.pushes`.

The sender's control loop, in this process, on a real store, by its processor time: one Fill of a layer of 32 chunks
while other pushes of as many layers are under way, and a step of 80 such Fills. The receiver, in a real node: its
processor time per GB where a prompt of 2,048 chunks is filled layer by layer, against prompts of 32 chunks of the same
size. The last line is JSON.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pdx.bench.harness.nodes import TO, node_pair
from pdx.bench.harness.report import Figure, at_most, plain, publish
from pdx.bench.harness.timing import CpuClock
from pdx.client.api import Node
from pdx.memory.arena import GRANULE_BYTES, Arena
from pdx.memory.keys import named_key
from pdx.memory.slot import Slot
from pdx.store.chunk import Claim
from pdx.store.copies import Copies
from pdx.store.copy import Copy, Priority
from pdx.store.store import Store
from pdx.store.tier import Grant, Held, Job, Tier
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Admit, Admitted, Fill

WRITER = 1
LAYERS, STEP = 80, 32  # of a chunk; chunks of one prefill step of 8k tokens
# Slices and what depends on their size are a thousandth of real ones (64 KB): the loop never touches their bytes.
SLICE_BYTES, GROUP_BYTES, WINDOW_BYTES = 64, 1 << 10, 32 << 10
FEW, MANY = (1, 64), (64, 512)  # pushes, chunks of each
FILL_GOAL_MS = 0.3
ROUNDS = 5

SCHEME = "shm"
CHUNK_BYTES, CHUNK_LAYERS = 512 << 10, 16  # a layer of 32 chunks is one write
SMALL, LARGE = 32, 2048
TOTAL_BYTES = LARGE * CHUNK_BYTES
ARENA_BYTES = TOTAL_BYTES + (64 << 20)
RECEIVER_ROUNDS = 3
RECEIVER_GOAL = 1.2
PUSH_S = 120.0
ANSWER_S = 20.0
ASK_S = 0.02  # between two questions, each of which is work for the receiver


class StandIn(Tier):
    """The way to a peer that is always there and acknowledges when it is asked to."""

    kind, name = "peer", TO

    def __init__(self) -> None:
        self.copies: list[int] = []
        self.jobs: list[Job] = []

    @property
    def is_ready(self) -> bool:
        return True

    def find(self, keys: Sequence[bytes], shards: int) -> list[Held]:
        return []

    def admit(self, copy: Copy) -> None:
        self.copies.append(copy.number)

    def store(self, job: Job) -> None:
        self.jobs.append(job)

    def load(self, job: Job) -> None:
        raise AssertionError("the bench loads nothing")

    def cancel(self, copy: Copy) -> None:
        """The bench gives none up."""

    def over(self, copy: Copy) -> None:
        """Nobody waits for it."""

    def evict(self, keys: Sequence[bytes], shards: int = 0) -> int:
        return 0

    def close(self) -> None:
        pass


class Loop:
    """A store with `pushes` of `chunks` each under way, all granted and none filled."""

    def __init__(self, arena: Arena, pushes: int, chunks: int) -> None:
        env = Env()
        self._store = Store(arena, env)
        self._way = StandIn()
        self._way.max_inflight_bytes = WINDOW_BYTES
        self._copies = Copies(self._store, env, group_bytes=GROUP_BYTES)
        self._slots = [self._push(chunks) for _ in range(pushes)]

    def _push(self, chunks: int) -> list[Slot]:
        keys = [os.urandom(16) for _ in range(chunks)]
        claim = Claim(keys=keys, nbytes=LAYERS * SLICE_BYTES, layers=LAYERS, owner=WRITER, writers=[WRITER])
        _, slots, _ = self._store.reserve(claim)
        assert len(slots) == chunks
        self._copies.store(self._way, keys, 1, priority=Priority.HANDOFF, deadline=60.0)
        self._copies.granted(self._way, self._way.copies[-1], Grant(range(chunks), slots))
        return slots

    def step(self, *, acknowledged: bool) -> tuple[list[float], list[float]]:
        """Fill a step's chunks layer by layer; the seconds of each Fill, and of each acknowledgement."""
        fills, acks = [], []
        for layer in range(LAYERS):
            fills.append(_seconds(lambda layer=layer: self._fill(layer)))  # type: ignore[misc]
            while acknowledged and self._way.jobs:
                acks.append(_seconds(self._acknowledge))
        return fills, acks

    def _fill(self, layer: int) -> None:
        self._copies.changed(self._store.fill(self._slots[0][:STEP], layer, 1, WRITER))
        self._copies.pump()

    def _acknowledge(self) -> None:
        self._copies.done(self._way, self._way.jobs.pop(0), None)
        self._copies.pump()


def _seconds(work: Callable[[], None]) -> float:
    """Of processor time: the loop waits for nothing, and a core that is taken away is not its cost."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def sender() -> list[Figure]:
    """The control loop of the node that pushes."""
    steps: dict[tuple[tuple[int, int], bool], list[tuple[list[float], list[float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="pdx-bench-", dir="/dev/shm") as folder:
        for turn in range(ROUNDS):
            for under_way in (FEW, MANY):
                for acknowledged in (True, False):
                    path = Path(folder) / "arena"
                    slot_bytes = -(-LAYERS * SLICE_BYTES // GRANULE_BYTES) * GRANULE_BYTES
                    with Arena.create(path, under_way[0] * under_way[1] * slot_bytes) as arena:
                        loop = Loop(arena, *under_way)
                        gc.collect()
                        found = loop.step(acknowledged=acknowledged)
                        if turn:  # the first is for warming up
                            steps.setdefault((under_way, acknowledged), []).append(found)
                        del loop
                    path.unlink()

    def fill_ms(under_way: tuple[int, int], *, acknowledged: bool) -> float:
        return statistics.median(s for fills, _ in steps[under_way, acknowledged] for s in fills) * 1e3

    def ack_ms(under_way: tuple[int, int]) -> float:
        return statistics.median(s for _, acks in steps[under_way, True] for s in acks) * 1e3

    def step_ms(under_way: tuple[int, int]) -> float:
        return statistics.median(sum(fills) + sum(acks) for fills, acks in steps[under_way, True]) * 1e3

    many = f"{MANY[0]} pushes of {MANY[1]} chunks"
    few = f"one push of {FEW[1]}"
    figures = []
    for acknowledged, window in ((True, "the window has room"), (False, "the window is full")):
        value, alone = fill_ms(MANY, acknowledged=acknowledged), fill_ms(FEW, acknowledged=acknowledged)
        note = f"{value / alone:.2f} times that with {few}"
        figures.append(
            at_most(f"one Fill of {STEP} chunks, {many} under way, {window}", value, "ms", FILL_GOAL_MS, note)
        )
    figures.append(plain("an acknowledgement, the same", ack_ms(MANY), "ms", f"{ack_ms(MANY) / ack_ms(FEW):.2f} times"))
    ratio = f"{step_ms(MANY) / step_ms(FEW):.2f} times that with {few}"
    figures.append(plain(f"a step: {LAYERS} layers of {STEP} chunks, all acknowledged", step_ms(MANY), "ms", ratio))
    return figures


class Prompts:
    """Prompts that are filled at one node and land at its peer."""

    def __init__(self, a: Node, b: Node) -> None:
        self._a = a
        self._b = b
        self._connection = a._connection  # one Fill for a layer of all chunks, as engines have it
        self._clock = CpuClock(b.status().pid)

    def receiver_s(self, chunks: int) -> float:
        """Processor seconds of the receiver per GB, where TOTAL_BYTES come in prompts of so many chunks."""
        prompts = TOTAL_BYTES // (chunks * CHUNK_BYTES)
        return sum(self._one(chunks) for _ in range(prompts)) / TOTAL_BYTES * 1e9

    def _one(self, chunks: int) -> float:
        names = [os.urandom(8).hex() for _ in range(chunks)]
        keys = [named_key(name) for name in names]
        before = self._clock.seconds()
        landed = self._landed()
        answer = self._connection.call(Admit(keys, CHUNK_BYTES, layers=CHUNK_LAYERS, push_to=TO), ANSWER_S)
        assert isinstance(answer, Admitted)
        assert len(answer.granted_slots) == chunks
        for layer in range(CHUNK_LAYERS):
            self._connection.call(Fill(answer.granted_slots, layer, 1, seal=layer == CHUNK_LAYERS - 1), ANSWER_S)
        wait_until(
            lambda: not any(peer.pushes for peer in self._a.status().peers),
            "all is acknowledged",
            PUSH_S,
            pause_s=0.001,
        )
        has_landed = landed + chunks * CHUNK_BYTES
        time.sleep(ASK_S)
        wait_until(lambda: self._landed() == has_landed, "all is sealed at the peer", PUSH_S, pause_s=ASK_S)
        used = self._clock.seconds() - before
        for node in (self._a, self._b):
            node.delete(*names)
        return used

    def _landed(self) -> int:
        return next(peer.landed_bytes for peer in self._b.status().peers)


def receiver() -> list[Figure]:
    found: dict[str, list[float]] = {"small": [], "large": []}
    with node_pair(SCHEME, ARENA_BYTES, peer_share=1.0) as (a, b):
        prompts = Prompts(a, b)
        prompts.receiver_s(SMALL)
        for _ in range(RECEIVER_ROUNDS):  # in turns, because the speed of the machine drifts
            found["small"].append(prompts.receiver_s(SMALL))
            found["large"].append(prompts.receiver_s(LARGE))
    small, large = (statistics.median(found[name]) for name in ("small", "large"))
    ratio = statistics.median(many / few for many, few in zip(found["large"], found["small"], strict=True))
    size = f"{CHUNK_BYTES >> 10} KiB in {CHUNK_LAYERS} layers"
    return [
        plain(f"receiver's CPU per GB, prompts of {SMALL} chunks of {size}", small, "s", SCHEME),
        plain(f"receiver's CPU per GB, a prompt of {LARGE:,} chunks of {size}", large, "s", SCHEME),
        at_most("the second in the first's", ratio, "", RECEIVER_GOAL),
    ]


def main() -> None:
    publish("pushes", "what pushes cost the nodes, by how much is under way", [*sender(), *receiver()])


if __name__ == "__main__":
    main()
